"""Training steps of a model with experts, and distances of its experts.

They are for tests of the averaging.
"""

import torch
from timm.optim import create_optimizer_v2
from torch import nn

import timm_moe
from timm_moe import ExpertWeightAveraging
from timm_moe.training import weight_average


def average_(stacked, beta):
    """Average the experts of one tensor, in place."""
    weight_average.average_([(stacked, beta)])
    return stacked


def train_step(model, optimizer, seed, scaler=None):
    torch.manual_seed(seed)
    loss = model(torch.randn(4, 3, 32, 32)).square().mean()
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def spreads(model):
    """Of every stacked parameter, the largest deviation of an expert from the mean."""
    stacked = {
        f"{path}.{name}": parameter.detach()
        for path, layer in timm_moe.moe_layers(model).items()
        for name, parameter in layer.named_expert_parameters()
    }
    return {name: (weight - weight.mean(0)).abs().max().item() for name, weight in stacked.items()}


def spread(model):
    return max(spreads(model).values())


def averaged(model, opt="adamw", rate=0.75, schedule="constant", total_updates=10, **opt_kwargs):
    optimizer = create_optimizer_v2(model, opt=opt, lr=1e-2, weight_decay=0.05, **opt_kwargs)
    return optimizer, ExpertWeightAveraging(
        model, optimizer, rate, schedule, total_updates=total_updates
    )


EXPERTS = {
    f"blocks.{block}.mlp.{name}.{kind}"
    for block in (1, 3)
    for name in ("fc1", "fc2")
    for kind in ("weight", "bias")
}


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def still_step(model, optimizer):
    """A step that moves nothing by itself, so that all that moves was averaged.

    The optimizer has a rate: without a rate and gradients it would be no step.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def apart(model):
    """The model with experts that differ in every parameter; its biases begin equal."""
    for layer in timm_moe.moe_layers(model).values():
        for _, stacked in layer.named_expert_parameters():
            nn.init.normal_(stacked)
    return model


def moved(model, before):
    return {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
