"""Experts over processes (gloo) as they are used.

They run on the form of a GPU, in evaluation, and with what surrounds training.
"""

import copy
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import timm
import torch
from common import EXAMPLES, SMALL_VIT, InTurn
from devices import WIDTH, ByTwo, equal_slots
from processes import (
    free_port,
    join_group,
    parallelized,
    run_code,
    run_new,
    run_ranks,
    torchrun,
)
from timm.layers import Mlp
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import timm_moe
from timm_moe.layers import (
    EwaMlp,
    ExpertChoiceRouter,
    MoeMlp,
    RandomPartition,
    TopKRouter,
)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
EWA, ROUTED = "vit_tiny_ewa_moe", "vit_tiny_moe"


def make(name=ROUTED, **options):
    torch.manual_seed(0)
    routed = dict(top_k=2, group_images=1) if name == ROUTED else {}
    model = timm.create_model(
        name,
        **{**SMALL_VIT, "depth": 2, "num_experts": 4, **routed},
        expert_init="independent",
        **options,
    )
    for path, parameter in model.named_parameters():
        if "router" in path:
            nn.init.normal_(parameter, std=0.2)
    return model


def batch():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(4)


def step(model, optimizer, part):
    images, labels = batch()
    loss = F.cross_entropy(model(images[part]), labels[part]) + timm_moe.auxiliary_loss(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, part, steps):
    for _ in range(steps):
        step(model, optimizer, part)


def own_experts_worker(rank, folder):
    """Each process has two of EWA's four experts.

    It computes its rows by its own, evenly and in equal slots.
    """
    join_group(rank, folder)
    torch.manual_seed(0)
    layer = EwaMlp(Mlp(5, 6), RandomPartition(4), "independent")
    whole = [
        layer.to_ffn({n: p.detach()[e] for n, p in layer.named_expert_parameters()})
        for e in range(4)
    ]
    timm_moe.parallelize_experts(nn.ModuleDict({"mlp": layer}), init_device_mesh("cpu", (2,)))
    x = torch.randn(1, 7, 5, generator=torch.Generator().manual_seed(rank))
    with equal_slots():
        y = layer(x)
        is_of_ET = torch.stack(
            [torch.isclose(y, network(x)).all(-1).squeeze(0) for network in whole]
        )
    assert sorted(is_of_ET.sum(1).tolist()) == [0, 0, 3, 4]
    assert is_of_ET.sum(1)[2 * rank : 2 * rank + 2].sum() == 7
    y.sum().backward()
    torch.distributed.destroy_process_group()


def test_each_process_computes_its_own_experts_in_equal_slots(tmp_path):
    run_ranks(own_experts_worker, (str(tmp_path),), 2)


def empty_worker(rank, folder):
    """A process without images does not stop the other, whatever the form of the experts' input.

    A copy of the layer computes the same.
    """
    join_group(rank, folder)
    torch.manual_seed(0)
    layer = MoeMlp(Mlp(5, 6), ExpertChoiceRouter(5, 4, noise_std=0.0), "independent")
    whole = copy.deepcopy(layer)
    timm_moe.parallelize_experts(nn.ModuleDict({"mlp": layer}), init_device_mesh("cpu", (2,)))
    x = torch.randn(rank, 8, 5)
    for slots in (nullcontext, equal_slots):
        with slots():
            y = layer(x)
            y.sum().backward()
        torch.testing.assert_close(y, whole(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), whole(x))
    torch.distributed.destroy_process_group()


def test_a_process_without_images(tmp_path):
    run_ranks(empty_worker, (str(tmp_path),), 2)


def two_by_two_worker(rank, folder, held, is_placed):
    """EWA has twice as many experts as a process holds.

    Two of the four processes hold parts of the same experts and train them on their images.
    """
    join_group(rank, folder, 4)
    torch.manual_seed(0)
    model = timm.create_model(
        EWA, **{**SMALL_VIT, "depth": 2, "num_experts": 2 * held}, expert_init="independent"
    )
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    timm_moe.parallelize_experts(model, mesh["ep"])
    placement = timm_moe.expert_placement(model) if is_placed else None
    for layer in timm_moe.moe_layers(model).values():
        fully_shard(layer, mesh=mesh["efsdp"], shard_placement_fn=placement)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    for each, part, first in (
        (model, slice(rank, rank + 1), [0]),
        (reference, slice(4), [0, held, 0, held]),
    ):
        for layer in timm_moe.moe_layers(each).values():
            layer.router = InTurn(first, held)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, foreach=False)
        timm_moe.ExpertWeightAveraging(each, optimizer, share_rate=0.3, total_updates=3)
        train(each, optimizer, part, steps=3)
    for path, tensor in get_model_state_dict(model, options=FULL).items():
        torch.testing.assert_close(
            tensor, reference.state_dict()[path], rtol=1e-4, atol=1e-6, msg=path
        )
    torch.distributed.destroy_process_group()


