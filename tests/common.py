"""Pieces that tests of several rooms share.

There are models small enough to train in a second, folders of images, golden data and places.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

from timm_moe import expert_parameters, moe_layers
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.layers import Router, routing_to

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
EXAMPLES = ROOT / "examples"
SMALL_VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=5)
OPTIONS = {name: value for name, value in SMALL_VIT.items() if name != "num_classes"}
SMALL_VIT_KWARGS = [f"{name}={value}" for name, value in OPTIONS.items()]
SPEC = ModelSpec("vit_tiny_ewa_moe", 5, OPTIONS)
#: The V-MoE of the golden files.
TINY = dict(
    img_size=16,
    patch_size=4,
    embed_dim=16,
    depth=4,
    num_heads=2,
    mlp_ratio=2,
    num_classes=7,
    act_layer="gelu_tanh",
    num_experts=4,
    moe_layers="1,3",
    group_images=2,
)

#: Every way to route: name of a model, and its options. Tests that take one of them by default
#: (``first_case``) take the first, which has a router, losses, several choices and dropped ones.
FAMILIES = {
    "top-2, capacity": (
        "vit_tiny_moe",
        dict(top_k=2, capacity_factor=1.05, eval_capacity_factor=0.7),
    ),
    "random partition": ("vit_tiny_ewa_moe", {}),
    "top-1": ("vit_tiny_moe", {}),
    "top-2, nothing dropped": ("vit_tiny_moe", dict(top_k=2, capacity_factor="none")),
    "sigmoid, bias": (
        "vit_tiny_moe",
        dict(top_k=2, score="sigmoid", gate_mode="renorm", balance="bias"),
    ),
    "V-MoE": (
        "vmoe_s32",
        dict(
            num_experts=4,
            moe_layers="last-1",
            noise_std=0.0,
            aux_loss="balance",
            batch_priority=True,
        ),
    ),
    "image-level": ("vimoe_s14", dict(capacity_factor=1.0)),
    "shared expert": ("vimoe_s14_shared", {}),
    "WideNet": ("widenet_b", dict(mlp_ratio=4.0)),  # widths that a GPU's products take
    "fine-grained": ("vit_tiny_moe", dict(top_k=2, expert_width=0.5, shared_expert=True)),
    "expert choice": ("vit_tiny_moe", dict(router="expert_choice", capacity_factor=1.5)),
    "Soft MoE": ("soft_moe_s16", dict(moe_layers="every-2", slots_per_expert=2)),
    "pBE": (
        "vmoe_pbe_s32",
        dict(num_experts=4, moe_layers="last-1", noise_std=0.0, aux_loss="balance"),
    ),
    "partitioning": (
        "vmoe_pbe_s32",
        dict(
            num_experts=4,
            moe_layers="last-1",
            noise_std=0.0,
            aux_loss="balance",
            ensemble="partitioning",
        ),
    ),
    "multi-head": (
        "vmoe_pbe_s32",
        dict(
            num_experts=4,
            moe_layers="last-1",
            noise_std=0.0,
            aux_loss="balance",
            ensemble="multi_head",
            top_k=2,
        ),
    ),
}

#: Those that the default tests take; the others, which share their code, are for ``pytest -m ci``.
DAILY = ("top-2, capacity", "random partition", "Soft MoE", "pBE")


def families(names=tuple(FAMILIES)):
    """Return cases for ``pytest.mark.parametrize``: ways to route, all but a few for ci."""
    return [pytest.param(name, marks=[] if name in DAILY else pytest.mark.ci) for name in names]


#: Brightness that a class adds to red, green and blue.
COLOURS = 60 * np.array([(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)])


class OnDevice(torch.Tensor):
    """A CPU's tensor that has no float64 until it is copied to the host.

    Tensors on Apple's GPUs (MPS) are so.
    """

    def double(self):
        raise TypeError("MPS has no float64.")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def make_model(name="vit_tiny_moe", **options):
    """Make a small model in evaluation mode that tells images apart.

    A fresh model's head and routers hardly do.
    """
    model = timm.create_model(name, **{**SMALL_VIT, **options}).eval()
    if isinstance(model.head, nn.Linear):
        nn.init.normal_(model.head.weight, std=0.3)
    for layer in moe_layers(model).values():
        if hasattr(layer.router, "weight"):
            nn.init.normal_(layer.router.weight)
    return model


def family(name):
    """Make a small model of a way to route, whose experts differ in each of their tensors."""
    model, options = FAMILIES[name]
    torch.manual_seed(0)
    model = timm.create_model(model, **{**SMALL_VIT, "num_experts": 4, "depth": 2, **options})
    for parameter in expert_parameters(model).values():
        nn.init.normal_(parameter, std=0.1)
    return model


def without_draws(name):
    """Make a small model without dropout and noise, which a compiler draws in its own way."""
    model = family(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "noise_std"):
            module.noise_std = 0.0
    return model


def save_as_train_py(file, model, name="vit_tiny_ewa_moe", /, *, ema=None, **stated):
    """Save a small model as train.py does; its arguments may state more, or something else.

    ``ema`` is a model with the EMA of the weights.
    """
    args = argparse.Namespace(
        **{"model": name, "num_classes": 5, "model_kwargs": OPTIONS, **stated}
    )
    weights = {"state_dict": model.state_dict()}
    if ema is not None:
        weights["state_dict_ema"] = ema.state_dict()
    torch.save({"epoch": 1, **weights, "args": args}, file)
    return file


def edit(folder, change):
    """Change the config.json in a folder."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def write_images(folder, images_per_class, classes=("class0", "class1", "class2")):
    """Write an ImageFolder for each split.

    Images are noise of 32 x 32 pixels in a colour for each of up to six classes.

    Args:
        folder: parent of the splits.
        images_per_class: number of images for each split, ``{"train": 24, "test": 13}``.
        classes: names of the classes' folders.
    """
    random = np.random.default_rng(0)
    for split, number in images_per_class.items():
        for name, colour in zip(classes, COLOURS[: len(classes)], strict=True):
            place = folder / split / name
            place.mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, 130, (32, 32, 3)) + colour
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{index}.png")
    return folder


