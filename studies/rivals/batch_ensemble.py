"""Batch ensembles inside one dense Vision Transformer (BatchEnsemble, arXiv 2002.06715).

pBE (arXiv 2110.03360, appendix) compares with them.

Shape suffixes: B images, M members, D width.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.fx import Proxy
from torch.optim import Optimizer

from timm_moe.convert.blocks import select_blocks
from timm_moe.layers.checks import check_choice, check_integer
from timm_moe.layers.functional import kept_whole
from timm_moe.models.ensemble import MembersMixin
from timm_moe.models.variants import create_vit, register_variants, vmoe_variants
from timm_moe.models.vision_transformer import PreLogitsVisionTransformer

__all__ = ["BatchEnsembleLinear", "BatchEnsembleVisionTransformer"]  # timm adds the entrypoints

FACTORS = ("input_factor", "output_factor")


class BatchEnsembleLinear(nn.Module):
    """``((x * r_m) U) * s_m + b_m`` for member m.

    All members share one matrix U. Each has two vectors and a bias of its own.

    The batch holds each image M times in a row, once for each member.

    Args:
        linear: the layer to replace; all members start from its weight and bias.
        ensemble_size: M.
        factor_init: initial factors: ``"sign"``, 1 or -1 with equal probability, or ``"normal"``,
            N(1, 0.5).

    Attributes:
        weight: (D', D), U.
        bias: (M, D'), or None.
        input_factor: (M, D), r.
        output_factor: (M, D'), s.

    Raises:
        ValueError: if M is not a positive integer, or ``factor_init`` is unknown.
    """

    def __init__(self, linear: nn.Linear, ensemble_size: int, factor_init: str = "sign"):
        super().__init__()
        check_integer("ensemble_size", ensemble_size, 1)
        check_choice("factor_init", factor_init, ("sign", "normal"))
        self.ensemble_size = ensemble_size
        self.factor_init = factor_init
        self.weight = linear.weight
        self.bias = (
            None
            if linear.bias is None
            else nn.Parameter(linear.bias.detach().repeat(ensemble_size, 1))
        )
        self.input_factor = nn.Parameter(linear.weight.new_empty(ensemble_size, linear.in_features))
        self.output_factor = nn.Parameter(
            linear.weight.new_empty(ensemble_size, linear.out_features)
        )
        self._draw_factors()

    @torch.no_grad()
    def _draw_factors(self) -> None:
        for factor in (self.input_factor, self.output_factor):
            if self.factor_init == "sign":
                factor.bernoulli_(0.5).mul_(2).sub_(1)
            else:
                factor.normal_(1, 0.5)

    def init_weights(self) -> None:
        """Reset the weight and bias like timm's linear layers in a ViT, and draw new factors."""
        trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self._draw_factors()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take a dense layer's bias for every member.

        Factors that the checkpoint lacks are kept.
        """
        bias = state_dict.get(f"{prefix}bias")
        if bias is not None and bias.ndim == 1:
            state_dict[f"{prefix}bias"] = bias.repeat(self.ensemble_size, 1)
            for name in FACTORS:
                state_dict.setdefault(prefix + name, getattr(self, name).detach())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B M, ..., D) to (B M, ..., D')."""
        if isinstance(x, Proxy):
            return kept_whole(self, x)
        batch = x.shape[:-1]
        x = x.unflatten(0, (x.shape[0] // self.ensemble_size, self.ensemble_size))
        y = nn.functional.linear(x * _like(self.input_factor, x), self.weight) * _like(
            self.output_factor, x
        )
        return (y if self.bias is None else y + _like(self.bias, y)).reshape(*batch, y.shape[-1])

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        size = f"in_features={in_features}, out_features={out_features}"
        return f"{size}, ensemble_size={self.ensemble_size}"


def _like(factor_MD: Tensor, x: Tensor) -> Tensor:
    """Reshape a factor so that it multiplies x (B, M, ..., D)."""
    return factor_MD.view(factor_MD.shape[0], *[1] * (x.ndim - 3), factor_MD.shape[1])


register_notrace_module(BatchEnsembleLinear)  # control flow depends on the batch size


def factors(model: nn.Module) -> list[nn.Parameter]:
    """List the factors of a model that are trained."""
    layers = [module for module in model.modules() if isinstance(module, BatchEnsembleLinear)]
    found = [getattr(layer, part) for layer in layers for part in FACTORS]
    return [factor for factor in found if factor.requires_grad]


def scale_learning_rates(optimizer: Optimizer, parameters: Mapping[nn.Parameter, float]) -> None:
    """Multiply the learning rate of some parameters, which move to groups of their own.

    The key ``lr_scale`` of these groups is the one of timm's layer decay, which timm's schedulers
    multiply by. The optimizer must not have taken a step yet.

    Raises:
        ValueError: if the optimizer does not train one of them.
    """
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not parameters.keys() <= trained:
        raise ValueError(
            "The optimizer does not train all parameters that are to have a learning rate of their "
            "own."
        )
    for group in list(optimizer.param_groups):
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_scale.setdefault(parameters.get(parameter, 1.0), []).append(parameter)
        group["params"] = by_scale.pop(1.0, [])
        for scale, members in sorted(by_scale.items()):
            own = {**group, "lr_scale": group.get("lr_scale", 1.0) * scale, "params": members}
            optimizer.add_param_group(own)


class BatchEnsembleVisionTransformer(MembersMixin, PreLogitsVisionTransformer):
    """A ViT of M members that differ in the factors of some layers.

    These are a :class:`BatchEnsembleLinear` each, in the MLPs of some blocks.

    Outputs: see :class:`MembersMixin`; other arguments: see :class:`PreLogitsVisionTransformer`.
    The members separate at the first of these blocks.

    Args:
        ensemble_size: M.
        ensemble_layers: blocks with factors, like ``moe_layers`` of
            :func:`timm_moe.convert_to_moe`.
        factor_init: see :class:`BatchEnsembleLinear`.

    Raises:
        ValueError: on an option outside its range.
    """

    def __init__(
        self,
        *args: Any,
        ensemble_size: int = 2,
        ensemble_layers: str = "last-2",
        factor_init: str = "sign",
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        blocks: Any = self.blocks
        chosen = select_blocks(ensemble_layers, len(blocks))
        for number in chosen:
            mlp = blocks[number].mlp
            mlp.fc1, mlp.fc2 = (
                BatchEnsembleLinear(layer, ensemble_size, factor_init)
                for layer in (mlp.fc1, mlp.fc2)
            )
        self.part_at(chosen[0], ensemble_size)

    def no_weight_decay(self) -> set[str]:
        """Name the parameters without weight decay.

        They are the stock model's, and the members' biases and factors.
        """
        own = {f"{name}.{part}" for name in self._shared_layers() for part in ("bias", *FACTORS)}
        return {*super().no_weight_decay(), *own}

    def _shared_layers(self) -> dict[str, BatchEnsembleLinear]:
        return {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, BatchEnsembleLinear)
        }


_VARIANTS = vmoe_variants("vit_be", "Batch ensemble in ViT", {}, with_huge=False)
register_variants(__name__, _VARIANTS, partial(create_vit, BatchEnsembleVisionTransformer))
