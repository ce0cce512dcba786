"""The bias that balances experts without a loss.

It moves one step an optimizer step, by the choices of all processes.
"""

import copy
import os
from functools import partial

import pytest
import timm
import torch
from common import SMALL_VIT
from processes import join_group, messages_of_the_package, run_ranks
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import timm_moe
from timm_moe.callbacks import start_averaging
from timm_moe.layers import (
    BalancingBias,
    RecordingRouter,
    Router,
    TopKRouter,
    linear_logits,
    routing_to,
)

needs_processes = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without torch.distributed"
)


def make_model(**options):
    torch.manual_seed(0)
    options = {**SMALL_VIT, "capacity_factor": "none", **options}
    model = timm.create_model("vit_tiny_moe", balance="bias", num_experts=4, **options)
    for layer in timm_moe.moe_layers(model).values():
        nn.init.normal_(layer.router.weight, std=0.3)
    return model


def biases(model):
    return [module for module in model.modules() if isinstance(module, BalancingBias)]


def steps(model):
    return torch.stack([bias.steps for bias in biases(model)]).tolist()


def loads(model, images):
    """Number of choices of each expert in each layer, by the router alone."""
    counted, handles = [], []
    for layer in timm_moe.moe_layers(model).values():
        handles.append(
            layer.router.register_forward_hook(
                lambda router, args, routing: counted.append(
                    routing.experts().flatten().bincount(minlength=5)[:4]
                )
            )
        )
    with torch.no_grad():
        model(images)
    for handle in handles:
        handle.remove()
    return counted


def signs(counts):
    return [
        [(sum(row) > 4 * n) - (sum(row) < 4 * n) for n in row]
        for row in (count.tolist() for count in counts)
    ]


def test_it_moves_once_a_step_by_all_micro_batches():
    model = make_model()
    first, second = torch.randn(2, 3, 3, 32, 32)
    expected = signs(
        [a + b for a, b in zip(loads(model, first), loads(model, second), strict=True)]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images in (first, second):
        model(images).sum().backward()
    assert not any(map(any, steps(model)))
    optimizer.step()
    assert steps(model) == expected
    assert any(map(any, expected))
    optimizer.step()  # no image was seen since
    assert steps(model) == expected


def test_the_choices_of_all_groups_count():
    model, images = make_model(group_images=1), torch.randn(3, 3, 32, 32)
    expected = loads(model, images)
    model(images)
    for bias, count in zip(biases(model), expected, strict=True):
        assert torch.equal(bias.load, count)


def test_only_an_optimizer_that_trains_the_router_moves_its_bias():
    model, other, images = make_model(), make_model(), torch.randn(2, 3, 32, 32)
    (model(images).sum() + other(images).sum()).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert not any(map(any, steps(model)))
    routers = [layer.router.weight for layer in timm_moe.moe_layers(model).values()]
    torch.optim.SGD(routers, lr=0.1).step()
    assert all(map(any, steps(model)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.first_case
def test_repetitions_in_backward_do_not_count(compiled):
    model, images = make_model(), torch.randn(4, 3, 32, 32)
    other = copy.deepcopy(model)
    if compiled:
        for block in other.blocks:
            block.compile(backend="aot_eager")
    blocks = other.blocks
    other.blocks = nn.Identity()
    other.blocks.forward = lambda x: checkpoint(blocks, x, use_reentrant=False)
    for network in (model, other):
        network(images).sum().backward()
    counts = [bias.load for bias in biases(model)]
    repeated = [layer.router.balancing_bias for layer in (blocks[1].mlp, blocks[3].mlp)]
    for bias, count in zip(repeated, counts, strict=True):
        # Compiled code cannot ask whether backward is running; but it repeats all choices, which
        # changes no sign.
        times = bias.load.sum() // count.sum() if compiled else 1
        assert torch.equal(bias.load, times * count)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_keeps_the_choices(fused):
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler.scale(model(torch.randn(2, 3, 32, 32)).sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not any(map(any, steps(model)))
    assert all(bias.load is not None for bias in biases(model))


def test_a_buffer_that_fsdp1_has_cast_counts_on_in_float32():
    bias = BalancingBias(2, 0.001)
    # MixedPrecision(buffer_dtype=torch.bfloat16); 257 is no bfloat16.
    bias.steps.data = bias.steps.bfloat16()
    for _ in range(300):
        bias.update(torch.tensor([3, 1]))
    assert bias.steps.tolist() == [-300, 300]


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.first_case
def test_a_step_that_runs_its_forwards_is_that_of_a_loop(accumulated):
    """Train by a closure, as Lightning's automatic optimization and LBFGS do."""
    outcomes = []
    for by_closure in (False, True):
        model = make_model(bias_rate=0.1)
        optimizer, generator = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.Generator().manual_seed(1),
        )

        def closure(model=model, generator=generator):
            model(torch.randn(3, 3, 32, 32, generator=generator)).square().mean().backward()

        history = []
        for _ in range(4):
            for _ in range(accumulated - 1):
                closure()
            if by_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            optimizer.zero_grad()
            history.append(steps(model))
        outcomes.append((history, [parameter.detach().clone() for parameter in model.parameters()]))
    (history, weights), (other_history, other_weights) = outcomes
    assert history == other_history
    assert any(map(any, history[0]))
    assert all(map(torch.equal, weights, other_weights))


@pytest.mark.parametrize("begins", ["a new run", "a new run by timm", "a loaded state"])
def test_choices_of_an_interrupted_run_do_not_count(begins):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 32, 32))
    if begins == "a new run":
        start_averaging(model, optimizer, 3)
    elif begins == "a new run by timm":
        create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=3)
    else:
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert all(bias.load is None for bias in biases(model))
    optimizer.step()
    assert not any(map(any, steps(model)))


