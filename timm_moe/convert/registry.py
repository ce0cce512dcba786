"""The routers that ``convert_to_moe(router=...)`` takes, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from timm.models import (
    Beit,
    Eva,
    MultiScaleVit,
    NaFlexVit,
    PoolingVisionTransformer,
    VisionTransformer,
    VisionTransformerRelPos,
)
from torch import nn

from ..layers import (
    EnsembleRouter,
    EwaMlp,
    ImageRouter,
    MoeMlp,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    SharedExpertMlp,
    TilingRouter,
    TopKRouter,
)
from ..layers.checks import check_flag, check_integer, check_number
from .blocks import moe_layers

#: Maps the width D of the rows and the number of experts E to a router.
MakeRouter = Callable[[int, int], nn.Module]

#: Models whose blocks see the class token as the first token of an image (XCiT's and CaiT's see it in the last blocks).
CLASS_TOKEN_FIRST: tuple[type, ...] = (
    *(VisionTransformer, VisionTransformerRelPos, NaFlexVit),
    *(Beit, Eva, PoolingVisionTransformer, MultiScaleVit),
)


def routed_layer(
    ffn: nn.Module,
    router: nn.Module,
    num_experts: int,
    *,
    shared_expert: bool,
    shared_init: str,
    **options: Any,
) -> MoeMlp:
    """The expert layer of most routers, with a shared expert or without; arguments as ``convert_to_moe``'s."""
    check_flag("shared_expert", shared_expert)
    if shared_init != "pretrained" and not shared_expert:
        raise ValueError(f"shared_init={shared_init!r} is an option of shared_expert=True.")
    if shared_expert:
        return SharedExpertMlp(ffn, router, num_experts, shared_init=shared_init, **options)
    return MoeMlp(ffn, router, num_experts, **options)


def _ewa_layer(ffn: nn.Module, router: nn.Module, num_experts: int, **options: Any) -> MoeMlp:
    return EwaMlp(ffn, num_experts, **options)  # its partition is its own