@pytest.mark.ci
@pytest.mark.parametrize(("held", "is_placed"), [(1, False), (2, False), (2, True)])
def test_ewa_in_two_dimensions(tmp_path, held, is_placed):
    run_ranks(two_by_two_worker, (str(tmp_path), held, is_placed), 4)


def evaluation_worker(rank, folder):
    """Each process has batches of another size.

    They run in inference mode, as timm_moe.analysis evaluates. A process may hold all experts, too.
    """
    join_group(rank, folder)
    images, _ = batch()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("efsdp", "ep"))["ep"]
    for name in (EWA, ROUTED):
        reference = make(name).eval()
        models = [
            parallelized(copy.deepcopy(reference)),
            timm_moe.parallelize_experts(copy.deepcopy(reference), alone),
        ]
        with torch.inference_mode():
            for model in models:
                torch.testing.assert_close(model(images[rank:]), reference(images[rank:]))
    torch.distributed.destroy_process_group()


def test_evaluation_in_inference_mode(tmp_path):
    run_ranks(evaluation_worker, (str(tmp_path),), 2)


def low_precision_worker(rank, folder):
    """A sum of the four experts in bfloat16 would be 256, as 257 is no bfloat16."""
    join_group(rank, folder, 4)
    layer = EwaMlp(Mlp(5, 6), RandomPartition(4)).bfloat16().eval()
    with torch.no_grad():
        layer.fc2.weight.zero_()
        layer.fc2.bias.copy_(torch.tensor([256, 1, 1, 1]).unsqueeze(1))
    timm_moe.parallelize_experts(nn.ModuleDict({"mlp": layer}), init_device_mesh("cpu", (4,)))
    y = layer(torch.zeros(1, 2, 5, dtype=torch.bfloat16))
    assert torch.equal(y, torch.full_like(y, 259 / 4))
    torch.distributed.destroy_process_group()


@pytest.mark.ci
def test_the_mean_of_experts_in_bfloat16_is_rounded_once(tmp_path):
    run_ranks(low_precision_worker, (str(tmp_path),), 4)


def gradients_worker(rank, folder, processes):
    """Compute gradients in eval mode, of two experts or one in each process.

    The loss is the mean over the processes.
    """
    join_group(rank, folder, processes)
    images, labels = batch()
    own = slice(rank * 4 // processes, (rank + 1) * 4 // processes)
    reference = make(EWA).eval()
    model = timm_moe.parallelize_experts(
        copy.deepcopy(reference), init_device_mesh("cpu", (processes,))
    )
    F.cross_entropy(reference(images), labels).backward()
    F.cross_entropy(model(images[own]), labels[own]).backward()
    expected = timm_moe.expert_parameters(reference)
    for name, parameter in timm_moe.expert_parameters(model).items():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), expected[name].grad, rtol=1e-4, atol=1e-6, msg=name
        )
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    F.cross_entropy(compiled(images[own]), labels[own]).backward()
    for name, parameter in timm_moe.expert_parameters(model).items():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), expected[name].grad, rtol=1e-4, atol=1e-6, msg=name
        )
    torch.distributed.destroy_process_group()


@pytest.mark.ci
@pytest.mark.parametrize("processes", [2, 1, 4])
def test_gradients_of_ewa_in_eval_mode_are_those_of_one_process(tmp_path, processes):
    run_ranks(gradients_worker, (str(tmp_path), processes), processes)


