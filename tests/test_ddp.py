"""Two processes under DistributedDataParallel (gloo): ranks stay equal, every expert has its gradient."""

import copy
import logging
import os
from contextlib import nullcontext

import pytest
import timm
import timm.scheduler
import torch
import torch.multiprocessing
from conftest import SMALL_VIT
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from timm_moe import ExpertWeightAveraging, MemberLoss, auxiliary_loss, moe_layers


def start(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)


def worker(rank, folder, batch_size):
    start(rank, folder)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("timm_moe").addHandler(handler)
    logging.getLogger("timm_moe").setLevel(logging.INFO)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_ewa_moe", share_rate=0.6, share_schedule="constant", **SMALL_VIT)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=torch.device("cpu"), verbose=False)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2)
    task.prepare_distributed(device_ids=None)
    wrapped = next(module for module in task.modules() if isinstance(module, DistributedDataParallel))
    timm.scheduler.create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=3)
    torch.manual_seed(100 + rank)  # other images and other partitions on each rank
    for _ in range(3):
        for accumulated in range(2):
            context = wrapped.no_sync() if accumulated == 0 else nullcontext()
            with context:
                task(torch.randn(batch_size, 3, 32, 32), torch.randint(5, (batch_size,)))["loss"].backward()
        optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.zero_grad()
    assert ExpertWeightAveraging.of(optimizer).updates == 3
    assert sum("EWA" in record for record in records) == (rank == 0)
    torch.save({"model": model.state_dict(), "layers": len(moe_layers(model))}, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
@pytest.mark.parametrize("batch_size", [4, 1])
def test_ranks_stay_identical(tmp_path, batch_size):
    torch.multiprocessing.spawn(worker, (str(tmp_path), batch_size), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert first["layers"] == 2
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    start = first["model"]["blocks.1.mlp.fc1.weight"]
    assert not torch.equal(start[0], start[1])  # 0.6 leaves a fifth of each deviation
    assert (start - start.mean(0)).abs().max() < 0.01


#: Models whose loss needs all of a task: the routers' losses, a layer called several times, members.
ROUTED = {
    "vit_tiny_moe": dict(num_experts=9),  # some experts get no token
    "widenet_b": dict(noise_std=0, capacity_factor="none", mlp_ratio=2),
    "vmoe_pbe_s32": dict(num_experts=4, noise_std=0, aux_loss="importance", expert_dropout=0.0),
}


def routed_worker(rank, folder, name, compiled):
    start(rank, folder)
    images, targets = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    torch.manual_seed(0)
    model = timm.create_model(name, **ROUTED[name], group_images=2, **SMALL_VIT)
    for path, parameter in model.named_parameters():
        if "router" in path:
            nn.init.normal_(parameter, std=0.3)
    reference = copy.deepcopy(model)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=torch.device("cpu"), verbose=False)
    if compiled and hasattr(task, "get_trainable_module"):
        task.compile(backend="aot_eager")
    task.prepare_distributed(device_ids=None)
    part = slice(2 * rank, 2 * rank + 2)
    task(images[part], targets[part])["loss"].backward()
    # The mean over the ranks is the loss of the whole batch, where groups are as large as a rank's part.
    (MemberLoss(nn.CrossEntropyLoss())(reference(images), targets) + auxiliary_loss(reference)).backward()
    for (path, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=path)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch is built without torch.distributed")
@pytest.mark.parametrize(
    ("name", "compiled"),
    [("vit_tiny_moe", False), ("vit_tiny_moe", True), ("widenet_b", False), ("vmoe_pbe_s32", False)],
)
def test_routed_experts_get_the_gradients_of_the_whole_batch(tmp_path, name, compiled):
    torch.multiprocessing.spawn(routed_worker, (str(tmp_path), name, compiled), nprocs=2)
