"""Variants of Vision Transformers: their sizes, and their registration with timm."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    get_arch_pretrained_cfgs,
    model_entrypoint,
    register_model,
)
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from ..integrations.timm import build_instead
from .mixin import note_dense_form

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
#: Preprocessing as in V-MoE's configurations, for models that have no counterpart in timm.
_OWN_CFG: dict[str, Any] = dict(
    num_classes=1000,
    first_conv="patch_embed.proj",
    classifier="head",
    input_size=(3, 224, 224),
    fixed_input_size=True,
    crop_pct=0.875,
    interpolation="bilinear",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


class Variant(NamedTuple):
    """A registered model and how it is made of a model of timm.

    Attributes:
        description: one line about the model.
        stock: the dense model whose pretrained tags it takes over, and as which its weights are
            exported; a model of timm, but for WideNet.
        args: arguments that make the stock class this model.
        own_size: arguments that the exported model needs too, since timm has no model of this
            size, and no weights for it.
        cfg: entries of the pretrained configs that differ from the stock's.
    """

    description: str
    stock: str
    args: dict[str, Any]
    own_size: dict[str, Any] = {}  # noqa: RUF012  # nobody writes to it
    cfg: dict[str, Any] = {}  # noqa: RUF012  # nobody writes to it

    def cfgs(self, name: str) -> dict[str, Any]:
        """Return the pretrained configs of the model of this name, by name and tag."""
        size = self.args.get("img_size")
        changes: dict[str, Any] = {"input_size": (3, size, size)} if size else {}
        changes |= self.cfg
        stock = {} if self.own_size else cfgs_like(self.stock, name, **changes)
        return stock or {name: _OWN_CFG}


def of_size(
    description: str, size: str, patch: int, weights: str = "224", **options: Any
) -> Variant:
    """Return a variant in a size of timm's ViTs.

    Args:
        description: one line about the model.
        size: name in :data:`SIZES`.
        patch: side of a patch, in pixels.
        weights: end of the name of timm's model with the weights.
        options: further arguments of the model.
    """
    return Variant(
        description,
        f"vit_{size}_patch{patch}_{weights}",
        {**SIZES[size], "patch_size": patch, **options},
    )


def vmoe_variants(
    prefix: str, model: str, options: dict[str, Any], with_huge: bool = True
) -> dict[str, Variant]:
    """Return variants in V-MoE's sizes; H has experts in the last five odd blocks.

    Args:
        prefix: beginning of the registered names.
        model: beginning of the descriptions.
        options: arguments of all variants.
        with_huge: include H.
    """
    small = f"{model}-S/32: 512 wide and 8 blocks, not timm's ViT-S."
    variants = {
        f"{prefix}_s32": Variant(
            small, "vit_small_patch32_224", {"patch_size": 32, **options}, SIZES["vmoe_small"]
        ),
        f"{prefix}_b32": of_size(f"{model}-B/32.", "base", 32, **options),
        f"{prefix}_b16": of_size(f"{model}-B/16.", "base", 16, **options),
        f"{prefix}_l32": of_size(f"{model}-L/32.", "large", 32, **options),
        f"{prefix}_l16": of_size(f"{model}-L/16.", "large", 16, **options),
    }
    if with_huge:
        options_of_huge = {**options, "moe_layers": "last-5"}
        variants[f"{prefix}_h14"] = of_size(f"{model}-H/14.", "huge", 14, **options_of_huge)
    return variants


def cfgs_like(stock: str, name: str, **changes: Any) -> dict[str, Any]:
    """Return a timm model's pretrained configs, if it has any, for a model of another name.

    Args:
        stock: name of timm's model.
        name: name of the other model.
        changes: entries that differ.
    """
    cfgs = {}
    for cfg in get_arch_pretrained_cfgs(stock).values():
        # Behind the URL is an .npz file, but the weights on the Hub are in timm's format.
        if cfg.custom_load and cfg.hf_hub_id:
            cfg.url = ""
            cfg.custom_load = False
        cfgs[f"{name}.{cfg.tag}" if cfg.tag else name] = replace(cfg, **changes) if changes else cfg
    return cfgs


def create_vit(
    model_class: type[nn.Module],
    name: str,
    variant: Variant,
    pretrained: bool,
    kwargs: dict[str, Any],
) -> nn.Module:
    """Build a variant as timm builds its Vision Transformers; ``kwargs`` are the caller's."""
    return build_model_with_cfg(
        model_class,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **{**variant.own_size, **variant.args, **kwargs},
    )


def create_like_stock(
    model_class: type[nn.Module],
    name: str,
    variant: Variant,
    pretrained: bool,
    kwargs: dict[str, Any],
) -> nn.Module:
    """Build a variant by the entrypoint of its stock model, to be exported as this.

    So it has the stock model's arguments, loads its weights, and has its features.

    Args:
        model_class: the class with experts in place of the stock model's.
        name: registered name of the model.
        variant: the variant. ``args`` are the options of its experts; what changes the dense model,
            too, belongs in ``own_size``.
        pretrained: load timm's weights.
        kwargs: the caller's arguments.
    """
    model, _ = build_instead(
        model_entrypoint(variant.stock),
        lambda stock_class: model_class,
        name,
        pretrained=pretrained,
        **{**variant.own_size, **variant.args, **kwargs},
    )
    note_dense_form(model, variant.stock, {**variant.own_size, **kwargs})
    return model


def register_variants(
    module: str, variants: Mapping[str, Variant], create: Callable[..., nn.Module]
) -> None:
    """Register variants for a module.

    Args:
        module: name of the module.
        variants: the variants by their registered names.
        create: makes a model of a name, the variant, ``pretrained`` and the caller's arguments.
    """
    for name, variant in variants.items():
        register(
            module, name, variant.description, partial(create, name, variant), variant.cfgs(name)
        )


def register(
    module: str,
    name: str,
    description: str,
    create: Callable[[bool, dict[str, Any]], nn.Module],
    cfgs: dict[str, Any],
) -> None:
    """Register a model with timm's factory.

    Args:
        module: name of the module that gets the entrypoint.
        name: registered name of the model.
        description: docstring of the entrypoint.
        create: makes the model of ``pretrained`` and the caller's arguments.
        cfgs: its pretrained configs by name and tag.
    """

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(pretrained, kwargs)

    place = vars(sys.modules[module])
    entrypoint.place = place  # type: ignore[attr-defined]  # where the model's class is
    entrypoint.__name__ = name
    entrypoint.__qualname__ = name
    entrypoint.__module__ = module
    entrypoint.__doc__ = description
    place.setdefault("default_cfgs", {}).update(generate_default_cfgs(cfgs))
    place[name] = register_model(entrypoint)
