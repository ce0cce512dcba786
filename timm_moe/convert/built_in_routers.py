"""The routers of this package, under the names that ``convert_to_moe(router=...)`` takes."""

import inspect
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import nn

from ..layers import (
    CosineRouter,
    EnsembleRouter,
    EwaMlp,
    ExpertChoiceRouter,
    ImageRouter,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    SoftMoeMlp,
    SoftRouter,
    TilingRouter,
    TopKRouter,
)
from ..layers.checks import check_choice, check_integer, check_number
from ..timm_classes import timm_classes
from .registry import RouterSpec, register_router

#: Models whose blocks see the class token as an image's first token. XCiT and CaiT are not among
#: them, since they add it in their last blocks.
CLASS_TOKEN_FIRST = timm_classes(
    "vision_transformer.VisionTransformer",
    "vision_transformer_relpos.VisionTransformerRelPos",
    "beit.Beit",
    "eva.Eva",
    "pit.PoolingVisionTransformer",
    "mvitv2.MultiScaleVit",
)
SCORES = ("softmax", "sigmoid", "cosine")
BALANCES = ("loss", "bias")
BIAS_RATE = 0.001
AUX_LOSS_WEIGHT = 0.01
UNITS = {"token": TopKRouter, "image": ImageRouter}
#: Routers of pBE and of its ablations.
ENSEMBLES = {
    "pbe": EnsembleRouter,
    "tiling": TilingRouter,
    "partitioning": PartitionedRouter,
    "multi_head": MultiHeadRouter,
}


