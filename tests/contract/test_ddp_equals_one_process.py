"""Promise: processes under DistributedDataParallel train as one process that has all their images.

That process accumulates over the parts of the batch: each part draws its partitions, and balances
its experts, as the process does that has it.
"""

import pytest
import torch
from common import families, without_draws
from processes import join_group, run_ranks
from torch.nn.parallel import DistributedDataParallel

import timm_moe
from timm_moe.layers import EwaMlp

PROCESSES, STEPS = 2, 3


def optimizer_of(model):
    """Make an optimizer that averages the experts, where a model is trained so."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if any(isinstance(layer, EwaMlp) for layer in timm_moe.moe_layers(model).values()):
        timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=STEPS)
    return optimizer


def loss_of_part(model, layers_of, step, rank):
    """Compute the loss of one process in a step."""
    random = torch.Generator().manual_seed(10 * step + rank)
    torch.manual_seed(10 * step + rank)  # the partitions of this process
    y = model(torch.randn(4, 3, 32, 32, generator=random))
    return y.square().mean() + timm_moe.auxiliary_loss(layers_of)


def worker(rank, folder, name):
    join_group(rank, folder, PROCESSES)
    model = without_draws(name)
    optimizer = optimizer_of(model)
    wrapped = DistributedDataParallel(model)
    for step in range(STEPS):
        loss_of_part(wrapped, model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", families())
def test_training_is_the_same(name, tmp_path):
    run_ranks(worker, (str(tmp_path), name), PROCESSES)
    model = without_draws(name)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for rank in range(PROCESSES):
            (loss_of_part(model, model, step, rank) / PROCESSES).backward()
        optimizer.step()
        optimizer.zero_grad()
    for rank in range(PROCESSES):
        actual = torch.load(tmp_path / f"rank{rank}.pt")
        for path, expected in model.state_dict().items():
            torch.testing.assert_close(actual[path], expected, rtol=1e-4, atol=1e-6, msg=path)
