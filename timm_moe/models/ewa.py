"""EWA (arXiv 2308.06093) for every architecture of timm whose blocks hold an Mlp.

The models are called ``<architecture>_ewa_moe``. Each family of timm has a module here that exists
in memory only, e.g. ``timm_moe.models.ewa.swin_transformer``. It holds the entrypoints, so that
timm lists them with the family, and the model classes, each made on first use. An entrypoint calls
timm's own, which builds ``Moe<Class>`` instead of ``<Class>`` and is otherwise unchanged, see
:func:`timm_moe.integrations.timm.build_instead`.
"""

import sys
from functools import partial
from types import ModuleType
from typing import Any

from timm.models import list_models, model_entrypoint
from torch import nn

from ..integrations.timm import add_module, build_instead
from ..model_config import change_pretrained_cfg
from .mixin import moe_class, note_dense_form
from .variants import cfgs_like, register
from .vision_transformer import MoeVisionTransformer

#: Modules of timm.models with such architectures. Those that the installed timm lacks are skipped;
#: ``tests/every_model.py`` finds missing ones.
FAMILIES = (
    "beit",
    "byobnet",
    "cait",
    "coat",
    "convit",
    "convnext",
    "crossvit",
    "csatv2",
    "davit",
    "deepseek_vit",
    "deit",
    "edgenext",
    "efficientformer",
    "eva",
    "gcvit",
    "gemma4_vit",
    "hiera",
    "hieradet_sam2",
    "maxxvit",
    "metaformer",
    "mlp_mixer",
    "mobilevit",
    "mvitv2",
    "naflexvit",
    "nest",
    "pit",
    "qwen3_vit",
    "sequencer",
    "swin_transformer",
    "swin_transformer_v2",
    "swin_transformer_v2_cr",
    "tiny_vit",
    "tnt",
    "twins",
    "vision_transformer",
    "vision_transformer_hybrid",
    "vision_transformer_relpos",
    "vision_transformer_sam",
    "vitamin",
    "volo",
    "xcit",
)
#: Patterns of names to leave out: architectures with fewer than two feed-forward networks that act
#: on each token alone. Their networks are convolutions, mix tokens, or are part of the attention.
_LEFT_OUT = {
    "byobnet": ("*",),  # The family is here only for its class, which MobileViT uses.
    "convnext": (
        "convnextv2_*",
        "convnext_atto*",
        "convnext_femto*",
        "convnext_pico*",
        "convnext_nano*",
        "convnext_zepto*",
        "convnext_tiny_hnf",
    ),
    "efficientformer": ("efficientformer_l1",),
    "gemma4_vit": ("gemma4_vit_167m*",),
    "maxxvit": ("coatnet_*", "coatnext_*", "test_coatnet"),
    "metaformer": ("convformer_*", "poolformer*"),
    "mlp_mixer": ("gmlp_*",),
    "mobilevit": ("mobilevitv2_*",),
    "vision_transformer": ("*_xp_*", "vit_pwee_*", "vit_dpwee_*"),
}


class _Family(ModuleType):
    """A module with the expert models of one module of timm.models."""

    def __init__(self, name: str):
        super().__init__(f"{__name__}.{name}", f"EWA for the models of timm.models.{name}.")
        self.__all__: list[str] = []  # timm adds the entrypoints
        self.stock_module: Any = sys.modules[f"timm.models.{name}"]

    def __getattr__(self, name: str) -> type[nn.Module]:
        stock_class = getattr(self.stock_module, name.removeprefix("Moe"), None)
        if not name.startswith("Moe") or not isinstance(stock_class, type):
            raise AttributeError(f"{self.__name__} has no {name}.")
        made = moe_class(stock_class, self.__name__)
        vars(self)[name] = made
        return made


def expert_class(stock_class: type[nn.Module]) -> type[nn.Module]:
    """Return ``Moe<Class>`` from the module where pickle looks for it.

    Raises:
        KeyError: if the class is of none of the families.
    """
    family = _families[stock_class.__module__.rpartition(".")[2]]
    return getattr(family, f"Moe{stock_class.__name__}")


def _create(architecture: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Build the EWA form of an architecture of timm; ``kwargs`` are the caller's."""
    # The name is stated here, as timm's vitamin_xlarge_336 states another architecture's.
    name = f"{architecture}_ewa_moe"
    entrypoint = model_entrypoint(architecture)
    model, stated = build_instead(entrypoint, expert_class, name, pretrained=pretrained, **kwargs)
    # Some of timm's entrypoints look up the config of the dense architecture before they build.
    change_pretrained_cfg(model, architecture=name)
    # Some look up out_features by the pretrained tag, which an exported model does not have.
    looked_up = {option: value for option, value in stated.items() if option == "out_features"}
    note_dense_form(model, architecture, {**kwargs, **looked_up})
    return model


def _register(family: str) -> _Family:
    """Make the module of a family and register its models."""
    module = _Family(family)
    add_module(module)
    if family == "vision_transformer":  # The class is written out in models/vision_transformer.py.
        setattr(module, MoeVisionTransformer.__name__, MoeVisionTransformer)
    for architecture in list_models(module=family, exclude_filters=_LEFT_OUT.get(family, ())):
        if model_entrypoint(architecture).__module__ != module.stock_module.__name__:
            continue  # Another package registered this architecture.
        name = f"{architecture}_ewa_moe"
        register(
            module.__name__,
            name,
            f"EWA {architecture}.",
            partial(_create, architecture),
            cfgs_like(architecture, name),
        )
    return module


_families = {name: _register(name) for name in FAMILIES if sys.modules.get(f"timm.models.{name}")}


def architectures() -> list[str]:
    """List the architectures of timm that have an ``_ewa_moe``, by family and name."""
    return [
        name.removesuffix("_ewa_moe") for module in _families.values() for name in module.__all__
    ]