def refusals(rank, folder):
    join_group(rank, folder)
    images, _ = batch()
    mesh = init_device_mesh("cpu", (2,))
    pruned = make()
    torch.nn.utils.prune.random_unstructured(pruned.blocks[1].mlp.fc2, "weight", 0.5)
    message = r"fc2\.weight .*blocks\.1\.mlp.*cannot be spread"
    with pytest.raises(ValueError, match=message):
        timm_moe.parallelize_experts(pruned, mesh)
    assert not any(hasattr(parameter, "placements") for parameter in pruned.parameters())
    model = timm.create_model("vit_tiny_patch16_224", **{**SMALL_VIT, "depth": 2})
    older = [torch.optim.SGD(model.parameters(), lr=0.1)]
    timm_moe.convert_to_moe(model, num_experts=4)
    older.append(torch.optim.SGD(model.parameters(), lr=0.1))
    parallelized(model)
    for optimizer in older:
        with pytest.raises(ValueError, match=r"older.*blocks\.1\.mlp.*parallelize_experts"):
            step(model, optimizer, slice(4))
    for name in (EWA, ROUTED):
        model = timm_moe.parallelize_experts(make(name).eval(), mesh)
        with pytest.raises(RuntimeError, match=r"exported.*get_model_state_dict"):
            torch.export.export(model, (images,))
        with pytest.raises(RuntimeError, match=r"exported.*get_model_state_dict"):
            torch.jit.trace(model, (images,))
    torch.distributed.destroy_process_group()


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_refusals_beside_training(tmp_path):
    run_ranks(refusals, (str(tmp_path),), 2)


def compiled_worker(rank, folder, name):
    """Compiled blocks, and gradients that are accumulated before the processes exchange them."""
    join_group(rank, folder)
    images, labels = batch()
    reference = make(name)
    model = copy.deepcopy(reference)
    models = [parallelized(reference), parallelized(model)]
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for each in models:
        torch.manual_seed(rank)  # of the partitions of EWA
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for last in (False, True):
            each.set_requires_gradient_sync(last or each is reference)
            (F.cross_entropy(each(images), labels) + timm_moe.auxiliary_loss(each)).backward()
        optimizer.step()
    expected = get_model_state_dict(reference, options=FULL)
    for path, tensor in get_model_state_dict(model, options=FULL).items():
        torch.testing.assert_close(tensor, expected[path], rtol=1e-4, atol=1e-6, msg=path)
    torch.distributed.destroy_process_group()


@pytest.mark.ci
@pytest.mark.parametrize("name", [EWA, ROUTED])
def test_compiled_blocks_and_accumulation(tmp_path, name):
    run_ranks(compiled_worker, (str(tmp_path), name), 2)


def ungrouped_worker(rank, folder):
    """Compile a network that runs expert by expert.

    The compiler would run every expert on every row.
    """
    join_group(rank, folder)
    torch.manual_seed(0)
    layer = MoeMlp(ByTwo(), TopKRouter(WIDTH, 4, 2), "independent").eval()
    x, model = torch.randn(3, 5, WIDTH), nn.ModuleDict({"mlp": layer})
    expected = layer(x)
    timm_moe.parallelize_experts(model, init_device_mesh("cpu", (2,)))
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager")(x), expected)
    torch.distributed.destroy_process_group()


@pytest.mark.ci
def test_a_compiled_network_that_runs_expert_by_expert(tmp_path):
    run_ranks(ungrouped_worker, (str(tmp_path),), 2)


def ema_worker(rank, folder):
    """An EMA copy is made first, and spread as the model is.

    Both load whole or dense weights after that.
    """
    join_group(rank, folder)
    reference, model = make(), make()
    averages = [ModelEmaV3(each, decay=0.5) for each in (reference, model)]
    parallelized(model), parallelized(averages[1].module)
    for each, ema, part in (
        (reference, averages[0], slice(4)),
        (model, averages[1], slice(2 * rank, 2 * rank + 2)),
    ):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            step(each, optimizer, part)
            ema.update(each)
    for ours, expected in ((model, reference), (averages[1].module, averages[0].module)):
        for path, tensor in get_model_state_dict(ours, options=FULL).items():
            torch.testing.assert_close(
                tensor, expected.state_dict()[path], rtol=1e-4, atol=1e-6, msg=path
            )

    dense = timm.create_model("vit_tiny_patch16_224", **{**SMALL_VIT, "depth": 2}).state_dict()
    for weights in (make().state_dict(), dense):  # which has no routers: they stay
        reference.load_state_dict(weights)
        # torch writes into the dict that it is given.
        set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))
        for path, tensor in get_model_state_dict(model, options=FULL).items():
            assert torch.equal(tensor, reference.state_dict()[path]), path

    # A shared expert, whose own weights torch adds to the dense ones.
    reference, model = (make(shared_expert=True) for _ in range(2))
    timm_moe.parallelize_experts(model, init_device_mesh("cpu", (2,)))
    reference.load_state_dict(dense)
    set_model_state_dict(model, dense, options=StateDictOptions(full_state_dict=True))
    for path, tensor in get_model_state_dict(model, options=FULL).items():
        assert torch.equal(tensor, reference.state_dict()[path]), path
    torch.distributed.destroy_process_group()


