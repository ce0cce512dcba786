"""Averaging of the experts, compared with a copy of the same weights."""

from collections.abc import Iterator

import timm
import torch
from torch import Tensor

import timm_moe
from timm_moe.training.weight_average import average_

from .protocol import Contest, Setting, Work


def measure(setting: Setting) -> Iterator[Contest]:
    for num_experts in (4, 8):
        entries = {
            "memcpy": lambda number=num_experts: copy(number, setting),
            "averaging": lambda number=num_experts: average(number, setting),
        }
        yield Contest(f"averaging, {num_experts} experts in 6 layers of ViT-S", entries)


def average(num_experts: int, setting: Setting) -> Work:
    """Average the experts, as after each training step."""
    experts = _experts(num_experts, setting)

    def work() -> None:
        average_((stacked, 0.1) for stacked in experts)

    return work


def copy(num_experts: int, setting: Setting) -> Work:
    """Copy the experts of a model into memory that is already allocated."""
    pairs = [(torch.empty_like(stacked), stacked) for stacked in _experts(num_experts, setting)]

    def work() -> None:
        for target, stacked in pairs:
            target.copy_(stacked)

    return work


def _experts(num_experts: int, setting: Setting) -> list[Tensor]:
    model = timm.create_model("vit_small_ewa_moe", num_experts=num_experts).to(setting.device)
    return [
        stacked
        for layer in timm_moe.moe_layers(model).values()
        for stacked in layer.stacked_weights().values()
    ]
