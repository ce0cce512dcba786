"""Two processes under FSDP2 (gloo): the same weights as in one process, averaged and exported."""

import os
import sys

import pytest
import timm
import timm.optim
import timm.scheduler
import torch
from averaging_loop import average_
from common import ROOT, SMALL_VIT
from processes import join_group, messages_of_the_package, run_new, run_ranks, torchrun
from timm.layers import Mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from timm_moe import (
    ExpertWeightAveraging,
    auxiliary_loss,
    average_experts_,
    convert_to_moe,
    expert_placement,
    export_dense,
    moe_layers,
    start_averaging,
    to_dense,
)
from timm_moe.layers import EwaMlp, RandomPartition

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
STEPS = 3


def start(rank, folder, processes=2):
    join_group(rank, folder, processes)
    return init_device_mesh("cpu", (processes,))


def shard_a_part(rank, folder, by_fsdp2):
    start(rank, folder)
    torch.manual_seed(0)
    layer = EwaMlp(Mlp(8, 12), RandomPartition(2)).eval()
    if by_fsdp2:
        fully_shard(layer.fc1)
    else:
        layer.fc1 = FullyShardedDataParallel(layer.fc1, device_id=torch.device("cpu"))
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"fc1 .*sharded by itself.* block"),
    ):
        layer(torch.randn(2, 8))


@pytest.mark.ci
@pytest.mark.parametrize("by_fsdp2", [True, False])
def test_a_part_of_the_experts_is_not_sharded_by_itself(tmp_path, by_fsdp2):
    run_ranks(shard_a_part, (str(tmp_path), by_fsdp2), 2)


def shard(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


MODELS = {
    # Every rank has the same images and draws the same partitions: the mean of the gradients is
    # that of one process.
    "random partitions": (
        dict(model_name="vit_tiny_ewa_moe", share_rate=0.6, share_schedule="constant"),
        False,
    ),
    # Each image is routed by itself.
    "expert choice": (
        dict(
            model_name="vit_tiny_moe",
            num_experts=6,
            router="expert_choice",
            noise_std=0.0,
            share_rate=0.3,
        ),
        True,
    ),
    "fine-grained": (
        dict(
            model_name="vit_tiny_moe",
            num_experts=8,
            top_k=4,
            expert_width=0.25,
            shared_expert=True,
            group_images=2,
        ),
        True,
    ),
    "Soft MoE": (
        dict(model_name="soft_moe_s16", num_experts=6, moe_layers="every-2", share_rate=0.3),
        True,
    ),
    # Each rank has half of the images, in a routing group of their own.
    "top-k": (
        dict(
            model_name="vit_tiny_moe",
            num_experts=6,
            top_k=2,
            share_rate=0.3,
            aux_loss_weight=0.5,
            group_images=2,
        ),
        True,
    ),
}


def create(name):
    torch.manual_seed(0)
    model = timm.create_model(**MODELS[name][0], **SMALL_VIT)
    for path, parameter in model.named_parameters():
        if "router" in path:
            nn.init.normal_(parameter, std=0.3)
    return model


def train(model, halves, rank=None):
    optimizer = timm.optim.create_optimizer_v2(
        model, "sgd", lr=0.05, weight_decay=0.05, layer_decay=0.8
    )
    timm.scheduler.create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=STEPS)
    norms = []
    for step in range(STEPS):
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        part = slice(2 * rank, 2 * rank + 2) if halves and rank is not None else slice(None)
        torch.manual_seed(step)
        outputs = model(images[part])
        loss = nn.functional.cross_entropy(outputs, torch.arange(4)[part]) + auxiliary_loss(model)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(getattr(norm, "full_tensor", lambda norm=norm: norm)())
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, torch.stack(norms)


def training_worker(rank, folder, name):
    mesh = start(rank, folder)
    halves = MODELS[name][1]
    model, reference = create(name), create(name)
    shard(model, mesh, shard_placement_fn=expert_placement(model))
    optimizer, norms = train(model, halves, rank)
    _, expected_norms = train(reference, halves)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=0)
    assert norms.max() > 0.5  # clipped
    weights = get_model_state_dict(model, options=FULL)
    assert set(weights) == (set(reference.state_dict()) if rank == 0 else set())
    for path, tensor in weights.items():
        torch.testing.assert_close(
            tensor, reference.state_dict()[path], rtol=1e-4, atol=1e-6, msg=path
        )

    # Resuming as documented. (A forward without a backward leaves the root's parameters gathered,
    # when torch would not find them among the optimizer's.)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    other = timm.optim.create_optimizer_v2(
        model, "sgd", lr=0.05, weight_decay=0.05, layer_decay=0.8
    )
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, other, state, options=options)
    if name != "fine-grained":  # which are never averaged
        done = ExpertWeightAveraging.of(optimizer).updates
        averaging = start_averaging(model, other, total_updates=5, updates=done)
        assert averaging.updates == STEPS
    resumed = get_model_state_dict(model, options=FULL)
    assert all(torch.equal(resumed[path], tensor) for path, tensor in weights.items())

    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        outputs, expected = model.eval()(images), reference.eval()(images)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    torch.save(outputs, f"{folder}/outputs{rank}.pt")
    if rank == 0:  # which does not wait for the others
        for write in (to_dense, lambda model: export_dense(model, f"{folder}/dense")):
            with pytest.raises(ValueError, match=r"FSDP2.*get_model_state_dict"):
                write(model)
    if rank == 0 and name == "random partitions":
        whole = create(name)
        whole.load_state_dict(weights)
        export = export_dense(whole, f"{folder}/exported")
        stock = timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()
        assert not moe_layers(stock)
        torch.testing.assert_close(stock(images).detach(), expected, rtol=1e-4, atol=1e-5)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.first_case