def cases(arrays, letter):
    """Yield the cases of a golden file as objects."""
    for index in range(int(arrays["n_cases"])):
        prefix = f"{letter}{index}_"
        yield SimpleNamespace(
            **{
                name.removeprefix(prefix): v
                for name, v in arrays.items()
                if name.startswith(prefix)
            }
        )


def drawn_choices(rows, num_experts, choices):
    """Different experts for each row, and their weights, both (T, K)."""
    expert_TK = torch.stack([torch.randperm(num_experts)[:choices] for _ in range(rows)])
    return expert_TK, torch.rand(rows, choices)


def output_of_expert(layer, expert, row):
    """Compute fc1, GELU and fc2 of one expert for one row (D,), by hand."""
    weights = {name: stacked[expert] for name, stacked in layer.named_expert_parameters()}
    hidden = nn.functional.gelu(weights["fc1.weight"] @ row + weights["fc1.bias"])
    return weights["fc2.weight"] @ hidden + weights["fc2.bias"]


def loads(choice_GSK, num_experts):
    """(G, E) number of choices of each expert."""
    return torch.nn.functional.one_hot(choice_GSK, num_experts).sum((1, 2))


def dense_combine(routing, num_experts):
    """(T, E) weight with which each expert's output enters each row."""
    # The last is of dropped choices.
    combined = torch.zeros(routing.slots.shape[0], num_experts + 1)
    for expert, weight in zip(routing.experts().T, routing.weights().T, strict=True):
        combined = combined.scatter_add(1, expert.unsqueeze(1), weight.unsqueeze(1))
    return combined[:, :num_experts]


class InTurn(Router):
    """Sends the rows of each process to the experts that it holds, in turn.

    Args:
        first: the first expert of each process whose images the layer gets.
        held: number of experts that a process holds.
    """

    depends_on_input = False

    def __init__(self, first, held):
        super().__init__(max(first) + held)
        self.first = torch.tensor(first)
        self.held = held

    def forward(self, x):
        row = torch.arange(x[..., 0].numel() // len(self.first)) % self.held
        expert = (self.first.unsqueeze(1) + row).view(-1, 1)
        return routing_to(expert, torch.ones_like(expert, dtype=x.dtype), self.num_experts)