def _accept(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Any model will do."""


@dataclass(frozen=True)
class RouterSpec:
    """A way to route, as ``convert_to_moe`` takes it. What a router does with rows, the router itself states.

    Attributes:
        name: under which it is registered.
        factory: ``(dim, num_experts, **options)`` -> a module that maps x of shape (..., dim) to a
            :class:`timm_moe.layers.Routing` of its rows. It may be a subclass of :class:`timm_moe.layers.Router`, which
            says what else the package may ask; any other module is taken to have that class's answers.
        options: of the factory, by name with their defaults: keywords of ``convert_to_moe`` and of train.py's
            ``--model-kwargs``.
        last_factory: of the last expert layer, where it is another.
        layer: ``(ffn, router, num_experts, **options)`` -> the expert layer.
        layer_options: of the layer, by name with their defaults.
        share_rate: of averaging, where none is stated.
        share_schedule: likewise.
        averaged: whether experts are averaged although neither rate nor schedule is stated.
        check: raises ValueError if a model, or the options together, do not go with this router.
    """

    name: str
    factory: Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    last_factory: Callable[..., nn.Module] | None = None
    layer: Callable[..., MoeMlp] = routed_layer
    layer_options: Mapping[str, Any] = field(
        default_factory=lambda: {"shared_expert": False, "shared_init": "pretrained"}
    )
    share_rate: float = 0.3
    share_schedule: str = "early"
    averaged: bool = False
    check: Callable[[nn.Module, Mapping[str, Any]], None] = _accept

    def defaults(self) -> dict[str, Any]:
        """All its options, those of the layer too."""
        return {**self.options, **self.layer_options}


_registered: dict[str, RouterSpec] = {}
#: Names of those that come with the package.
_HERE: list[str] = []


def register_router(spec: RouterSpec) -> RouterSpec:
    """Let ``convert_to_moe``, and so every ``*_ewa_moe``, take ``router=spec.name``.

    (The names of routed models, as ``vmoe_b16``, state options of ``top_k`` that no other router has.)

    Raises:
        ValueError: if the name is taken, or an option has the name of one of ``convert_to_moe``'s own.
    """
    if spec.name in _registered:
        raise ValueError(f"There is a router {spec.name!r} already.")
    for name in spec.options:
        if name in spec.layer_options:
            raise ValueError(
                f"{name} is an option of the layer already, so {spec.name!r} cannot have one of that name."
            )
    for name in spec.defaults():
        if name in (*COMMON_OPTIONS, "model", "dim"):
            raise ValueError(f"{name} is an option of every router, so {spec.name!r} cannot have one of that name.")
    _registered[spec.name] = spec
    return spec


def register_here(spec: RouterSpec) -> None:
    """As :func:`register_router`, for those that come with the package: their options are refused wherever they err."""
    _HERE.append(register_router(spec).name)


def moe_options(router: "str | RouterSpec | MakeRouter | None" = None) -> tuple[str, ...]:
    """Options of ``convert_to_moe``, for one router or for all.

    Those of the routers here are among them in any case, so that they are refused in a sentence where they do not
    belong; those of other packages' routers may be arguments of a model too, so only the chosen one's are.
    """
    others = [] if router is None else [get_spec(router)]
    specs = [*(_registered[name] for name in _HERE), *(others or _registered.values())]
    return tuple(dict.fromkeys([*COMMON_OPTIONS, *(name for spec in specs for name in spec.defaults())]))


def get_spec(router: "str | RouterSpec | MakeRouter") -> RouterSpec:
    """The spec of a registered name, or of what is given instead of one; ValueError if there is none."""
    if isinstance(router, RouterSpec):
        return router
    if isinstance(router, str) and router in _registered:
        return _registered[router]
    if isinstance(router, nn.Module):
        raise ValueError(f"router is a {type(router).__name__}, but each layer needs one of its own: give the class.")
    if callable(router):
        return RouterSpec(getattr(router, "__name__", "router"), router)
    raise ValueError(
        f"router must be one of {', '.join(_registered)}, got {router!r}; one of your own is registered first, by "
        "timm_moe.register_router."
    )


def split_options(spec: RouterSpec, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the router and of the layer, completed by their defaults.

    Raises:
        ValueError: if one is an option of another router, unless it has the default that it has there.
        TypeError: if no router has it.
    """
    for name, value in given.items():
        if name in spec.defaults():
            continue
        owner = next((other for other in _registered.values() if name in other.defaults()), None)
        if owner is None:
            raise TypeError(f"convert_to_moe got an unexpected keyword argument {name!r}.")
        default = owner.defaults()[name]
        if (_none(value) if default is None else value) != default:
            raise ValueError(
                f"{name} is an option of router={owner.name!r}; router={spec.name!r} has none. If it comes with the "
                "registered name, begin from that of an *_ewa_moe model."
            )
    own = {name: given.get(name, default) for name, default in spec.options.items()}
    return own, {name: given.get(name, default) for name, default in spec.layer_options.items()}


def _none(value: Any) -> Any:
    """``"none"`` is None, which timm's ``create_model`` would drop."""
    return None if isinstance(value, str) and value.lower() == "none" else value


# --- those that come with the package


def _random_partition(dim: int, num_experts: int) -> nn.Module:
    return RandomPartition(num_experts)


ROUTING_UNITS = {"token": TopKRouter, "image": ImageRouter}
#: Routers of pBE and its ablations; multi-head routing is in the last layer only.
ENSEMBLES = {
    "pbe": EnsembleRouter,
    "tiling": TilingRouter,
    "partitioning": PartitionedRouter,
    "multi_head": MultiHeadRouter,
}


def _top_k_router(
    dim: int,
    num_experts: int,
    *,
    routing_unit: str,
    aux_loss: str,
    aux_loss_weight: float,
    ensemble_size: int,
    ensemble: str,
    is_last: bool = False,
    **options: Any,
) -> nn.Module:
    options["loss_weights"] = _loss_weights(aux_loss, aux_loss_weight)
    options |= {name: _none(options[name]) for name in ("capacity_factor", "eval_capacity_factor")}
    if ensemble_size == 1 or (ensemble == "multi_head" and not is_last):
        return ROUTING_UNITS[routing_unit](dim, num_experts, **options)
    if ensemble != "multi_head":
        options["ensemble_size"] = ensemble_size
    return ENSEMBLES[ensemble](dim, num_experts, **options)


def _loss_weights(aux_loss: str, aux_loss_weight: float) -> dict[str, float]:
    check_number("aux_loss_weight", aux_loss_weight, 0)
    names = aux_loss.split("+") if isinstance(aux_loss, str) else []
    if not names or len(set(names)) < len(names):
        raise ValueError(f"aux_loss must be different names of losses joined by +, got {aux_loss!r}.")
    return dict.fromkeys(names, aux_loss_weight / len(names))


def _check_top_k(model: nn.Module, options: Mapping[str, Any]) -> None:
    unit = options["routing_unit"]
    if unit not in ROUTING_UNITS:
        raise ValueError(f"routing_unit must be one of {', '.join(ROUTING_UNITS)}, got {unit!r}.")
    if unit == "image":
        _check_class_token(model)
    _check_ensemble(model, options["ensemble"], options["ensemble_size"], options["top_k"], unit)


def _check_class_token(model: nn.Module) -> None:
    if getattr(model, "cls_token", None) is None:
        raise ValueError(
            f"routing_unit='image' lets the class token of an image choose, but this {type(model).__name__} has none."
        )
    if not isinstance(model, CLASS_TOKEN_FIRST):
        known = ", ".join(model_class.__name__ for model_class in CLASS_TOKEN_FIRST)
        raise ValueError(
            "routing_unit='image' lets the first token of an image choose, which in this "
            f"{type(model).__name__} is not the class token; it is in {known}."
        )


def _check_ensemble(model: nn.Module, ensemble: str, ensemble_size: int, top_k: int, routing_unit: str) -> None:
    if ensemble not in ENSEMBLES:
        raise ValueError(f"ensemble must be one of {', '.join(ENSEMBLES)}, got {ensemble!r}.")
    check_integer("ensemble_size", ensemble_size, 1)
    if ensemble_size == 1:
        if ensemble != "pbe":
            raise ValueError(f"ensemble={ensemble!r} needs an ensemble_size above 1.")
        return
    if ensemble == "multi_head" and ensemble_size != top_k:
        raise ValueError(
            f"ensemble='multi_head' has a member for each choice of a token: set top_k={ensemble_size} as "
            f"ensemble_size, got top_k={top_k}."
        )
    if routing_unit != "token":
        raise ValueError(
            f"The members of an ensemble route tokens, so routing_unit={routing_unit!r} has no place here."
        )
    if ensemble == "partitioning":
        return
    if not hasattr(model, "forward_members"):
        raise ValueError(
            f"ensemble_size={ensemble_size} needs a model that repeats its images for the members of the ensemble, as "
            f"vmoe_pbe_* do; a {type(model).__name__} does not."
        )
    if moe_layers(model):
        raise ValueError(f"This {type(model).__name__} has the expert layers of its ensemble already.")


#: Options of ``convert_to_moe`` whatever the router is.
COMMON_OPTIONS = (
    *("num_experts", "moe_layers", "router", "expert_init", "share_rate", "share_schedule", "expert_dropout"),
)

register_here(
    RouterSpec(
        "random",
        _random_partition,
        layer=_ewa_layer,
        layer_options={"eval_mode": "average"},
        share_schedule="linear",
        averaged=True,
    )
)
register_here(
    RouterSpec(
        "top_k",
        _top_k_router,
        dict(
            top_k=1,
            noise_std=0.0,
            capacity_factor=None,
            eval_capacity_factor=None,
            capacity_multiple=4,
            capacity_rounding="ceil",
            batch_priority=False,
            group_images=None,
            aux_loss="balance",
            aux_loss_weight=0.01,
            routing_unit="token",
            gate_mode="prob",
            ensemble_size=1,
            ensemble="pbe",
        ),
        last_factory=partial(_top_k_router, is_last=True),
        check=_check_top_k,
    )
)
