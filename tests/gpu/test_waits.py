"""The host's waits for a GPU in training steps and in evaluation.

The types are those that timm's train.py has.
"""

import contextlib

import pytest
import torch
from common import FAMILIES, family
from devices import waits
from torch import nn

import timm_moe
from timm_moe.layers.grouped import multiplies_by_offsets

#: They have no capacity in training. Each layer reads the number of rows of its experts once where
#: torch cannot multiply without it; other families never do.
DROPLESS = ("top-2, nothing dropped", "shared expert")
TYPES = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}


@contextlib.contextmanager
def capacities(model):
    """Collect the slots of an expert in each routing."""
    found, layers = [], timm_moe.moe_layers(model).values()
    handles = [
        # Soft MoE's router returns no Routing.
        router.register_forward_hook(
            lambda router, args, routing: found.append(getattr(routing, "slots_per_expert", 0))
        )
        for router in {layer.router for layer in layers}
    ]
    yield found
    for handle in handles:
        handle.remove()


def test_waits_are_counted(device):
    x = torch.ones(2, device=device)
    with waits(device, 2):
        x.sum().item()
        torch.ones(2).to(device)
    with waits(device, 0):
        x.sum()


@pytest.mark.parametrize("amp", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.first_case
def test_a_training_step_waits_once_for_each_layer_without_a_capacity(device, name, amp):
    model, images = family(name).to(device), torch.randn(4, 3, 32, 32, device=device)
    targets = torch.randint(5, (4,), device=device)
    criterion = timm_moe.MemberLoss(nn.CrossEntropyLoss())
    optimizer = torch.optim.AdamW(model.parameters())
    # Parts of different hidden units are not averaged.
    rate = 0.0 if name == "fine-grained" else 0.3
    averaging = timm_moe.ExpertWeightAveraging(model, optimizer, rate, "constant", total_updates=9)
    scaler = torch.amp.GradScaler(device, init_scale=256.0, enabled=amp is torch.float16)

    def autocast():
        return torch.autocast(device, amp, enabled=amp is not None)

    def backward():
        with autocast():
            loss = criterion(model(images), targets)
        scaler.scale(loss + timm_moe.auxiliary_loss(model)).backward()

    def step():
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with capacities(model) as found:
        backward()
        step()
    assert [slots is None for slots in found] == len(found) * [name in DROPLESS]
    with autocast():
        expected = 0 if multiplies_by_offsets(images.new_empty(8, 32), 32) else found.count(None)
    with waits(device, expected):
        backward()
    # torch's GradScaler reads whether a gradient is infinite.
    with waits(device, 1 if scaler.is_enabled() else 0):
        step()
    assert averaging.updates == 2
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("amp", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.first_case
def test_an_evaluation_waits_once_for_each_layer_without_a_capacity(device, name, amp):
    model, images = family(name).to(device).eval(), torch.randn(4, 3, 32, 32, device=device)
    with torch.inference_mode(), torch.autocast(device, amp, enabled=amp is not None):
        with capacities(model) as found:
            model(images)
        with waits(
            device, 0 if multiplies_by_offsets(images.new_empty(8, 32), 32) else found.count(None)
        ):
            model(images)
