"""Two processes under DistributedDataParallel (gloo).

Ranks stay equal, and every expert has its gradient.
"""

import copy
import logging
from contextlib import nullcontext

import pytest
import timm
import timm.scheduler
import torch
from common import SMALL_VIT
from processes import join_group, messages_of_the_package, run_ranks
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from timm_moe import ExpertWeightAveraging, MemberLoss, auxiliary_loss, moe_layers


def worker(rank, folder, batch_size):
    join_group(rank, folder)
    records = messages_of_the_package(logging.INFO)
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_ewa_moe", share_rate=0.6, share_schedule="constant", **SMALL_VIT
    )
    task = ClassificationTask(
        model, nn.CrossEntropyLoss(), device=torch.device("cpu"), verbose=False
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2)
    task.prepare_distributed(device_ids=None)
    wrapped = next(
        module for module in task.modules() if isinstance(module, DistributedDataParallel)
    )
    timm.scheduler.create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=3)
    torch.manual_seed(100 + rank)  # other images and other partitions on each rank
    for _ in range(3):
        for accumulated in range(2):
            context = wrapped.no_sync() if accumulated == 0 else nullcontext()
            with context:
                task(torch.randn(batch_size, 3, 32, 32), torch.randint(5, (batch_size,)))[
                    "loss"
                ].backward()
        optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.zero_grad()
    assert ExpertWeightAveraging.of(optimizer).updates == 3
    assert sum("EWA" in record for record in records) == (rank == 0)
    torch.save(
        {"model": model.state_dict(), "layers": len(moe_layers(model))}, f"{folder}/rank{rank}.pt"
    )
    torch.distributed.destroy_process_group()


def redundancy_worker(rank, folder, processes):
    """ZeroRedundancyOptimizer trains as the whole optimizer.

    Its processes update parts of the parameters each.
    """
    join_group(rank, folder, processes)
    records = messages_of_the_package()

    def begin(zero):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
        options = dict(lr=1e-2)
        if zero:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **options)
        timm.scheduler.create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=6)
        return model, optimizer

    def train(model, optimizer, steps):
        for step in steps:
            torch.manual_seed(step)
            # The same on all ranks: DDP is not needed.
            model(torch.randn(2, 3, 32, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    whole, reference = begin(zero=False)
    train(whole, reference, range(6))
    model, optimizer = begin(zero=True)
    train(model, optimizer, range(3))
    optimizer.consolidate_state_dict(to=0)
    saved = [
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()} if rank == 0 else None
    ]
    torch.distributed.broadcast_object_list(saved)
    dense = copy.deepcopy(saved[0])
    resumed, optimizer = begin(zero=True)
    resumed.load_state_dict(saved[0]["model"])
    optimizer.load_state_dict(saved[0]["optimizer"])
    assert ExpertWeightAveraging.of(optimizer).updates == 3
    train(resumed, optimizer, range(3, 6))
    assert ExpertWeightAveraging.of(optimizer).updates == 6
    for (path, tensor), expected in zip(
        resumed.named_parameters(), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(tensor, expected, msg=path)
    assert not records
    # The state of a dense model is refused as ever, by the process that has it.
    model, optimizer = begin(zero=True)
    experts = model.blocks[1].mlp.fc1.weight
    state = dense["optimizer"]["state"][
        [parameter is experts for parameter in model.parameters()].index(True)
    ]
    for moment in ("exp_avg", "exp_avg_sq"):
        state[moment] = state[moment][0]
    optimizer.load_state_dict(dense["optimizer"])
    if experts in optimizer.optim.state:
        with pytest.raises(ValueError, match=r"dense model.*--no-resume-opt"):
            optimizer.optim.step()
    torch.distributed.destroy_process_group()


@pytest.mark.ci
@pytest.mark.parametrize("processes", [1, 2])
def test_a_sharded_optimizer_is_averaged_and_resumed(tmp_path, processes):
    run_ranks(redundancy_worker, (str(tmp_path), processes), processes)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.first_case
def test_ranks_stay_identical(tmp_path, batch_size):
    run_ranks(worker, (str(tmp_path), batch_size), 2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert first["layers"] == 2
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    start = first["model"]["blocks.1.mlp.fc1.weight"]
    assert not torch.equal(start[0], start[1])  # 0.6 leaves a fifth of each deviation
    assert (start - start.mean(0)).abs().max() < 0.01


#: Models whose loss needs all of a task: the routers' losses, a layer called several times,
#: members.
ROUTED = {
    "vit_tiny_moe": dict(num_experts=9),  # some experts get no token
    "widenet_b": dict(noise_std=0, capacity_factor="none", mlp_ratio=2),
    "vmoe_pbe_s32": dict(num_experts=4, noise_std=0, aux_loss="importance", expert_dropout=0.0),
}


def routed_worker(rank, folder, name, compiled):
    join_group(rank, folder)
    images, targets = (
        torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        torch.arange(4),
    )
    torch.manual_seed(0)
    model = timm.create_model(name, **ROUTED[name], group_images=2, **SMALL_VIT)
    for path, parameter in model.named_parameters():
        if "router" in path:
            nn.init.normal_(parameter, std=0.3)
    reference = copy.deepcopy(model)
    task = ClassificationTask(
        model, nn.CrossEntropyLoss(), device=torch.device("cpu"), verbose=False
    )
    if compiled:
        task.compile(backend="aot_eager")
    task.prepare_distributed(device_ids=None)
    part = slice(2 * rank, 2 * rank + 2)
    task(images[part], targets[part])["loss"].backward()
    # The mean over the ranks is the loss of the whole batch, where groups are as large as a rank's
    # part.
    (
        MemberLoss(nn.CrossEntropyLoss())(reference(images), targets) + auxiliary_loss(reference)
    ).backward()
    for (path, parameter), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=path)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("vit_tiny_moe", False),
        ("vit_tiny_moe", True),
        ("widenet_b", False),
        ("vmoe_pbe_s32", False),
    ],
)
@pytest.mark.first_case
def test_routed_experts_get_the_gradients_of_the_whole_batch(tmp_path, name, compiled):
    run_ranks(routed_worker, (str(tmp_path), name, compiled), 2)


def control_worker(rank, folder):
    join_group(rank, folder)
    torch.manual_seed(0)
    options = dict(num_experts=2, top_k=2, gate_mode="one", aux_loss_weight=0)
    model = timm.create_model("vimoe_s14", **options, **SMALL_VIT)
    before = copy.deepcopy(model.state_dict())
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    for _ in range(2):
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.endswith("router.weight"), name
    # A router with losses is trained by them alone. Hugging Face's Trainer sets this option.
    model = timm.create_model("vit_tiny_moe", gate_mode="one", top_k=2, **SMALL_VIT)
    model = DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        (model(torch.randn(2, 3, 32, 32)).square().sum() + auxiliary_loss(model)).backward()
    assert model.module.blocks[1].mlp.router.weight.grad.any()
    torch.distributed.destroy_process_group()


def test_routers_that_the_gates_do_not_train_are_parallel(tmp_path):
    run_ranks(control_worker, (str(tmp_path),), 2)
