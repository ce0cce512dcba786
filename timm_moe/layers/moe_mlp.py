"""The expert layers, which replace the feed-forward network of a transformer block."""

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.weak import WeakTensorKeyDictionary

from .balancing_bias import BalancingBias
from .checks import check_choice
from .dispatch import combine, dispatch
from .experts import Experts, dropouts, mean_over_experts
from .functional import Mode, current_mode, kept_whole
from .living import register
from .probe import probe
from .recording_router import in_backward
from .router import Router
from .routing import AnyRouting, ChosenRows


class MoeMlp(Experts):
    """A router and E experts instead of one feed-forward network.

    Args:
        ffn: the dense network to replace.
        router: maps x of shape (..., D) to a routing of its rows over its E experts.
        expert_init: see :class:`Experts`.
        options: see :class:`Experts`.

    Attributes:
        path: name of the layer in its model, for messages.
        replaced: weak references to the parameters of the dense network that the layer replaced;
            empty in copies.
        deploys_dense: whether the layer is one dense network in eval mode. Its :meth:`compute` then
            runs this network, and the mean over :meth:`stacked_weights` is the same.
        share_rate: rate at which training averages the experts, see
            :func:`timm_moe.convert_to_moe`.
        share_schedule: name of the schedule of that rate.
        is_averaged_by_hand: whether :func:`timm_moe.average_experts_` was called.
        has_stepped: whether an optimizer that trains the layer has taken a step since
            ``count_forward`` looked last.
        padding: (...) boolean, true for the rows of the next x that are padding; the model's blocks
            set it.

    Raises:
        TypeError: if the router is no :class:`Router`.
    """

    deploys_dense: ClassVar[bool] = False
    share_rate: float = 0.0
    share_schedule: str = "early"
    is_averaged_by_hand = False
    has_stepped = False
    replaced: tuple["weakref.ref[nn.Parameter]", ...] = ()
    padding: Tensor | None = None
    _padding_by_input: Any = None  # of calls whose inputs are alive
    _from_meta_by: Any = None  # weak reference to the function that moved the router from meta

    def __init__(
        self,
        ffn: nn.Module,
        router: Router,
        expert_init: str = "same",
        **options: Any,
    ):
        if not isinstance(router, Router):
            raise TypeError(
                f"A router is a subclass of timm_moe.layers.Router, and {type(router).__name__} is "
                "not."
            )
        super().__init__(ffn, router.num_experts, expert_init, **options)
        self.router = router
        register(self)

    # Weak references cannot be pickled.
    def __getstate__(self) -> dict[str, Any]:
        lost = {"replaced": (), "padding": None, "_padding_by_input": None, "_from_meta_by": None}
        return {**self.__dict__, **lost}

    # A deep copy or an unpickled layer is another one, which is registered too.
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}router.weight" in state_dict and not self.router.state_dict():
            raise RuntimeError(  # as torch's load_state_dict
                f"The checkpoint's experts in {prefix.rstrip('.')} are routed, the model's are "
                "not: create the model by the name and the options of its training (model and "
                "model_kwargs in train.py's args.yaml)."
            )
        dense = self._dense_in(state_dict, prefix)
        if dense:
            self._add_router(state_dict, prefix, next(iter(dense.values())).device)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _add_router(self, state_dict: dict[str, Any], prefix: str, device: torch.device) -> None:
        """Add the router's weights to a state dict of a dense network on a device.

        They are the present ones, or drawn ones if those are on meta.
        """
        router = self.router
        if device.type != "meta" and self.router_is_on_meta():
            router = _reset(copy.deepcopy(router).to_empty(device=device))
        for name, value in router.state_dict(prefix=f"{prefix}router.").items():
            # torch's set_model_state_dict adds missing tensors on meta.
            if name not in state_dict or state_dict[name].is_meta:
                state_dict[name] = value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoeMlp":
        if self.router_is_on_meta():
            self._from_meta_by = weakref.ref(fn)
        super()._apply(fn, recurse)
        if self._from_meta_by is not None and self._from_meta_by() is fn:
            # to_empty writes no values, and a dense checkpoint has none for a router. Blocks may
            # share the layer, and then to_empty comes once for each of them.
            self.draw_router()
        return self

    def router_is_on_meta(self) -> bool:
        """Tell if the router has weights or buffers on the meta device."""
        return any(value.is_meta for value in (*self.router.parameters(), *self.router.buffers()))

    @torch.no_grad()
    def draw_router(self) -> None:
        """Draw the router's weights.

        Those of a router without ``reset_parameters`` become NaN, so that nobody overlooks them.
        """
        if hasattr(self.router, "reset_parameters"):
            _reset(self.router)
            return
        for value in (*self.router.parameters(), *self.router.buffers()):
            if value.is_floating_point():
                value.fill_(torch.nan)

    def reset_from_dense(self, ffn: nn.Module) -> None:
        """Set the experts from a dense network, and reset the router.

        Raises:
            RuntimeError: if the router has parameters but cannot be reset.
        """
        super().reset_from_dense(ffn)
        has_parameters = next(self.router.parameters(), None) is not None
        if has_parameters or hasattr(self.router, "reset_parameters"):
            _reset(self.router)

    def forward(self, x: Tensor, *, routing: AnyRouting | None = None) -> Tensor:
        """Map each row of x, (..., D), to (..., width of the outputs).

        Args:
            x: the rows.
            routing: a routing to take in the place of the router's.

        Raises:
            ValueError: if the router is wrapped, chooses more experts than it says, or needs whole
                images and there is padding.
            RuntimeError: if checkpointing repeats the layer alone, and its padding is not known.
        """
        if isinstance(x, Proxy):
            return kept_whole(self, x)
        if not isinstance(self.router, Router):  # a wrapper hides its losses from auxiliary_loss
            raise ValueError(
                f"The router of {self.path} is a {type(self.router).__name__}, no Router: leave "
                "routers unwrapped, in PEFT out of the targets and modules_to_save."
            )
        if self.padding is None and self._padding_by_input is not None and in_backward():
            self.padding = self._earlier_padding(x)
        if self.padding is None:
            return self.compute(x, routing)
        if not torch.compiler.is_compiling():
            if self._padding_by_input is None:
                self._padding_by_input = WeakTensorKeyDictionary()
            self._padding_by_input[x] = self.padding
        try:
            return self._compute_without_padding(x, routing)
        finally:  # After an error, too, the mask is not the next call's.
            self.padding = None

    def _earlier_padding(self, x: Tensor) -> Tensor | None:
        """Return the padding of the call that checkpointing repeats, of this layer alone.

        It is None if no input of a call with padding is alive.

        Raises:
            RuntimeError: if no call with padding had this input, as in reentrant checkpointing.
        """
        if not self._padding_by_input:
            return None
        if x not in self._padding_by_input:
            raise RuntimeError(
                f"Gradient checkpointing repeats {self.path} without its block, whose mask tells "
                "of padding: checkpoint the block."
            )
        return self._padding_by_input[x]

    def _compute_without_padding(self, x: Tensor, routing: AnyRouting | None) -> Tensor:
        """Compute what :meth:`forward` returns; a given routing leaves rows of padding out."""
        padding = self.padding_of(x)
        if padding is None:
            return self.compute(x, routing)
        # The host waits here alone: a boolean index would wait at each use, also in backward.
        place_V = padding.logical_not().flatten().nonzero().squeeze(1)
        x_TD = x.flatten(0, -2)
        y_VD = self.compute(x_TD.index_select(0, place_V), routing)
        y_TD = y_VD.new_zeros(x_TD.shape[0], y_VD.shape[1]).index_copy(0, place_V, y_VD)
        return y_TD.unflatten(0, x.shape[:-1])

    def padding_of(self, x: Tensor) -> Tensor | None:
        """Return which rows of x are padding to leave out, (...), or None.

        Padding is left out where it would change the routing of other rows, or losses and loads.

        Raises:
            ValueError: if there is padding but the router needs whole images.
        """
        padding = self.padding
        router = self.router
        if padding is None or padding.shape != x.shape[:-1] or router.routing_unit == "image":
            return None
        if not self.training and getattr(router, "eval_capacity_factor", 0) is None:
            return None
        if router.needs_whole_images and padding.any():
            raise ValueError(
                f"The batch has padding, which the router of {self.path} cannot leave out, as it "
                "counts images: take router='top_k' without group_images or an ensemble, or "
                "'soft'."
            )
        return None if router.needs_whole_images else padding

    def compute(self, x: Tensor, routing: AnyRouting | None) -> Tensor:
        """Compute what :meth:`forward` returns, for rows (..., D) without padding."""
        mode = current_mode()
        routing = self._routing_of(x, mode) if routing is None else routing
        x_TD = x.reshape(-1, x.shape[-1])
        if mode.is_plain or (
            mode in (Mode.COMPILED, Mode.EXPORTED) and not (self.is_grouped or self.dispatcher)
        ):
            y_TD = self._weigh_all(x_TD, routing, mode)
        else:  # With a dispatcher too, since this process cannot run the experts of others.
            y_ND = self.run(
                dispatch(x_TD, routing, self.dtype_of_rows(x_TD, mode)),
                routing.offsets,
                routing.slots_per_expert,
                mode,
                routing.is_full,
            )
            y_TD = combine(y_ND, routing)
        return y_TD.reshape(*x.shape[:-1], y_TD.shape[-1])

    def _routing_of(self, x: Tensor, mode: Mode) -> AnyRouting:
        """Route rows.

        Raises:
            ValueError: if the router chooses more experts than it says, as costs follow from that.
        """
        router = self.router
        routing: AnyRouting = router(x)
        if mode.is_plain or isinstance(routing, ChosenRows) or routing.slots is None:
            return routing
        choices, stated = routing.slots.shape[1], router.experts_of_row()
        if choices > stated:
            name = type(router).__name__
            raise ValueError(
                f"{name} sends a row to {choices} experts, and its experts_of_row() says {stated}: "
                f"write {name}.experts_of_row."
            )
        return routing

    def _weigh_all(self, x_TD: Tensor, routing: AnyRouting, mode: Mode) -> Tensor:
        """Run every expert on every row, at E times the cost, by operators of every format."""
        if mode is Mode.COMPILED:
            _warn_of_all_rows(self.network_name)
        expert_TK, gate_TK = routing.experts(), routing.weights()
        if gate_TK is None:
            gate_TK = torch.ones_like(expert_TK, dtype=x_TD.dtype)
        weighted = []
        for number, expert in enumerate(self.each(mode)):
            output = expert(x_TD)
            is_chosen_TK = expert_TK == number
            gate_T1 = torch.where(is_chosen_TK, gate_TK, 0).sum(1, keepdim=True).to(output.dtype)
            # An expert's Inf or NaN must not reach rows that did not choose it, so no product by 0.
            weighted.append(torch.where(is_chosen_TK.any(1, keepdim=True), gate_T1 * output, 0))
        return sum(weighted[1:], start=weighted[0])


