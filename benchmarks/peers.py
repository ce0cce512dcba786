"""Expert layers of other packages on the same work: equal rows, router weights, experts, choices and active FLOPs.

A package that is not installed is left out. ``pip install -e ".[benchmarks]"`` installs them.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
from timm.layers import Mlp, SwiGLUPacked
from torch import nn

from timm_moe.layers import MoeMlp

from .layers import HIDDEN, TOKENS, WIDTH, mlp, router, training
from .protocol import Contest, Row, Setting, run

EXPERTS = 8
SWIGLU_HIDDEN = HIDDEN * 2 // 3  # three matrices instead of two
#: Of places to choices; st-moe-pytorch and mixture-of-experts count places per row, and round down.
CAPACITY = 1.25


def measure(setting: Setting) -> Iterator[Row]:
    for contest in contests(setting):
        yield from run(contest, setting)


def contests(setting: Setting) -> Iterator[Contest]:
    x = torch.randn(setting.pick(32, 128), TOKENS, WIDTH, device=setting.device)
    layers: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: mlp(2 * HIDDEN),
        "timm_moe": lambda: MoeMlp(mlp(), router(EXPERTS, 2, capacity_factor=CAPACITY, group_images=1), EXPERTS),
        "st_moe_pytorch": st_moe,
        "mixture_of_experts": mixture_of_experts,
        "soft_moe_pytorch": soft_moe,
    }
    notes = {
        "st_moe_pytorch": "one-hot einsum over (rows, experts, places); also a z-loss",
        "mixture_of_experts": "one-hot einsum over (rows, experts, places); experts without biases",
        "soft_moe_pytorch": "another method: no choice, every place takes a mean of all rows of the image; as many "
        "places as rows times 2, so the experts do the same work",
    }
    yield Contest(f"top-2 of 8, capacity {CAPACITY} in each image", training(_installed(layers), x, setting), notes)
    for top_k in (1, 2):
        theirs = {f"transformers, {kind}": partial(qwen3_moe, top_k, kind) for kind in _kinds(setting)}
        layers = {"dense": partial(swiglu, top_k), "timm_moe": partial(swiglu_moe, top_k), **theirs}
        notes = dict.fromkeys(theirs, "no balance loss")
        name = f"top-{top_k} of 8 SwiGLU experts, nothing dropped"
        yield Contest(name, training(_installed(layers), x, setting), notes)


def _kinds(setting: Setting) -> tuple[str, ...]:
    """List the implementations of transformers; its grouped_mm computes in float32 under autocast."""
    return ("eager", "grouped_mm") if setting.dtype == "float32" else ("eager",)


def _installed(layers: dict[str, Callable[[], nn.Module]]) -> dict[str, Callable[[], nn.Module]]:
    own = ("dense", "timm_moe")
    return {name: make for name, make in layers.items() if name in own or importlib.util.find_spec(name.split(",")[0])}


def swiglu(networks: int) -> nn.Module:
    return SwiGLUPacked(WIDTH, 2 * networks * SWIGLU_HIDDEN, bias=False)


def swiglu_moe(top_k: int) -> nn.Module:
    return MoeMlp(swiglu(1), router(EXPERTS, top_k), EXPERTS)


def st_moe() -> nn.Module:
    from st_moe_pytorch import MoE

    layer = MoE(
        WIDTH,
        num_experts=EXPERTS,
        gating_top_n=2,
        threshold_train=0.0,
        capacity_factor_train=2 * CAPACITY,
        experts=nn.ModuleList(Mlp(WIDTH, HIDDEN) for _ in range(EXPERTS)),
    )
    nn.init.trunc_normal_(layer.gate.to_gates.weight, std=0.02)
    return layer


def mixture_of_experts() -> nn.Module:
    from mixture_of_experts import MoE

    layer = MoE(
        WIDTH,
        num_experts=EXPERTS,
        hidden_dim=HIDDEN,
        activation=nn.GELU,
        second_policy_train="all",
        capacity_factor_train=2 * CAPACITY,
    )
    nn.init.trunc_normal_(layer.gate.w_gating, std=0.02)
    return layer


def soft_moe() -> nn.Module:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(WIDTH, num_experts=EXPERTS, num_slots=2 * TOKENS // EXPERTS)


def qwen3_moe(top_k: int, implementation: str) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=SWIGLU_HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=top_k,
        norm_topk_prob=False,
        experts_implementation=implementation,
    )
    layer = Qwen3MoeSparseMoeBlock(config)
    for parameter in layer.parameters():
        nn.init.trunc_normal_(parameter, std=0.02)
    return layer
