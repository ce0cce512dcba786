"""The routers that ``convert_to_moe(router=...)`` takes, by name."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from ..layers import (
    CosineRouter,
    EnsembleRouter,
    EwaMlp,
    ExpertChoiceRouter,
    ImageRouter,
    MoeMlp,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    Router,
    SharedExpertMlp,
    SoftMoeMlp,
    SoftRouter,
    TilingRouter,
    TopKRouter,
)
from ..layers.checks import check_choice, check_flag, check_integer, check_number
from ..timm_classes import timm_classes

#: Maps the width D of the rows and the number of experts E to a router.
MakeRouter = Callable[[int, int], Router]

#: Models whose blocks see the class token as an image's first token (XCiT and CaiT add it in their
#: last blocks).
CLASS_TOKEN_FIRST = timm_classes(
    *("vision_transformer.VisionTransformer", "vision_transformer_relpos.VisionTransformerRelPos"),
    *("beit.Beit", "eva.Eva", "pit.PoolingVisionTransformer", "mvitv2.MultiScaleVit"),
)


def routed_layer(
    ffn: nn.Module,
    router: Router,
    num_experts: int,
    *,
    shared_expert: bool,
    shared_init: str,
    **options: Any,
) -> MoeMlp:
    """Build the expert layer of most routers, with or without a shared expert (see ``convert_to_moe``)."""
    check_flag("shared_expert", shared_expert)
    if shared_init != "pretrained" and not shared_expert:
        raise ValueError(f"shared_init={shared_init!r} is an option of shared_expert=True.")
    if shared_expert:
        return SharedExpertMlp(ffn, router, num_experts, shared_init=shared_init, **options)
    return MoeMlp(ffn, router, num_experts, **options)


_LAYER_OPTIONS = {"shared_expert": False, "shared_init": "pretrained", "expert_width": 1}


@dataclass(frozen=True)
class RouterSpec:
    """A way to route, for ``convert_to_moe(router=...)``.

    Attributes:
        name: name under which it is registered.
        factory: ``(dim, num_experts, **options)`` -> a :class:`timm_moe.layers.Router` of rows of
            width ``dim``.
        options: options of the factory with their defaults: keywords of ``convert_to_moe`` and of
            train.py's ``--model-kwargs``.
        last_factory: the factory for the last expert layer, if it is another.
        layer: ``(ffn, router, num_experts, **options)`` -> the expert layer.
        layer_options: options of the layer with their defaults.
        check: raises ValueError if the model, or the options together, do not suit this router.
        built_in: no model has an argument with the name of one of its options, as of the routers of
            this package.
    """

    name: str
    factory: Callable[..., Router]
    options: Mapping[str, Any] = field(default_factory=dict)
    last_factory: Callable[..., Router] | None = None
    layer: Callable[..., MoeMlp] = routed_layer
    layer_options: Mapping[str, Any] = field(default_factory=_LAYER_OPTIONS.copy)
    check: Callable[[nn.Module, Mapping[str, Any]], None] | None = None
    built_in: bool = False

    def defaults(self) -> dict[str, Any]:
        """Return all options with their defaults, the layer's too."""
        return {**self.options, **self.layer_options}


#: Options of ``convert_to_moe`` for every router.
_COMMON = (
    "num_experts",
    "moe_layers",
    "router",
    "expert_init",
    "share_rate",
    "share_schedule",
    "expert_dropout",
)
_registered: dict[str, RouterSpec] = {}


def register_router(spec: RouterSpec) -> RouterSpec:
    """Make ``router=spec.name`` an option of ``convert_to_moe``, and so of every ``*_ewa_moe``.

    Routed models such as ``vmoe_b16`` set options of ``top_k`` that no other router has.

    Raises:
        ValueError: if the name is taken, or an option has the name of one of ``convert_to_moe``'s
            own.
    """
    if spec.name in _registered:
        raise ValueError(f"There is a router {spec.name!r} already.")
    for name in spec.defaults().keys() & {*_COMMON, "model", "dim"}:
        raise ValueError(
            f"{name} is an option of every router, so {spec.name!r} cannot have one of that name."
        )
    _registered[spec.name] = spec
    return spec


