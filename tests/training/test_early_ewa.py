"""Early EWA: routed experts are averaged in the first half of a run."""

import logging

import pytest
import timm
import timm.scheduler
import torch
from averaging_loop import still_step
from routed_loop import CPU, batch, routed_model
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch import nn

import timm_moe
from timm_moe.callbacks import start_averaging


def test_early_ewa_averages_routed_experts_in_the_first_half(caplog):
    images, targets = batch()
    spreads = []
    model = routed_model(share_schedule="early")
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    router = model.blocks[1].mlp.router.weight
    with caplog.at_level(logging.INFO):
        timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=4)
    assert "share rate 0.3, schedule early, over 8 updates" in caplog.text
    rates = []
    for _ in range(8):
        task(images, targets)["loss"].backward()
        before = router.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(timm_moe.ExpertWeightAveraging.of(optimizer).share_rate)
        weight = model.blocks[1].mlp.fc1.weight
        spreads.append((weight - weight.mean(0)).std().item())
        assert (router - before).abs().max() < 0.01  # moved by the optimizer, not averaged
    assert rates == [0.3, 0.3, 0.3, 0, 0, 0, 0, 0]
    assert spreads[2] < 0.5 * spreads[0]
    assert spreads[7] > spreads[2]


@pytest.mark.parametrize("share_rate", [0.1, 0.2, 0.3, 0.4, 0.5])
def test_early_ewa_at_the_share_rates_that_the_paper_searches(share_rate):
    """It does as table 5 says.

    In each step before the middle of the run, experts come nearer by the constant rate, then not at
    all.
    """
    model = routed_model(share_schedule="early", share_rate=share_rate, num_experts=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # only averaging moves them
    averaging = start_averaging(model, optimizer, total_updates=10)
    stacked = model.blocks[1].mlp.fc1.weight
    stacked.data = torch.randn_like(stacked)
    for step in range(1, 11):
        before, mean = stacked.detach() - stacked.detach().mean(0), stacked.detach().mean(0)
        still_step(model, optimizer)
        rate = share_rate if step < 5 else 0
        assert averaging.share_rate == rate
        torch.testing.assert_close(stacked.detach(), mean + (1 - rate * 4 / 3) * before)


def test_a_share_rate_alone_is_that_of_the_first_half():
    model = routed_model(share_rate=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaging = start_averaging(model, optimizer, total_updates=4)
    rates = []
    for _ in range(4):
        still_step(model, optimizer)
        rates.append(averaging.share_rate)
    assert rates == [0.2, 0, 0, 0]


def test_routed_experts_are_not_averaged_unasked(caplog):
    model = routed_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    with caplog.at_level(logging.INFO):
        timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=4)
    assert timm_moe.ExpertWeightAveraging.of(optimizer) is None
    assert not any("EWA" in message for message in caplog.messages)
