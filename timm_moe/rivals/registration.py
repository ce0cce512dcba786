"""Registration of a rival in V-MoE's sizes but H."""

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from ..models.registration import register
from ..models.vision_transformer import Variant, vmoe_variants


def variants(family: str, description: str, options: dict[str, Any]) -> dict[str, Variant]:
    """Return ``<family>_<size>`` in five sizes; the description begins the docstrings of their entrypoints."""
    sizes = vmoe_variants(family, description, options)
    del sizes[f"{family}_h14"]
    return sizes


def cfgs(variants: dict[str, Variant]) -> Any:
    """Return the ``default_cfgs`` of a module that registers these variants."""
    return generate_default_cfgs(
        {tagged: cfg for name, variant in variants.items() for tagged, cfg in variant.cfgs(name).items()}
    )


def register_variants(module: str, variants: dict[str, Variant], create: Callable[..., nn.Module]) -> None:
    """Register variants for their module; ``create`` takes a name, the variant, ``pretrained`` and ``kwargs``."""
    for name, variant in variants.items():
        register(module, name, variant.description, partial(create, name, variant))


def create_vit(
    model_class: type[nn.Module], name: str, variant: Variant, pretrained: bool, kwargs: dict[str, Any]
) -> nn.Module:
    """Build a dense model as timm builds its Vision Transformers."""
    return build_model_with_cfg(
        model_class,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **{**variant.own_size, **variant.args, **kwargs},
    )