def test_training_is_that_of_one_process(tmp_path, name):
    run_ranks(training_worker, (str(tmp_path), name), 2)
    first, second = (torch.load(tmp_path / f"outputs{rank}.pt") for rank in range(2))
    assert torch.equal(first, second)


# --- the averaging of sharded tensors, which needs no fully_shard


def tensor_worker(rank, folder):
    mesh = start(rank, folder)
    torch.manual_seed(0)
    stacked = torch.randn(4, 6, 8)
    expected = average_(stacked.clone(), 0.3)
    for placement in (Shard(1), Shard(2), Replicate()):
        sharded = distribute_tensor(stacked.clone(), mesh, [placement])
        assert average_(sharded, 0.3) is sharded
        assert torch.equal(sharded.full_tensor(), expected)
    sharded = distribute_tensor(stacked, mesh, [Shard(0)])
    torch.testing.assert_close(average_(sharded, 0.3).full_tensor(), expected)

    model = convert_to_moe(timm.create_model("vit_tiny_patch16_224", **SMALL_VIT))
    first, second = (layer.fc2 for layer in moe_layers(model).values())
    with torch.no_grad():
        first.weight[0].zero_()
    before = first.weight.detach().clone()
    second.bias = nn.Parameter(distribute_tensor(second.bias.detach().bfloat16(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="float32"):
        average_experts_(model, 0.3)
    assert torch.equal(first.weight, before)  # nothing was averaged
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="float32"):
        ExpertWeightAveraging(model, optimizer, share_rate=0.3, total_updates=3)
    assert ExpertWeightAveraging.of(optimizer) is None
    torch.distributed.destroy_process_group()


# --- FSDP1, which holds all parameters of a module in one flat tensor, and flat shards of that


def flat_worker(rank, folder, processes):
    start(rank, folder, processes)
    records = messages_of_the_package()
    for use_orig_params in (True, False):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
        whole = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
        reference = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
        reference.load_state_dict(whole)
        sharded = FullyShardedDataParallel(
            model,
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
            sync_module_states=False,
        )
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-60)  # moves no weight
        if processes == 1 and use_orig_params:  # nothing is cut, so all is as without it
            ExpertWeightAveraging(sharded, optimizer, 0.3, "constant", total_updates=3)
            sharded(torch.randn(2, 3, 32, 32)).mean().backward()
            optimizer.step()
            average_experts_(reference, 0.3)
            averaged = model.blocks[1].mlp.fc1.weight
            torch.testing.assert_close(averaged, reference.blocks[1].mlp.fc1.weight)
            assert not records
            continue
        with pytest.raises(ValueError, match=r"blocks\.1\.mlp.*FullyShardedDataParallel"):
            ExpertWeightAveraging(sharded, optimizer, total_updates=3)
        for refused in (average_experts_, lambda sharded, beta: to_dense(sharded)):
            with pytest.raises(ValueError, match="FullyShardedDataParallel"):
                refused(sharded, 0.3)
        if use_orig_params:
            with pytest.raises(ValueError, match="FullyShardedDataParallel"):
                timm.scheduler.create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=3)
        else:
            timm.scheduler.create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=3)
        assert ExpertWeightAveraging.of(optimizer) is None
        for _ in range(2):
            sharded(torch.randn(2, 3, 32, 32)).mean().backward()
            optimizer.step()
        assert len(records) == 1
        assert "EWA: nothing averages the experts" in records.pop()
        # The whole weights are averaged as those of any model, and nothing was moved before.
        with FullyShardedDataParallel.summon_full_params(sharded):
            for path, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.detach(), whole[path], rtol=0, atol=0)
            average_experts_(sharded, 0.3)
        average_experts_(reference, 0.3)
        with FullyShardedDataParallel.summon_full_params(sharded):
            for (path, parameter), expected in zip(
                model.named_parameters(), reference.parameters(), strict=True
            ):
                torch.testing.assert_close(parameter, expected, msg=path)
        assert not records
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.first_case
def test_flat_shards_are_refused_before_a_weight_moves(tmp_path, processes):
    run_ranks(flat_worker, (str(tmp_path), processes), processes)


def test_sharded_tensors_are_averaged_locally_or_over_processes(tmp_path):
    run_ranks(tensor_worker, (str(tmp_path),), 2)


def test_experts_are_cut_along_their_largest_other_dimension(ewa_vit):
    place = expert_placement(ewa_vit)
    layer = ewa_vit.blocks[1].mlp  # of width 32, hidden 128
    assert place(layer.fc1.weight) == Shard(1)
    assert place(layer.fc2.weight) == Shard(2)
    assert place(layer.fc1.bias) == Shard(1)
    assert place(ewa_vit.blocks[0].mlp.fc2.weight) is None
    assert place(nn.Parameter(torch.zeros(4, 128, 32))) is None


def test_a_number_of_each_expert_has_no_other_dimension():
    network = Mlp(5, 6)
    network.register_parameter("gain", nn.Parameter(torch.tensor(0.5)))
    layer = EwaMlp(network, RandomPartition(4))
    assert expert_placement(nn.Sequential(layer))(layer.gain) is None


@pytest.mark.ci
def test_the_example(tmp_path):
    example = ROOT / "examples" / "fsdp_loop.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_new([sys.executable, *torchrun(2), example, "3"], cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    accuracies = [
        float(line.split()[-2]) for line in done.stdout.splitlines() if line.startswith("epoch")
    ]
    assert accuracies[2] > max(20, accuracies[0])
    assert "largest_difference=0.0," in done.stdout
    assert (tmp_path / "exported/model.safetensors").is_file()
