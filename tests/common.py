"""What tests of several rooms take: models small enough to train in a second, golden data, places."""

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
EXAMPLES = ROOT / "examples"
SMALL_VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=5)
SMALL_VIT_KWARGS = [f"{name}={value}" for name, value in SMALL_VIT.items() if name != "num_classes"]
#: The V-MoE of the golden files.
TINY = dict(
    img_size=16, patch_size=4, embed_dim=16, depth=4, num_heads=2, mlp_ratio=2, num_classes=7, act_layer="gelu_tanh",
    num_experts=4, moe_layers="1,3", group_images=2,
)  # fmt: skip


class Teacher(nn.Module):
    """A model as timm 1.0.23 wants its teachers; later versions take it as any model."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.pretrained_cfg = model.pretrained_cfg

    def forward(self, x, return_features=False):
        return self.model(x)

    def normalize_input(self, x, *args):
        return x


def cases(arrays, letter):
    """The golden file's cases as objects."""
    for index in range(int(arrays["n_cases"])):
        prefix = f"{letter}{index}_"
        yield SimpleNamespace(**{name.removeprefix(prefix): v for name, v in arrays.items() if name.startswith(prefix)})


def dense_combine(routing, num_experts):
    """(T, E) weight with which each expert's output enters each row."""
    combined = torch.zeros(routing.slots.shape[0], num_experts + 1)  # the last is of dropped choices
    for expert, weight in zip(routing.experts().T, routing.gates.T, strict=True):
        combined = combined.scatter_add(1, expert.unsqueeze(1), weight.unsqueeze(1))
    return combined[:, :num_experts]
