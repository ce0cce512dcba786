"""The averaging of the experts beside a copy of the same weights."""

from collections.abc import Iterator

import timm
import torch

import timm_moe

from .protocol import Contest, Row, Setting, Work, run


def measure(setting: Setting) -> Iterator[Row]:
    for num_experts in (4, 8):
        entries = {
            "memcpy": lambda number=num_experts: copy(number, setting),
            "average_experts_": lambda number=num_experts: average(number, setting),
        }
        yield from run(Contest(f"averaging, {num_experts} experts in 6 layers of ViT-S", entries), setting)


def average(num_experts: int, setting: Setting) -> Work:
    model = timm.create_model("vit_small_ewa_moe", num_experts=num_experts).to(setting.device)
    return lambda: timm_moe.average_experts_(model, 0.1)


def copy(num_experts: int, setting: Setting) -> Work:
    """From the experts of a model into memory that is there already."""
    model = timm.create_model("vit_small_ewa_moe", num_experts=num_experts).to(setting.device)
    layers = timm_moe.moe_layers(model).values()
    pairs = [(torch.empty_like(stacked), stacked) for layer in layers for stacked in layer.networks().values()]

    def work() -> None:
        for target, stacked in pairs:
            target.copy_(stacked)

    return work