@pytest.mark.ci
def test_an_ema_copy_and_loading_of_whole_weights(tmp_path):
    run_ranks(ema_worker, (str(tmp_path),), 2)


def from_meta_worker(rank, folder):
    """A model that is made on meta gets a dense checkpoint from torch.

    Its routers are drawn.
    """
    join_group(rank, folder)
    dense = timm.create_model("vit_tiny_patch16_224", **{**SMALL_VIT, "depth": 2}).state_dict()
    with torch.device("meta"):
        model = make()
    set_model_state_dict(model, dense, options=StateDictOptions(full_state_dict=True))
    assert 0.01 < model.blocks[1].mlp.router.weight.std() < 0.04
    torch.distributed.destroy_process_group()


@pytest.mark.ci
def test_a_dense_checkpoint_in_a_model_on_meta(tmp_path):
    run_ranks(from_meta_worker, (str(tmp_path),), 2)


def dying_worker(rank, folder):
    join_group(rank, folder)
    model = parallelized(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, slice(2))
    if rank == 1:
        os._exit(0)  # no error that would end the others
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)connection|gloo"):
        train(model, optimizer, slice(2), steps=3)
    assert time.monotonic() - begin < 30
    with open(f"{folder}/ended", "x"):
        os._exit(0)  # the group has lost a process: nothing can be taken down together


@pytest.mark.ci
@pytest.mark.timeout(60)
def test_a_process_that_dies_ends_the_others(tmp_path):
    run_ranks(dying_worker, (str(tmp_path),), 2)
    assert (tmp_path / "ended").exists()


EXAMPLE = EXAMPLES / "expert_parallel.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
#: Only the folder, timm and torch: no class of this package is needed.
OPENS = """
import sys, timm, torch
model = timm.create_model("local-dir:" + sys.argv[1], pretrained=True)
assert "timm_moe" not in sys.modules and type(model) is timm.models.VisionTransformer
print(model.eval()(torch.zeros(1, 1, 8, 8)).shape)
"""


def epochs_of(output):
    return [int(number) for number in re.findall(r"^epoch (\d+): top-1", output, re.MULTILINE)]


@pytest.mark.ci
def test_the_example_killed_resumed_by_another_number_of_processes_and_exported(tmp_path):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group = {**ENVIRONMENT, **address, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, EXAMPLE, "50"],
            cwd=tmp_path,
            env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        first, second = ranks
        seen = [first.stdout.readline() for _ in range(3)]
        second.send_signal(signal.SIGKILL)  # amid the saving of an epoch or in the next
        seen.append(first.stdout.read())
        assert first.wait(60) != 0  # it ends with an error
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            process.stdout.close()
    done = epochs_of("".join(seen))[-1]
    command = [sys.executable, *torchrun(1), EXAMPLE, str(done + 2)]
    resumed = run_new(command, cwd=tmp_path, env=ENVIRONMENT)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert epochs_of(resumed.stdout)[0] in (done, done + 1)  # the last one may not have been saved
    assert epochs_of(resumed.stdout)[-1] == done + 2
    assert float(re.findall(r"top-1 ([\d.]+)", resumed.stdout)[-1]) > 30
    opened = run_code(OPENS, tmp_path / "exported", autoload="0")
    assert opened.returncode == 0, opened.stderr
    assert "[1, 10]" in opened.stdout


def frozen_worker(rank, folder):
    join_group(rank, folder, 1)
    model = make(EWA)
    layer = timm_moe.moe_layers(model)["blocks.1.mlp"]
    layer.fc1.requires_grad_(False)
    timm_moe.parallelize_experts(model, init_device_mesh("cpu", (1,)))
    trained = {name: p.requires_grad for name, p in layer.named_expert_parameters()}
    assert trained == {
        "fc1.weight": False,
        "fc1.bias": False,
        "fc2.weight": True,
        "fc2.bias": True,
    }
    torch.distributed.destroy_process_group()


@pytest.mark.ci
def test_frozen_experts_stay_frozen(tmp_path):
    run_ranks(frozen_worker, (str(tmp_path),), 1)