def moe_options(router: "str | RouterSpec | MakeRouter | None" = None) -> tuple[str, ...]:
    """List the options of ``convert_to_moe``, for one router or for all.

    Options of other than built-in routers may also be arguments of a model, so one router's list
    has only its own.
    """
    specs = [spec for spec in _registered.values() if spec.built_in or router is None]
    if router is not None:
        specs.append(get_spec(router))
    return tuple(dict.fromkeys([*_COMMON, *(name for spec in specs for name in spec.defaults())]))


def nearest_option(name: str) -> str:
    """Ask for the option that a mistyped name is nearest to: ``"; did you mean num_experts?"``, or nothing."""
    nearest = difflib.get_close_matches(name, moe_options(), n=1, cutoff=0.8)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def get_spec(router: "str | RouterSpec | MakeRouter") -> RouterSpec:
    """Return the spec of a registered name, or make one for a callable; ValueError if there is none."""
    if isinstance(router, RouterSpec):
        return router
    if isinstance(router, str) and router in _registered:
        return _registered[router]
    if callable(router):
        return RouterSpec(getattr(router, "__name__", "router"), router)
    raise ValueError(
        f"router must be one of {', '.join(_registered)}, got {router!r}; one of your own is "
        "registered first, by timm_moe.register_router."
    )