class SharedExpertMlp(MoeMlp):
    """An expert layer with a shared expert (ViMoE, section 3.3).

    The shared expert's output is added for every row, without a gate. The shared expert has the
    width of the other experts: with ``expert_width`` it is the first part of the dense network.

    Args:
        ffn: the dense network to replace.
        args: as :class:`MoeMlp`.
        shared_init: weights of the shared expert, here and when a dense checkpoint is loaded.
            ``"pretrained"`` is a copy of the dense network. ``"zero_out"`` is the same with zeros
            in the linear layer that is called last. So the shared expert of a network that ends
            with it adds nothing at first.
        kwargs: as :class:`MoeMlp`.

    Raises:
        ValueError: on an unknown ``shared_init``, and as :class:`MoeMlp`.
    """

    SHARED_INITS = ("pretrained", "zero_out")

    def __init__(self, ffn: nn.Module, *args: Any, shared_init: str = "pretrained", **kwargs: Any):
        check_choice("shared_init", shared_init, self.SHARED_INITS)
        self.shared_init = shared_init  # The constructor makes weights by it.
        super().__init__(ffn, *args, **kwargs)
        self.shared = self._units.narrow_(copy.deepcopy(ffn))
        self.shared.load_state_dict(self._shared_from_dense(ffn.state_dict()))
        for path, module in dropouts(self._ffn):
            self.shared.get_submodule(path).p = module.p  # type: ignore[assignment]

    def _networks(self) -> list[nn.Module]:
        """Return the routed experts' networks and the shared one."""
        return [*super()._networks(), self.shared]

    def weights_from_dense(self, dense: Mapping[str, Tensor], init: str) -> dict[str, Tensor]:
        """Make the layer's weights from those of a dense network.

        They are the routed experts' and, by ``shared_init``, those of the shared expert.
        """
        shared = {
            f"shared.{name}": weight for name, weight in self._shared_from_dense(dense).items()
        }
        return super().weights_from_dense(dense, init) | shared

    def _shared_from_dense(self, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the weights of the shared expert, by its names, from a dense network's."""
        first: dict[str, Any] = {
            name: self._units.cut(name, weight.detach())[0].clone()
            for name, weight in dense.items()
        }
        if self.shared_init == "zero_out":
            last, _ = probe(self._ffn).linear.popitem()
            for name, weight in first.items():
                if name.startswith(f"{last}."):
                    weight.zero_()
        for name, weight in first.items():
            # torch's set_model_state_dict spreads dense weights over processes as the routed
            # experts; the shared expert may be whole in each.
            if hasattr(weight, "placements") and not hasattr(
                self.shared.get_parameter(name), "placements"
            ):
                first[name] = weight.full_tensor()
        return first

    def stacked_weights(self) -> dict[str, Tensor]:
        """Return the weights of the routed experts, with the shared expert as the last.

        Parts of a dense network that the shared expert lacks are the means of the routed experts'.
        """
        own = dict(self.shared.named_parameters())
        self._require_merged(
            [f"shared.{name.rpartition('.')[0]}" for name in self.stacked_shapes if name not in own]
        )
        networks = super().stacked_weights()
        for name, routed in networks.items():
            parts = self._units.cut(name, mean_over_experts(routed)).clone()
            parts[0] = self.shared.get_parameter(name).detach()
            networks[name] = torch.cat([routed, self._units.join(name, parts)])
        return networks

    def compute(self, x: Tensor, routing: AnyRouting | None) -> Tensor:
        """Add the shared expert's output to that of the routed experts, which take the routing."""
        return self.shared(x) + super().compute(x, routing)


class EwaMlp(MoeMlp):
    """The expert layer of EWA (section 3.1).

    In training each expert computes its part of a new random partition of all rows of the local
    batch. In eval mode the layer computes the network that is deployed, the mean of the experts
    (eq. 7).

    It takes the arguments of :class:`MoeMlp`, the router being a :class:`RandomPartition`.
    """

    deploys_dense = True
    share_rate = 0.3
    share_schedule = "linear"

    def padding_of(self, x: Tensor) -> Tensor | None:
        """Return the padding to leave out, as :class:`MoeMlp` does.

        It is None in eval mode, where no row affects another one.
        """
        return super().padding_of(x) if self.training else None

    def compute(self, x: Tensor, routing: AnyRouting | None) -> Tensor:
        """Map each row of x as :class:`MoeMlp` does.

        In eval mode each row goes through the mean of the experts, whatever the routing.
        """
        return super().compute(x, routing) if self.training else self.run_mean(x)


@torch.compiler.assume_constant_result  # It runs while the layer is compiled, and never again.
def _warn_of_all_rows(network: str) -> None:
    """Warn of the cost of a compiled layer whose network, of this class, has no grouped form."""
    _say_once(
        f"Compiled, every expert computes every row: a {network} has no form that runs once over "
        "the rows of all experts. Networks of timm, torchvision and transformers have, their "
        "subclasses that override nothing, and classes that say only_calls_modules = True "
        "(docs/trainers.md)."
    )


@functools.cache  # Dynamo traces a layer more than once.
def _say_once(text: str) -> None:
    """Warn once in a process."""
    warnings.warn(text, stacklevel=3)


def _reset(router: Any) -> Any:
    """Draw a router's weights, set its balancing biases to zero, and return the router.

    Raises:
        RuntimeError: if the router cannot be reset.
    """
    if not hasattr(router, "reset_parameters"):
        raise RuntimeError(
            f"The router {type(router).__name__} has parameters, but no reset_parameters() that "
            "resets them."
        )
    router.reset_parameters()
    # A user's router resets its own weights alone.
    for module in router.modules():
        if isinstance(module, BalancingBias):
            module.reset_parameters()
    return router
