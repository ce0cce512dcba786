"""The bytes and the memory that docs/generated/distributed.md states.

They are what processes (gloo) send and hold.
"""

import dataclasses

import pytest
import timm
import torch
from common import SMALL_VIT
from devices import equal_slots
from processes import join_group, parallelized, run_ranks
from torch import distributed
from torch.nn import functional as F

import timm_moe
from benchmarks import distributed as counted
from benchmarks.distributed import ADAMW, Sizes


class Counter:
    """Counts the bytes that this process gives to torch's calls."""

    def __init__(self, patch):
        self.sent = self.reduced = 0
        for name in ("all_to_all_single", "all_reduce"):
            patch.setattr(distributed, name, getattr(self, name)(getattr(distributed, name)))

    def all_to_all_single(self, function):
        def call(output, rows, came=None, sent=None, **options):
            parts = rows.split(
                sent if sent is not None else len(rows) // distributed.get_world_size()
            )
            others = (part for rank, part in enumerate(parts) if rank != distributed.get_rank())
            self.sent += sum(part.numel() * part.element_size() for part in others)
            return function(output, rows, came, sent, **options)

        return call

    def all_reduce(self, function):
        def call(tensor, **options):
            self.reduced += tensor.numel() * tensor.element_size()
            return function(tensor, **options)

        return call


def counting_worker(rank, folder, processes):
    join_group(rank, folder, processes)
    torch.manual_seed(rank)
    images, labels = torch.randn(6, 3, 32, 32), torch.arange(6) % 5
    for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
        model = timm.create_model(
            "vmoe_s32", **{**SMALL_VIT, "num_experts": 8}, moe_layers="every-2"
        )
        sizes = Sizes.of(model, model.pos_embed.shape[1])
        parallelized(model, processes)
        with pytest.MonkeyPatch.context() as patch, equal_slots():
            counter = Counter(patch)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = F.cross_entropy(model(images), labels) + timm_moe.auxiliary_loss(model)
            loss.backward()
        assert counter.sent == sizes.layers * sizes.all_to_all(6, processes, itemsize) > 0
        held = torch.tensor(sum(parameter.to_local().numel() for parameter in model.parameters()))
        # What does not divide evenly.
        assert ADAMW * held.item() == pytest.approx(sizes.memory(processes), rel=0.05)
        distributed.all_reduce(held)
        assert ADAMW * held.item() == sizes.memory(1)

    model = timm.create_model("vit_tiny_ewa_moe", **{**SMALL_VIT, "num_experts": 2 * processes})
    layers = timm_moe.moe_layers(model).values()
    expert = sum(
        stacked.numel() for _, stacked in next(iter(layers)).named_expert_parameters()
    ) // (2 * processes)
    of_ewa = dataclasses.replace(sizes, expert=expert)
    parallelized(model, processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=2)
    F.cross_entropy(model(images), labels).backward()
    with pytest.MonkeyPatch.context() as patch:
        counter = Counter(patch)
        optimizer.step()
    assert counter.sent == 0
    in_a_ring = 2 * counter.reduced * (processes - 1) // processes
    assert in_a_ring == len(layers) * of_ewa.all_reduce(processes)
    distributed.destroy_process_group()


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.ci)])
@pytest.mark.ci
def test_formulas_are_the_bytes_of_a_run(tmp_path, processes):
    run_ranks(counting_worker, (str(tmp_path), processes), processes)


def test_the_page_is_what_the_command_writes():
    assert counted.PAGE.read_text() == counted.page()
