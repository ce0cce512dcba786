"""Expert layers of other packages on the same work.

Rows, router weights, experts, choices and active FLOPs are equal.

A package that is not installed is left out. ``pip install -e ".[benchmarks]"`` installs those that
need no compiler for CUDA; scattermoe does.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from timm.layers import Mlp, SwiGLUPacked
from torch import Tensor, nn

from timm_moe.layers import MoeMlp

from .layers import HIDDEN, TOKENS, WIDTH, mlp, router, training
from .protocol import Contest, Setting

#: Of places to choices; st-moe-pytorch and mixture-of-experts count places per row, and round down.
CAPACITY = 1.25


@dataclass(frozen=True)
class Size:
    """Sizes of a layer.

    Attributes:
        name: begins the names of its contests.
        width: of its inputs.
        hidden: width within an expert; two thirds of it with SwiGLU, which has three matrices
            instead of two.
        experts: number of experts.
        tokens: rows of an image.
    """

    name: str = ""
    width: int = WIDTH
    hidden: int = HIDDEN
    experts: int = 8
    tokens: int = TOKENS


class InBfloat16(nn.Module):
    """A layer with weights, inputs and outputs in bfloat16, outside of autocast."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.layer(x.bfloat16())


def measure(setting: Setting) -> Iterator[Contest]:
    return contests(setting, Size())


def contests(setting: Setting, size: Size) -> Iterator[Contest]:
    """Compare layers of one size."""
    x = torch.randn(setting.pick(32, 128), size.tokens, size.width, device=setting.device)
    layers: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: mlp(2 * size.hidden, size.width),
        "timm_moe": partial(moe, size),
        "st_moe_pytorch": partial(st_moe, size),
        "mixture_of_experts": partial(mixture_of_experts, size),
        "soft_moe_pytorch": partial(soft_moe, size),
    }
    notes = {
        "st_moe_pytorch": "one-hot einsum over (rows, experts, places); also a z-loss",
        "mixture_of_experts": "one-hot einsum over (rows, experts, places); experts without biases",
        "soft_moe_pytorch": (
            "another method: no choice, every place takes a mean of all rows of the image; as many "
            "places as rows times 2, so the experts do the same work"
        ),
    }
    title = f"{size.name}top-2 of {size.experts}, capacity {CAPACITY} in each image"
    yield Contest(title, training(_installed(layers), x, setting), notes)
    for top_k in (1, 2):
        name = f"{size.name}top-{top_k} of {size.experts} SwiGLU experts, nothing dropped"
        theirs: dict[str, Callable[[], nn.Module]] = {
            "transformers, eager": partial(qwen3_moe, size, top_k, "eager")
        }
        if setting.dtype == "float32":
            theirs["transformers, grouped_mm"] = partial(qwen3_moe, size, top_k, "grouped_mm")
        ours = {"dense": partial(swiglu, size, top_k), "timm_moe": partial(swiglu_moe, size, top_k)}
        notes = dict.fromkeys(theirs, "no balance loss")
        yield Contest(name, training(_installed({**ours, **theirs}), x, setting), notes)
        if setting.dtype == "bfloat16":
            theirs = {
                "transformers, grouped_mm": partial(qwen3_moe, size, top_k, "grouped_mm"),
                "scattermoe": partial(scattermoe, size, top_k),
            }
            layers = {
                entry: lambda make=make: InBfloat16(make())
                for entry, make in _installed({**ours, **theirs}).items()
            }
            notes = dict.fromkeys(theirs, "no balance loss")
            yield Contest(
                f"{name}, weights in bfloat16", training(layers, x.bfloat16(), setting), notes
            )


def _installed(layers: dict[str, Callable[[], nn.Module]]) -> dict[str, Callable[[], nn.Module]]:
    own = ("dense", "timm_moe")
    return {
        name: make
        for name, make in layers.items()
        if name in own or importlib.util.find_spec(name.split(",")[0])
    }


def moe(size: Size) -> nn.Module:
    route = router(size.experts, 2, width=size.width, capacity_factor=CAPACITY, group_images=1)
    return MoeMlp(mlp(size.hidden, size.width), route)


def swiglu(size: Size, networks: int) -> nn.Module:
    return SwiGLUPacked(size.width, 2 * networks * (size.hidden * 2 // 3), bias=False)


def swiglu_moe(size: Size, top_k: int) -> nn.Module:
    return MoeMlp(swiglu(size, 1), router(size.experts, top_k, width=size.width))


def st_moe(size: Size) -> nn.Module:
    from st_moe_pytorch import MoE

    layer = MoE(
        size.width,
        num_experts=size.experts,
        gating_top_n=2,
        threshold_train=0.0,
        capacity_factor_train=2 * CAPACITY,
        experts=nn.ModuleList(Mlp(size.width, size.hidden) for _ in range(size.experts)),
    )
    nn.init.trunc_normal_(layer.gate.to_gates.weight, std=0.02)
    return layer


def mixture_of_experts(size: Size) -> nn.Module:
    from mixture_of_experts import MoE

    layer = MoE(
        size.width,
        num_experts=size.experts,
        hidden_dim=size.hidden,
        activation=nn.GELU,
        second_policy_train="all",
        capacity_factor_train=2 * CAPACITY,
    )
    nn.init.trunc_normal_(layer.gate.w_gating, std=0.02)
    return layer


def soft_moe(size: Size) -> nn.Module:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(size.width, num_experts=size.experts, num_slots=2 * size.tokens // size.experts)


def qwen3_moe(size: Size, top_k: int, implementation: str) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=size.width,
        moe_intermediate_size=size.hidden * 2 // 3,
        num_experts=size.experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=False,
        experts_implementation=implementation,
    )
    layer = Qwen3MoeSparseMoeBlock(config)
    for parameter in layer.parameters():
        nn.init.trunc_normal_(parameter, std=0.02)
    return layer


def scattermoe(size: Size, top_k: int) -> nn.Module:
    """Build scattermoe's experts, which need a GPU, behind a router."""
    from scattermoe.mlp import GLUMLP

    return _Scattered(
        size,
        top_k,
        GLUMLP(size.width, size.hidden * 2 // 3, size.experts, top_k, activation=nn.SiLU()),
    )


class _Scattered(nn.Module):
    def __init__(self, size: Size, top_k: int, experts: nn.Module):
        super().__init__()
        self.router, self.experts, self.top_k = (
            nn.Linear(size.width, size.experts, bias=False),
            experts,
            top_k,
        )

    def forward(self, x: Tensor) -> Tensor:
        gates, choices = self.router(x.flatten(0, 1)).softmax(1).topk(self.top_k)
        return self.experts(x, gates, choices)
