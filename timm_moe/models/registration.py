"""Sizes of Vision Transformers, and the registration that all families share."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from timm.models import PretrainedCfg, get_arch_pretrained_cfgs, register_model
from torch import nn

#: Arguments of timm's VisionTransformer by size. ``"vmoe_small"`` is V-MoE's own S.
SIZES: dict[str, dict[str, Any]] = {
    "xtiny": dict(embed_dim=192, depth=9, num_heads=12, mlp_ratio=2),
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),
    "vmoe_small": dict(embed_dim=512, depth=8, num_heads=8),
    "small": dict(embed_dim=384, depth=12, num_heads=6),
    "base": dict(embed_dim=768, depth=12, num_heads=12),
    "large": dict(embed_dim=1024, depth=24, num_heads=16),
    "huge": dict(embed_dim=1280, depth=32, num_heads=16),
}


def vit_args(size: str, patch_size: int, **options: Any) -> dict[str, Any]:
    """Return the arguments of a size and a patch size, and further options."""
    return {**SIZES[size], "patch_size": patch_size, **options}


def stock_cfgs(name: str, stock: str, **changes: Any) -> dict[str, PretrainedCfg]:
    """Return pretrained configs for a model that takes over the pretrained tags of a stock model of timm."""
    # The Hub's weights are in timm's own format; the .npz originals behind `url` are not needed.
    return {
        f"{name}.{cfg.tag}" if cfg.tag else name: replace(cfg, url="", custom_load=False, **changes)
        for cfg in get_arch_pretrained_cfgs(stock).values()
    }


def register(module: str, name: str, description: str, create: Callable[[bool, dict[str, Any]], nn.Module]) -> None:
    """Register ``create(pretrained, kwargs)`` with timm's factory, in a module whose ``default_cfgs`` has the model."""

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(pretrained, kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = module
    entrypoint.__doc__ = description
    setattr(sys.modules[module], name, register_model(entrypoint))