def split_options(
    spec: RouterSpec, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide options between the router and its layer, and add the defaults.

    Raises:
        ValueError: if another router has the option, unless its value is the default there.
        TypeError: if no router has the option.
    """
    for name, value in given.items():
        if name in spec.defaults():
            continue
        owner = next((other for other in _registered.values() if name in other.defaults()), None)
        if owner is None:
            raise TypeError(
                f"convert_to_moe got an unexpected keyword argument {name!r}{nearest_option(name)}."
            )
        default = owner.defaults()[name]
        if (_none(value) if default is None else value) != default:
            raise ValueError(
                f"{name} is an option of router={owner.name!r}, which router={spec.name!r} does "
                "not have. If the registered model sets it, take an *_ewa_moe model instead."
            )
    own = {name: given.get(name, default) for name, default in spec.options.items()}
    return own, {name: given.get(name, default) for name, default in spec.layer_options.items()}


def _none(value: Any) -> Any:
    """Read ``"none"`` as None, which timm's ``create_model`` would drop."""
    return None if isinstance(value, str) and value.lower() == "none" else value


# --- the routers of this package

SCORES = ("softmax", "sigmoid", "cosine")
BALANCES = ("loss", "bias")
BIAS_RATE, AUX_LOSS_WEIGHT = 0.001, 0.01
ROUTING_UNITS = {"token": TopKRouter, "image": ImageRouter}
#: Routers of pBE and its ablations; only the last layer has multi-head routing.
ENSEMBLES = dict(
    pbe=EnsembleRouter,
    tiling=TilingRouter,
    partitioning=PartitionedRouter,
    multi_head=MultiHeadRouter,
)


def _top_k_router(dim: int, num_experts: int, is_last: bool = False, **options: Any) -> Router:
    unit, ensemble, size = (
        options.pop(name) for name in ("routing_unit", "ensemble", "ensemble_size")
    )
    aux_loss, weight, z_weight = (
        options.pop(name) for name in ("aux_loss", "aux_loss_weight", "z_loss_weight")
    )
    check_number("aux_loss_weight", weight, 0)
    if options.pop("balance") == "bias":
        weight = 0
    else:
        options["bias_rate"] = 0
    losses = aux_loss.split("+") if isinstance(aux_loss, str) else []
    if "z" in losses:
        raise ValueError(
            f"z has a weight of its own, z_loss_weight: leave it out of aux_loss, got {aux_loss!r}."
        )
    if not losses or len(set(losses)) < len(losses):
        raise ValueError(
            f"aux_loss must be different names of losses joined by +, got {aux_loss!r}."
        )
    options["loss_weights"] = {**dict.fromkeys(losses, weight / len(losses)), "z": z_weight}
    options |= {name: _none(options[name]) for name in ("capacity_factor", "eval_capacity_factor")}
    if options["score"] == "cosine":
        options["score"] = "softmax"
        return CosineRouter(dim, num_experts, **options)
    if size == 1 or (ensemble == "multi_head" and not is_last):
        return ROUTING_UNITS[unit](dim, num_experts, **options)
    if ensemble != "multi_head":
        options["ensemble_size"] = size
    return ENSEMBLES[ensemble](dim, num_experts, **options)


def _check_top_k(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Check what no router can: names that choose its class, and whether the model suits it."""
    unit, ensemble, size = options["routing_unit"], options["ensemble"], options["ensemble_size"]
    kind = type(model).__name__
    check_choice("routing_unit", unit, ROUTING_UNITS)
    check_choice("ensemble", ensemble, ENSEMBLES)
    check_choice("score", options["score"], SCORES)
    check_choice("balance", options["balance"], BALANCES)
    check_number("bias_rate", options["bias_rate"], 0, above=True)
    if options["balance"] == "loss" and options["bias_rate"] != BIAS_RATE:
        raise ValueError("bias_rate is an option of balance='bias'.")
    if options["balance"] == "bias" and options["aux_loss_weight"] not in (0, AUX_LOSS_WEIGHT):
        raise ValueError("balance='bias' takes the place of aux_loss: leave aux_loss_weight out.")
    if options["balance"] == "bias" and size != 1:
        raise ValueError(
            "balance='bias' is for routers without an ensemble: leave ensemble_size out."
        )
    check_integer("ensemble_size", size, 1)
    if options["score"] == "cosine" and (unit != "token" or size != 1):
        raise ValueError(
            "score='cosine' routes tokens without an ensemble: leave routing_unit and "
            "ensemble_size out."
        )
    if unit == "image" and (not isinstance(model, CLASS_TOKEN_FIRST) or model.cls_token is None):
        known = ", ".join(model_class.__name__ for model_class in CLASS_TOKEN_FIRST)
        raise ValueError(
            "routing_unit='image' lets the class token of an image choose, which must be its first "
            f"token, as in {known}: this {kind} has no class token, or at another place."
        )
    if size == 1:
        if ensemble != "pbe":
            raise ValueError(f"ensemble={ensemble!r} needs an ensemble_size above 1.")
        return
    if ensemble == "multi_head" and size != options["top_k"]:
        raise ValueError(
            f"ensemble='multi_head' has a member for each choice of a token: set top_k={size} as "
            f"ensemble_size, got top_k={options['top_k']}."
        )
    if unit != "token":
        raise ValueError(
            f"The members of an ensemble route tokens, so routing_unit={unit!r} has no place here."
        )
    if ensemble == "partitioning":
        return
    if not hasattr(model, "forward_members"):
        raise ValueError(
            f"ensemble_size={size} needs a model that repeats its images for the members of the "
            f"ensemble, as vmoe_pbe_* do; a {kind} does not."
        )


register_router(
    RouterSpec(
        "random",
        lambda dim, num_experts: RandomPartition(num_experts),
        # It makes its own.
        layer=lambda ffn, router, num_experts, **options: EwaMlp(ffn, num_experts, **options),
        layer_options={},
        built_in=True,
    )
)


def _options_of(router: type[nn.Module]) -> dict[str, Any]:
    parameters = inspect.signature(router).parameters.items()
    return {
        name: found.default
        for name, found in parameters
        if name not in ("dim", "num_experts", "loss_weights")
    }


_CHOICES = {
    **dict(
        aux_loss="balance",
        aux_loss_weight=AUX_LOSS_WEIGHT,
        routing_unit="token",
        ensemble_size=1,
        ensemble="pbe",
    ),
    **dict(balance="loss", bias_rate=BIAS_RATE, z_loss_weight=0.0),
}
_OPTIONS = {**_options_of(TopKRouter), **_CHOICES}
_LAST = partial(_top_k_router, is_last=True)
register_router(
    RouterSpec("top_k", _top_k_router, _OPTIONS, _LAST, check=_check_top_k, built_in=True)
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
