"""The routers that ``convert_to_moe(router=...)`` takes, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..console import did_you_mean
from ..layers import MoeMlp, Router, SharedExpertMlp
from ..layers.checks import check_flag

#: Maps the width D of the rows and the number of experts E to a router.
MakeRouter = Callable[[int, int], Router]


def routed_layer(
    ffn: nn.Module,
    router: Router,
    *,
    shared_expert: bool,
    shared_init: str,
    **options: Any,
) -> MoeMlp:
    """Build the expert layer of most routers, with or without a shared expert.

    Args:
        ffn: the dense network.
        router: the router.
        shared_expert: add an expert that every token passes through.
        shared_init: its initial weights (see ``convert_to_moe``).
        options: other options of :class:`timm_moe.layers.MoeMlp`.

    Raises:
        ValueError: if ``shared_init`` is given without a shared expert.
    """
    check_flag("shared_expert", shared_expert)
    if shared_init != "pretrained" and not shared_expert:
        raise ValueError(f"shared_init={shared_init!r} is an option of shared_expert=True.")
    if shared_expert:
        return SharedExpertMlp(ffn, router, shared_init=shared_init, **options)
    return MoeMlp(ffn, router, **options)


_LAYER_OPTIONS = {"shared_expert": False, "shared_init": "pretrained", "expert_width": 1}


@dataclass(frozen=True)
class RouterSpec:
    """A way to route, for ``convert_to_moe(router=...)``.

    Attributes:
        name: name under which it is registered.
        factory: ``(dim, num_experts, **options)`` -> a :class:`timm_moe.layers.Router` of rows of
            width ``dim``.
        options: options of the factory with their defaults: keywords of ``convert_to_moe`` and of
            train.py's ``--model-kwargs``. ``"none"`` is read as None, unless the default is a word.
        last_factory: the factory for the last expert layer, if it is another.
        layer: ``(ffn, router, **options)`` -> the expert layer. The options are those below,
            ``expert_init`` and ``expert_dropout``.
        layer_options: options of the layer with their defaults; by default those of
            :func:`routed_layer`. A layer of your own that has none states ``{}``.
        check: raises ValueError if the model, or the options together, do not suit this router.
        built_in: the router comes with this package. The names of its options never clash with
            arguments of timm's models.
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

    Routed models such as ``vmoe_b16`` do not take it, since they set options of ``top_k`` that no
    other router has.

    A second router of a name takes the place of the first, as in a notebook's cell that runs twice.

    Raises:
        ValueError: if the name is a router's of the package, or an option has the name of one of
            ``convert_to_moe``'s own.
    """
    known = _registered.get(spec.name)
    if known is not None and known.built_in:
        raise ValueError(f"{spec.name!r} is a router of timm_moe: give yours another name.")
    for name in spec.defaults().keys() & {*_COMMON, "model", "modules", "dim"}:
        raise ValueError(
            f"{name} is an option of every router, so {spec.name!r} cannot have one of that name."
        )
    _registered[spec.name] = spec
    return spec


def moe_options(router: "str | RouterSpec | MakeRouter | None" = None) -> tuple[str, ...]:
    """List the options of ``convert_to_moe``, for one router or for all.

    The options of a router from another package may also be arguments of a model. So the list for
    one router has only its own options and those of the built-in routers.
    """
    specs = [spec for spec in _registered.values() if spec.built_in or router is None]
    if router is not None:
        specs.append(get_spec(router))
    return tuple(dict.fromkeys([*_COMMON, *(name for spec in specs for name in spec.defaults())]))


def router_options() -> set[str]:
    """Return the names of the options that say how tokens are routed, of all routers."""
    return {"router", *(name for spec in _registered.values() for name in spec.options)}


def nearest_option(name: str) -> str:
    """Return the end of a sentence that asks for the option a mistyped name is nearest to."""
    return did_you_mean(name, moe_options(), cutoff=0.8)


def get_spec(router: "str | RouterSpec | MakeRouter") -> RouterSpec:
    """Return the spec of a registered name, or make one for a callable.

    Raises:
        ValueError: if no router has the name.
    """
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
                f"convert_to_moe got an unexpected keyword argument {name!r}{nearest_option(name)}"
            )
        default = owner.defaults()[name]
        if _read(value, default) != default:
            raise ValueError(
                f"{name} is an option of router={owner.name!r}, which router={spec.name!r} does "
                f"not have: state router={owner.name!r} too. Models such as vmoe_b16 set options "
                "of their own router; an *_ewa_moe model takes any."
            )
    of_router, of_layer = (
        {
            name: _read(given[name], default) if name in given else default
            for name, default in options.items()
        }
        for options in (spec.options, spec.layer_options)
    )
    return of_router, of_layer


def _read(value: Any, default: Any) -> Any:
    """Read ``"none"`` as None, which timm's ``create_model`` would drop.

    An option whose default is a word keeps it as a word.
    """
    is_none = isinstance(value, str) and value.lower() == "none"
    return None if is_none and not isinstance(default, str) else value
