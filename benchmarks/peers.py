"""Other packages' expert layers on the same work: the same rows, router weights, experts, choices and active FLOPs.

A peer that is not installed is left out: ``pip install -e ".[benchmarks]"`` brings those that install everywhere.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
from timm.layers import Mlp, SwiGLUPacked
from torch import nn

from timm_moe.layers import MoeMlp

from .layers import HIDDEN, TOKENS, WIDTH, mlp, router, train_layer
from .protocol import Contest, Row, Setting, Work, run

EXPERTS = 8
#: st-moe-pytorch and mixture-of-experts count places for rows and not for choices, and round down.
CAPACITY = 1.25


def measure(setting: Setting) -> Iterator[Row]:
    for contest in contests(setting):
        yield from run(contest, setting)


def contests(setting: Setting) -> Iterator[Contest]:
    x = torch.randn(setting.pick(32, 128), TOKENS, WIDTH, device=setting.device)
    train = partial(train_layer, x=x, setting=setting)
    yield Contest(
        f"top-2 of 8, capacity {CAPACITY} in each image",
        _installed(
            {
                "dense": lambda: train(mlp(2 * HIDDEN)),
                "timm_moe": lambda: train(
                    MoeMlp(mlp(), router(EXPERTS, 2, capacity_factor=CAPACITY, group_images=1), EXPERTS)
                ),
                "st_moe_pytorch": lambda: train(st_moe()),
                "mixture_of_experts": lambda: train(mixture_of_experts()),
                "soft_moe_pytorch": lambda: train(soft_moe()),
            }
        ),
        {
            "st_moe_pytorch": "one-hot einsum over (rows, experts, places); also a z-loss",
            "mixture_of_experts": "one-hot einsum over (rows, experts, places); experts without biases",
            "soft_moe_pytorch": "another method: no choice, every place takes a mean of all rows of the image; as many "
            "places as rows times 2, so the experts do the same work",
        },
    )
    for top_k in (1, 2):
        hidden = HIDDEN * 2 // 3  # three matrices instead of two
        yield Contest(
            f"top-{top_k} of 8 SwiGLU experts, nothing dropped",
            _installed(
                {
                    "dense": lambda top_k=top_k, hidden=hidden: train(
                        SwiGLUPacked(WIDTH, 2 * top_k * hidden, bias=False)
                    ),
                    "timm_moe": lambda top_k=top_k, hidden=hidden: train(
                        MoeMlp(SwiGLUPacked(WIDTH, 2 * hidden, bias=False), router(EXPERTS, top_k), EXPERTS)
                    ),
                    **{
                        f"transformers, {road}": lambda top_k=top_k, hidden=hidden, road=road: train(
                            qwen3_moe(top_k, hidden, road)
                        )
                        for road in _roads(setting)
                    },
                }
            ),
            {f"transformers, {road}": "no balance loss" for road in _roads(setting)},
        )


def _roads(setting: Setting) -> tuple[str, ...]:
    """Of transformers; its grouped_mm computes in float32 under autocast."""
    return ("eager", "grouped_mm") if setting.dtype == "float32" else ("eager",)


def _installed(entries: dict[str, Callable[[], Work]]) -> dict[str, Callable[[], Work]]:
    own = ("dense", "timm_moe")
    return {
        name: entry for name, entry in entries.items() if name in own or importlib.util.find_spec(name.split(",")[0])
    }


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


def qwen3_moe(top_k: int, hidden: int, road: str) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=hidden,
        num_experts=EXPERTS,
        num_experts_per_tok=top_k,
        norm_topk_prob=False,
        experts_implementation=road,
    )
    layer = Qwen3MoeSparseMoeBlock(config)
    for parameter in layer.parameters():
        nn.init.trunc_normal_(parameter, std=0.02)
    return layer