@dataclass(frozen=True, kw_only=True)
class TopKOptions:
    """Options of ``router="top_k"``: of its choice, its score, its balance and its unit.

    :func:`timm_moe.convert_to_moe` describes them. Those that the router's own constructor takes
    are checked there.

    Raises:
        ValueError: if options do not go together, or a name is not one of those there are.
    """

    top_k: int = 1
    noise_std: float = 0.0
    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    capacity_multiple: int = 4
    capacity_rounding: str = "ceil"
    batch_priority: bool = False
    group_images: int | None = None
    gate_mode: str = "prob"
    route_scale: float = 1.0

    score: str = "softmax"

    balance: str = "loss"
    bias_rate: float = BIAS_RATE
    aux_loss: str = "balance"
    aux_loss_weight: float = AUX_LOSS_WEIGHT
    z_loss_weight: float = 0.0

    routing_unit: str = "token"
    ensemble: str = "pbe"
    ensemble_size: int = 1

    def __post_init__(self) -> None:
        check_choice("routing_unit", self.routing_unit, UNITS)
        check_choice("ensemble", self.ensemble, ENSEMBLES)
        check_choice("score", self.score, SCORES)
        check_integer("ensemble_size", self.ensemble_size, 1)
        self._check_balance()
        if self.score == "cosine" and (self.routing_unit != "token" or self.is_ensemble):
            raise ValueError(
                "score='cosine' routes tokens without an ensemble: leave routing_unit and "
                "ensemble_size out."
            )
        self._check_ensemble()

    @property
    def is_ensemble(self) -> bool:
        """Whether several members share the model."""
        return self.ensemble_size > 1

    def _check_balance(self) -> None:
        """Raise ValueError if options do not go with what balances the experts."""
        check_choice("balance", self.balance, BALANCES)
        check_number("bias_rate", self.bias_rate, 0, above=True)
        check_number("aux_loss_weight", self.aux_loss_weight, 0)
        losses = self._losses()
        if "z" in losses:
            raise ValueError(
                "z has a weight of its own, z_loss_weight: leave it out of aux_loss, got "
                f"{self.aux_loss!r}."
            )
        if not losses or len(set(losses)) < len(losses):
            raise ValueError(
                f"aux_loss must be different names of losses joined by +, got {self.aux_loss!r}."
            )
        if self.balance == "loss":
            if self.bias_rate != BIAS_RATE:
                raise ValueError("bias_rate is an option of balance='bias'.")
            return

        if self.aux_loss_weight not in (0, AUX_LOSS_WEIGHT):
            raise ValueError(
                "balance='bias' takes the place of aux_loss: leave aux_loss_weight out."
            )
        if self.is_ensemble:
            raise ValueError(
                "balance='bias' is for routers without an ensemble: leave ensemble_size out."
            )

    def _check_ensemble(self) -> None:
        """Raise ValueError if options do not go with the ensemble, or with its absence."""
        if not self.is_ensemble:
            if self.ensemble != "pbe":
                raise ValueError(f"ensemble={self.ensemble!r} needs an ensemble_size above 1.")
            return

        if self.ensemble == "multi_head" and self.ensemble_size != self.top_k:
            raise ValueError(
                "ensemble='multi_head' has a member for each choice of a token: set "
                f"top_k={self.ensemble_size} as ensemble_size, got top_k={self.top_k}."
            )
        if self.routing_unit != "token":
            raise ValueError(
                "The members of an ensemble route tokens, so "
                f"routing_unit={self.routing_unit!r} has no place here."
            )

    def check_model(self, model: nn.Module) -> None:
        """Raise ValueError if the model does not suit the unit or the ensemble."""
        kind = type(model).__name__
        has_class_token = isinstance(model, CLASS_TOKEN_FIRST) and model.cls_token is not None
        if self.routing_unit == "image" and not has_class_token:
            known = ", ".join(model_class.__name__ for model_class in CLASS_TOKEN_FIRST)
            raise ValueError(
                "routing_unit='image' lets the class token of an image choose, which must be its "
                f"first token, as in {known}: this {kind} has no class token, or at another place."
            )
        repeats_images = self.is_ensemble and self.ensemble != "partitioning"
        if repeats_images and not hasattr(model, "forward_members"):
            raise ValueError(
                f"ensemble_size={self.ensemble_size} needs a model that repeats its images for the "
                f"members of the ensemble, as vmoe_pbe_* do; a {kind} does not."
            )

    def router(self, dim: int, num_experts: int, is_last: bool) -> TopKRouter:
        """Make the router of a layer.

        Args:
            dim: width of the rows.
            num_experts: E.
            is_last: whether the layer is the model's last with experts, the only one with
                multi-head routing.
        """
        options = {name: getattr(self, name) for name in _options_of(TopKRouter)}
        options["loss_weights"] = self.loss_weights()
        if self.balance != "bias":
            options["bias_rate"] = 0

        if self.score == "cosine":
            options["score"] = "softmax"
            return CosineRouter(dim, num_experts, **options)
        if not self.is_ensemble or (self.ensemble == "multi_head" and not is_last):
            return UNITS[self.routing_unit](dim, num_experts, **options)
        if self.ensemble != "multi_head":
            options["ensemble_size"] = self.ensemble_size
        return ENSEMBLES[self.ensemble](dim, num_experts, **options)

    def loss_weights(self) -> dict[str, float]:
        """Return the weight of each loss by name; the losses of ``aux_loss`` share one weight."""
        losses = self._losses()
        shared = 0 if self.balance == "bias" else self.aux_loss_weight
        return {**dict.fromkeys(losses, shared / len(losses)), "z": self.z_loss_weight}

    def _losses(self) -> list[str]:
        """Return the names of the balancing losses; none if ``aux_loss`` is no text."""
        return self.aux_loss.split("+") if isinstance(self.aux_loss, str) else []


def _top_k_router(dim: int, num_experts: int, is_last: bool = False, **options: Any) -> TopKRouter:
    return TopKOptions(**options).router(dim, num_experts, is_last)


def _options_of(router: type[nn.Module]) -> dict[str, Any]:
    """Return the options of a router with their defaults, from its constructor's signature."""
    parameters = inspect.signature(router).parameters.items()
    return {
        name: found.default
        for name, found in parameters
        if name not in ("dim", "num_experts", "loss_weights")
    }


register_router(
    RouterSpec(
        "random",
        lambda dim, num_experts: RandomPartition(num_experts),
        layer=EwaMlp,
        layer_options={},
        built_in=True,
    )
)
register_router(
    RouterSpec(
        "top_k",
        _top_k_router,
        options=asdict(TopKOptions()),
        last_factory=partial(_top_k_router, is_last=True),
        check=lambda model, options: TopKOptions(**options).check_model(model),
        built_in=True,
    )
)
register_router(
    RouterSpec("expert_choice", ExpertChoiceRouter, _options_of(ExpertChoiceRouter), built_in=True)
)
register_router(
    RouterSpec(
        "soft",
        SoftRouter,
        _options_of(SoftRouter),
        layer=SoftMoeMlp,
        layer_options={},
        built_in=True,
    )
)
