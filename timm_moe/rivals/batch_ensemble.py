"""Batch ensembles inside one dense Vision Transformer (BatchEnsemble, arXiv 2002.06715; pBE, 2110.03360, appendix).

Shape suffixes: B images, M members, D width.
"""

from dataclasses import replace
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    get_arch_pretrained_cfgs,
    register_model,
    register_notrace_module,
)
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert.blocks import select_blocks
from ..layers.checks import check_integer, check_number
from ..models.members import MembersMixin
from ..models.vision_transformer import VMOE_S_CFG, PreLogitsVisionTransformer
from .learning_rates import scale_learning_rates

__all__ = ["BatchEnsembleLinear", "BatchEnsembleVisionTransformer"]  # timm adds the entrypoints

FACTOR_INITS = ("sign", "normal")


class BatchEnsembleLinear(nn.Module):
    """``((x * r_m) U) * s_m + b_m`` for the m-th member: one matrix U for all, two vectors and a bias for each.

    The batch holds each image M times in a row, once for each member.

    Args:
        linear: the layer to replace. All members begin with its weight and its bias.
        ensemble_size: M.
        factor_init: how the factors begin: ``"sign"``, 1 or -1 with equal probability, or ``"normal"``, N(1, 0.5).

    Attributes:
        weight: (D', D), U.
        bias: (M, D'), or None.
        input_factor: (M, D), r.
        output_factor: (M, D'), s.

    Raises:
        ValueError: if M is no positive integer, or on an unknown ``factor_init``.
    """

    def __init__(self, linear: nn.Linear, ensemble_size: int, factor_init: str = "sign"):
        super().__init__()
        check_integer("ensemble_size", ensemble_size, 1)
        if not isinstance(factor_init, str) or factor_init not in FACTOR_INITS:
            raise ValueError(f"factor_init must be one of {', '.join(FACTOR_INITS)}, got {factor_init!r}.")
        self.ensemble_size = ensemble_size
        self.factor_init = factor_init
        self.weight = linear.weight
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().repeat(ensemble_size, 1))
        self.input_factor = nn.Parameter(linear.weight.new_empty(ensemble_size, linear.in_features))
        self.output_factor = nn.Parameter(linear.weight.new_empty(ensemble_size, linear.out_features))
        self._draw_factors()

    @torch.no_grad()
    def _draw_factors(self) -> None:
        for factor in (self.input_factor, self.output_factor):
            if self.factor_init == "sign":
                factor.bernoulli_(0.5).mul_(2).sub_(1)
            else:
                factor.normal_(1, 0.5)

    def init_weights(self) -> None:
        """As timm's linear layers in a ViT; the factors anew."""
        trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self._draw_factors()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A dense layer's bias becomes that of every member, and the factors stay as they were drawn."""
        bias = state_dict.get(f"{prefix}bias")
        if bias is not None and bias.ndim == 1:
            state_dict[f"{prefix}bias"] = bias.repeat(self.ensemble_size, 1)
            for name in ("input_factor", "output_factor"):
                state_dict.setdefault(prefix + name, getattr(self, name).detach())
        elif bias is not None and bias.shape[0] != self.ensemble_size:
            raise ValueError(
                f"The checkpoint has {bias.shape[0]} members in {prefix}bias, the model has {self.ensemble_size}: "
                f"create the model with ensemble_size={bias.shape[0]}."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        """Map x of shape (B M, ..., D) to (B M, ..., D').

        Raises:
            ValueError: if M does not divide the batch.
        """
        members = self.ensemble_size
        if x.shape[0] % members:
            raise ValueError(f"A batch of {x.shape[0]} does not hold each image {members} times, once for each member.")
        x = x.unflatten(0, (x.shape[0] // members, members))
        y = nn.functional.linear(x * _like(self.input_factor, x), self.weight)
        y = y * _like(self.output_factor, y)
        return (y if self.bias is None else y + _like(self.bias, y)).flatten(0, 1)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"in_features={in_features}, out_features={out_features}, ensemble_size={self.ensemble_size}"


def _like(factor_MD: Tensor, x: Tensor) -> Tensor:
    """For x of shape (B, M, ..., D)."""
    return factor_MD.view(factor_MD.shape[0], *[1] * (x.ndim - 3), factor_MD.shape[1])


register_notrace_module(BatchEnsembleLinear)  # looks at the batch


class BatchEnsembleVisionTransformer(MembersMixin, PreLogitsVisionTransformer):
    """A ViT that holds M members, which differ in factors inside the MLPs of some blocks, :class:`BatchEnsembleLinear`.

    Outputs are those of :class:`MembersMixin`; the members part at the first of these blocks.

    Args:
        args: as :class:`PreLogitsVisionTransformer`.
        ensemble_size: M.
        ensemble_layers: which blocks, as ``moe_layers`` of :func:`timm_moe.convert_to_moe`.
        factor_init: see :class:`BatchEnsembleLinear`.
        factor_lr: times the learning rate is that of the factors, under timm's optimizers and schedulers.
        kwargs: as :class:`PreLogitsVisionTransformer`.

    Raises:
        ValueError: on an option outside its range.
    """

    def __init__(
        self,
        *args: Any,
        ensemble_size: int = 2,
        ensemble_layers: str = "last-2",
        factor_init: str = "sign",
        factor_lr: float = 1.0,
        **kwargs: Any,
    ):
        check_number("factor_lr", factor_lr, 0, above=True)
        super().__init__(*args, **kwargs)
        blocks: Any = self.blocks
        chosen = select_blocks(ensemble_layers, len(blocks))
        for number in chosen:
            mlp = blocks[number].mlp
            mlp.fc1, mlp.fc2 = (BatchEnsembleLinear(layer, ensemble_size, factor_init) for layer in (mlp.fc1, mlp.fc2))
        self.factor_lr = factor_lr
        self.part_at(chosen[0], ensemble_size)

    def no_weight_decay(self) -> set[str]:
        """What timm's optimizers do not decay: that of the stock model, and the members' biases and factors."""
        own = {f"{name}.{part}" for name in self._shared_layers() for part in ("bias", "input_factor", "output_factor")}
        return {*super().no_weight_decay(), *own}

    def lr_scales(self) -> dict[str, float]:
        """Times the learning rate is that of these parameters, where it is not 1."""
        if self.factor_lr == 1:
            return {}
        parts = ("input_factor", "output_factor")
        return {f"{name}.{part}": self.factor_lr for name in self._shared_layers() for part in parts}

    def scale_learning_rates(self, optimizer: Optimizer) -> None:
        """Give an optimizer that timm has just made the groups that :meth:`lr_scales` asks for."""
        named = dict(self.named_parameters())
        trained = {named[name]: scale for name, scale in self.lr_scales().items() if named[name].requires_grad}
        scale_learning_rates(optimizer, trained)

    def _shared_layers(self) -> list[str]:
        return [name for name, module in self.named_modules() if isinstance(module, BatchEnsembleLinear)]


#: The stock models whose pretrained tags the ensembles take over.
_STOCK = {
    "vit_be_b32": "vit_base_patch32_224",
    "vit_be_b16": "vit_base_patch16_224",
    "vit_be_l32": "vit_large_patch32_224",
    "vit_be_l16": "vit_large_patch16_224",
}

default_cfgs = generate_default_cfgs(
    {
        f"{name}.{cfg.tag}" if cfg.tag else name: replace(cfg, url="", custom_load=False)
        for name, stock in _STOCK.items()
        for cfg in get_arch_pretrained_cfgs(stock).values()
    }
    | {"vit_be_s32": VMOE_S_CFG}
)


def _create(variant: str, pretrained: bool, model_args: dict[str, Any], kwargs: dict[str, Any]) -> nn.Module:
    return build_model_with_cfg(
        BatchEnsembleVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **{**model_args, **kwargs},
    )


@register_model
def vit_be_s32(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-S/32: 512 wide and 8 blocks as V-MoE-S, not timm's ViT-S."""
    model_args = dict(patch_size=32, embed_dim=512, depth=8, num_heads=8)
    return _create("vit_be_s32", pretrained, model_args, kwargs)


@register_model
def vit_be_b32(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-B/32."""
    model_args = dict(patch_size=32, embed_dim=768, depth=12, num_heads=12)
    return _create("vit_be_b32", pretrained, model_args, kwargs)


@register_model
def vit_be_b16(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-B/16."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _create("vit_be_b16", pretrained, model_args, kwargs)


@register_model
def vit_be_l32(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-L/32."""
    model_args = dict(patch_size=32, embed_dim=1024, depth=24, num_heads=16)
    return _create("vit_be_l32", pretrained, model_args, kwargs)


@register_model
def vit_be_l16(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-L/16."""
    model_args = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
    return _create("vit_be_l16", pretrained, model_args, kwargs)