def test_evaluation_does_not_count_and_the_choice_follows():
    model, images = make_model(), torch.randn(2, 3, 32, 32)
    model.eval()(images)
    assert all(bias.load is None for bias in biases(model))
    biases(model)[0].steps.copy_(torch.tensor([0, 0, 0, 10_000]))
    assert loads(model, images)[0][3] == 2 * 16 + 2


def test_it_survives_saving_half_precision_averages_and_copies():
    model = make_model()
    ema = ModelEmaV3(model, decay=0.5)
    for bias in biases(model):
        bias.steps.copy_(torch.tensor([4097, -4097, 3, 0]))
    ema.update(model)
    other = make_model()
    other.load_state_dict(model.state_dict())
    for network in (other, copy.deepcopy(model).bfloat16()):
        assert steps(network) == [[4097, -4097, 3, 0]] * 2
    assert steps(ema.module) == [[2048.5, -2048.5, 1.5, 0]] * 2  # as the router's weights
    mean = AveragedModel(other, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=True)
    mean.update_parameters(other)
    for bias in biases(other):
        bias.steps.zero_()
    mean.update_parameters(other)
    assert steps(mean.module) == [[0.75 * 4097, -0.75 * 4097, 2.25, 0]] * 2
    assert "blocks.1.mlp.router.balancing_bias.steps" in model.state_dict()


def test_a_copy_has_no_choices_and_no_group_of_processes():
    bias = BalancingBias(2, 0.001)
    bias.count(torch.tensor([3, 1]))
    bias.process_groups = ("a group",)
    other = copy.deepcopy(bias)
    assert other.load is None
    assert other.process_groups is None
    assert bias.load.tolist() == [3, 1]


@pytest.mark.parametrize("frozen", ["the router", "all but the head"])
def test_a_frozen_router_goes_on_as_it_was(frozen):
    model, images = make_model(), torch.randn(2, 3, 32, 32)
    routers = nn.ModuleList(layer.router for layer in timm_moe.moe_layers(model).values())
    (routers if frozen == "the router" else model).requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(images).sum().backward()
        optimizer.step()
    assert not any(map(any, steps(model)))


