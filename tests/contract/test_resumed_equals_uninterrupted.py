"""Promise: training that was stopped and resumed from a checkpoint goes on bit for bit."""

import io

import pytest
import torch
from common import families, without_draws

import timm_moe

STEPS = 6


def begin(name):
    model = without_draws(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name == "random partition":
        timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=STEPS)
    return model, optimizer


def train(model, optimizer, steps):
    for number in steps:
        torch.manual_seed(number)  # the images and partitions of the step
        y = model(torch.randn(4, 3, 32, 32))
        (y.square().mean() + timm_moe.auxiliary_loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", families())
def test_weights_are_those_of_one_run(name):
    model, optimizer = begin(name)
    train(model, optimizer, range(STEPS // 2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(STEPS // 2, STEPS))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, its_optimizer = begin(name)
    resumed.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, its_optimizer, range(STEPS // 2, STEPS))
    for path, tensor in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[path], tensor), path