@pytest.mark.ci
def test_it_evens_out_the_loads():
    model, images = make_model(bias_rate=0.005), 0.1 * torch.randn(8, 3, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = loads(model, images)
    for _ in range(100):
        model(images).sum().backward()
        optimizer.step()
    spread = [max(count.tolist()) / count.double().mean().item() for count in loads(model, images)]
    assert all(max(count.tolist()) / count.double().mean().item() > 1.5 for count in before)
    assert all(value < 1.15 for value in spread), spread


def worker(rank, folder):
    join_group(rank, folder)
    model = make_model()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = signs(loads(model, images))
    task = ClassificationTask(
        model, nn.CrossEntropyLoss(), device=torch.device("cpu"), verbose=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    task.prepare_distributed(device_ids=None)
    task(images[2 * rank : 2 * rank + 2], torch.arange(2))["loss"].backward()
    optimizer.step()
    assert steps(model) == expected, (steps(model), expected)
    os._exit(0)  # torch 2.12 may wait for ever where DDP is freed just after a collective of gloo


def worker_of_zero(rank, folder):
    """Each process steps the parameters of other layers, in an optimizer within the optimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    join_group(rank, folder, processes=3)
    outcomes = []
    adamw = torch.optim.AdamW
    for make in (adamw, partial(ZeroRedundancyOptimizer, optimizer_class=adamw)):
        model = make_model(moe_layers="every-1")
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = make(model.parameters(), lr=1e-3)
        for step in range(3):
            images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(step))
            wrapped(images + rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append(steps(model))
    assert outcomes[0] == outcomes[1], outcomes
    assert any(map(any, outcomes[0]))
    os._exit(0)


def worker_alone(rank, folder):
    """Return models that the processes train each for itself.

    One of them has fewer layers, and the last has none.
    """
    join_group(rank, folder, processes=3)
    told = messages_of_the_package()
    if rank < 2:
        model = make_model(moe_layers="1,3" if rank else "3")
        if rank:
            for bias in biases(model):
                bias.process_groups = ()
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(rank))
        expected = signs(loads(model, images))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(images).sum().backward()
        optimizer.step()
        assert steps(model) == expected, (steps(model), expected)
        model(images).sum().backward()
        optimizer.step()
        name = "The balancing bias of blocks.3.mlp counts the choices of this process alone"
        assert [message.startswith(name) for message in told] == [True] * (1 - rank)
    os._exit(0)


def worker_in_pairs(rank, folder):
    """Two processes of one group and one of another.

    The group is that of the wrapper around the model, or it is named where there is none.
    """
    join_group(rank, folder, processes=3)
    told = messages_of_the_package()
    pair, single = torch.distributed.new_group([0, 1]), torch.distributed.new_group([2])
    own = single if rank == 2 else pair
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = signs(loads(make_model(), images[4:] if rank == 2 else images[:4]))

    def named(model, process_group):
        for bias in biases(model):
            bias.process_groups = (process_group,)
        return model

    ddp = nn.parallel.DistributedDataParallel
    for wrap in (ddp, named):
        model = make_model()
        around = [ddp(nn.Linear(1, 1)), wrap(model, process_group=own), ddp(nn.Linear(1, 1))]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        around[1](images[2 * rank : 2 * rank + 2]).sum().backward()
        optimizer.step()
        assert steps(model) == expected, (wrap, steps(model), expected)
    assert not told
    os._exit(0)


def worker_of_fsdp1(rank, folder, kind, message):
    """By default FSDP1 leaves a router no parameter; a hybrid one has two groups."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    join_group(rank, folder)
    told = messages_of_the_package()
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    options = {
        "flat": {},
        "parameters": dict(use_orig_params=True),
        "hybrid": dict(
            use_orig_params=True,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            process_group=(alone, torch.distributed.group.WORLD),
        ),
    }
    model = make_model()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = signs(loads(make_model(), images))
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options[kind])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(2):
        wrapped(images[2 * rank : 2 * rank + 2]).sum().backward()
        optimizer.step()
        assert kind != "parameters" or step or steps(model) == expected
    assert len(told) == (kind != "parameters"), told
    assert message in "".join(told)
    os._exit(0)


@needs_processes
@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "message"),
    [("flat", "do not move"), ("parameters", ""), ("hybrid", "of this process alone")],
)
def test_biases_under_fsdp1_move_or_are_told_of(kind, message, tmp_path):
    run_ranks(worker_of_fsdp1, (str(tmp_path), kind, message), 2)


def worker_of_one(rank, folder):
    join_group(rank, folder, processes=1)
    told = messages_of_the_package()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    assert any(map(any, steps(model)))
    assert not told
    os._exit(0)


@needs_processes
@pytest.mark.ci
def test_a_group_of_one_process_leaves_none_out(tmp_path):
    run_ranks(worker_of_one, (str(tmp_path),), 1)


@needs_processes
@pytest.mark.ci
def test_an_optimizer_that_is_spread_over_processes(tmp_path):
    run_ranks(worker_of_zero, (str(tmp_path),), 3)


@needs_processes
@pytest.mark.parametrize("work", [worker_alone, worker_in_pairs])
@pytest.mark.first_case
def test_only_processes_that_train_a_layer_as_one_share_its_choices(tmp_path, work):
    run_ranks(work, (str(tmp_path),), 3)


@needs_processes
def test_the_choices_of_all_processes_count(tmp_path):
    run_ranks(worker, (str(tmp_path),), 2)


def worker_of_meshes(rank, folder):
    """FSDP2 spreads a model over all processes of its mesh, which has two dimensions for HSDP.

    Experts may be spread over a mesh of their own. It counts where the router has none.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join_group(rank, folder)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = signs(loads(make_model(), images))
    meshes = [
        init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[: len(shape)])
        for shape in ((2,), (1, 2), (2, 1))
    ]
    whole, _, in_two = meshes
    of_one = timm_moe.parallelize_experts(make_model(), in_two["shard"])
    models = [
        *(fully_shard(make_model(), mesh=mesh) for mesh in meshes),
        fully_shard(
            of_one, mesh=whole, ignored_params=set(timm_moe.expert_parameters(of_one).values())
        ),
        timm_moe.parallelize_experts(make_model(), whole),
    ]
    for number, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        model(images[2 * rank : 2 * rank + 2]).sum().backward()
        optimizer.step()
        assert steps(model) == expected, (number, steps(model), expected)
    os._exit(0)


@needs_processes
def test_the_choices_of_all_processes_of_a_mesh_count(tmp_path):
    run_ranks(worker_of_meshes, (str(tmp_path),), 2)


class OwnRouter(RecordingRouter):
    """A router of a user's, whose reset_parameters knows of its own weights alone."""

    def __init__(self, dim, num_experts):
        super().__init__(num_experts, {}, bias_rate=0.1)
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight)

    def forward(self, x):
        scores = self.balancing_bias(linear_logits(x.flatten(0, -2), self.weight).sigmoid())
        gate, expert = scores.max(1, keepdim=True)
        return routing_to(expert, gate, self.num_experts)


class Around(Router):
    """A router of a user's around one of the package."""

    def __init__(self, dim, num_experts):
        super().__init__(num_experts)
        self.inner = TopKRouter(dim, num_experts, bias_rate=0.1)

    def reset_parameters(self):
        nn.init.normal_(self.inner.weight)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("router", [OwnRouter, Around])
def test_the_bias_of_a_users_router_starts_anew_with_its_weights(router):
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, router=router)
    for bias in biases(model):
        bias.steps.fill_(7)
    model.init_weights()
    with torch.device("meta"):
        sketch = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, router=router)
    for made in (model, sketch.to_empty(device="cpu")):
        assert len(biases(made)) == 2
        assert not any(bias.steps.any() for bias in biases(made))
