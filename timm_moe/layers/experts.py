"""E feed-forward networks of one architecture, held in stacked tensors.

Shape suffixes: N rows at the experts, D width, E experts.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .all_to_all import Dispatcher
from .checks import check_choice, check_number
from .fine_grained import HiddenUnits
from .functional import Mode, autocast_dtype, call_with, current_mode, is_intercepted
from .grouped import Runs, runs_of, sizes_of_runs
from .grouped_network import grouped_form
from .probe import is_timms_mlp, probe, without_values

EXPERT_INITS = ("same", "independent", "drop")
#: Names of the classes that FSDP1 and FSDP2 give a sharded :class:`Stacked`. They hold the weights
#: during a call only.
FREEING = ("FullyShardedDataParallel", "FSDPStacked")
#: Names of modules and options that a layer gets after its experts.
LATER = ("router", "shared", "shared_init")


class StackedParameters(nn.Module):
    """Base of modules with parameters that are stacked over E experts."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name, parameter in self.named_parameters(recurse=False):
            loaded = state_dict.get(prefix + name)
            if (
                loaded is not None
                and loaded.ndim == parameter.ndim
                and len(loaded) != len(parameter)
            ):
                raise RuntimeError(  # as torch's load_state_dict
                    f"The checkpoint has {len(loaded)} experts in {prefix}{name}, the model has "
                    f"{len(parameter)}: create the model with num_experts={len(loaded)}."
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the shapes of the parameters that printing the module shows."""
        return ", ".join(
            f"{name}={tuple(parameter.shape)}" for name, parameter in self.named_parameters()
        )


class Stacked(StackedParameters):
    """The stacked parameters of a module inside the dense network, such as a linear layer.

    It is called for its weights, so that hooks and wrappers act: offloading, spectral norm,
    pruning, PEFT's adapters.
    """

    def forward(self, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Return the parameters (E, ...) of these names.

        Raises:
            TypeError: if it is called with rows, as a layer of one network.
        """
        if not isinstance(names, tuple):
            raise TypeError(
                "This module holds the weights of all experts and takes no rows: call the layer of "
                "the experts, or change the dense model before convert_to_moe."
            )
        # The result is a tuple, since torch's backward hooks know no lists.
        weights = tuple(getattr(self, name) for name in names)
        # torch's FlopCounterMode asks what a module returns for its gradient, which inference mode
        # does not have.
        is_inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        is_plain = not hasattr(weights[0], "placements")  # A DTensor cannot be detached there.
        return (
            tuple(weight.detach() for weight in weights) if is_inference and is_plain else weights
        )


class Experts(StackedParameters):
    """E copies of a feed-forward network, stacked along a new first dimension.

    Parameters keep their names: ``fc1.weight`` of shape (H, D) becomes ``fc1.weight`` of shape (E,
    H, D). Loading a dense state dict gives every expert a copy of it (sparse upcycling), or a part.
    Modules without weights, such as activations and dropouts, are submodules that all experts
    share; replacing one changes the experts. So does setting an attribute of the network, such as a
    factor that a schedule changes.

    Two methods turn dense networks into experts and back. :meth:`weights_from_dense` makes the
    layer's weights of one network: in the constructor, as a dense state dict is loaded, and in
    :meth:`reset_from_dense`. :meth:`stacked_weights` returns the networks that the experts are or
    join to. A subclass with further weights extends both.

    Args:
        ffn: the dense network to copy. It must act on each row of a (T, D) tensor by itself and
            hold no buffers.
        num_experts: E.
        expert_init: ``"same"`` copies the weights of ``ffn`` into every expert; ``"independent"``
            keeps them in the first and draws the others with the same mean and standard deviation,
            for each half of a gated layer by itself (EWA, section 3.1: from scratch). ``"drop"``
            copies them, and draws half of each expert's hidden units again, also when a dense state
            dict is loaded (Drop-Upcycling, arXiv 2502.19261).
        expert_dropout: rate of the dropout inside the experts; by default the rate of ``ffn``.
        expert_width: 1 / M, by which expert e is the part e % M of ``ffn`` (fine-grained experts),
            see :class:`HiddenUnits`.

    Attributes:
        parts: M, the number of experts that join to one dense network.
        path: name of the layer in its model, for messages; there are words for one without a model.
        dispatcher: what runs experts that other processes hold; None if this process has all.

    Raises:
        ValueError: if an option is outside its range; if ``ffn`` has buffers, or a part with a name
            that the layer needs; if it has no dropout that can be set, or no hidden units that can
            be cut or drawn again.
    """

    path: str = "an expert layer"
    dispatcher: Dispatcher | None = None
    _ffn: nn.Module
    _grouped: nn.Module | None

    def __init__(
        self,
        ffn: nn.Module,
        num_experts: int,
        expert_init: str = "same",
        *,
        expert_dropout: float | None = None,
        expert_width: float = 1,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.expert_init = expert_init
        check_choice("expert_init", expert_init, EXPERT_INITS)
        if next(ffn.buffers(), None) is not None:
            raise ValueError(f"A {type(ffn).__name__} with buffers cannot be stacked into experts.")
        # _ffn is the dense network without weights. It is not a submodule, so that its parameters
        # are not listed. _grouped is the form of it that runs once over the rows of all experts.
        object.__setattr__(self, "_ffn", without_values(ffn))
        object.__setattr__(self, "_grouped", grouped_form(self._ffn))
        self._units = HiddenUnits(self._ffn, expert_width, is_needed=expert_init == "drop")
        self.parts = self._units.parts
        # Dropout rates of the dense network by path, if the experts have another rate.
        self._dense_rates: dict[str, float] = {}
        self._expert_dropout = expert_dropout
        if expert_dropout is not None:
            self._set_dropout(expert_dropout)
        #: Shapes (E, ...) of the stacked parameters by their dense names. A wrapper (FSDP1) may
        #: hold the parameters in pieces.
        self.stacked_shapes: dict[str, torch.Size] = {}
        #: Names of the weights of each module inside, by its path.
        self._weights: dict[str, tuple[str, ...]] = {}
        # Paths of the outermost modules without weights, which all experts share.
        self._shared: list[str] = []
        for name in (*ffn._parameters, *ffn._modules):
            if hasattr(self, name) or name in LATER:
                raise ValueError(
                    f"A {type(ffn).__name__} with a part called {name!r} cannot be stacked into "
                    "experts, as their layer needs this name: rename the part."
                )
        self._stack(
            ffn,
            self,
            self.weights_from_dense(
                dict(ffn.named_parameters(remove_duplicate=False)), expert_init
            ),
        )
        matrices = [shape for shape in self.stacked_shapes.values() if len(shape) == 3]
        self._widths = tuple({width for shape in matrices for width in shape[1:]})
        self._ends_linear = is_timms_mlp(ffn)
        # Two layers may take the rows (SwiGLU). Their gradients are to be summed in the type of the
        # rows, so that these are not cast before.
        self._casts_rows = self._ends_linear and self.is_grouped and len(matrices) == 2
        # Names of the network's own attributes, which the layer does not use for itself.
        self._attributes = {
            name for name in vars(self._ffn) if name[0] != "_" and not hasattr(self, name)
        }.difference(LATER)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in vars(self).get("_attributes", ()):
            for network in self._networks():
                setattr(network, name, value)

    def _networks(self) -> list[nn.Module]:
        """Return the networks that compute with the dense network's attributes."""
        return [self._ffn] if self._grouped is None else [self._ffn, self._grouped]

    def are_copies_of(self, ffn: nn.Module) -> bool:
        """Tell if the experts are copies or parts of networks of this one's classes and shapes."""
        own, other = (
            (
                {name: type(module) for name, module in network.named_modules()},
                {name: parameter.shape for name, parameter in network.named_parameters()},
            )
            for network in (self._ffn, ffn)
        )
        return own == other

    def _set_dropout(self, rate: float) -> None:
        """Set the rate of the dropout inside the experts, and remember the dense network's."""
        self._dense_rates = {path: module.p for path, module in dropouts(self._ffn)}
        if not self._dense_rates:
            raise ValueError(
                f"A {self.network_name} has no dropout, so expert_dropout cannot be set."
            )
        check_number("expert_dropout", rate, 0, 1)
        for _, dropout in dropouts(self._ffn):
            dropout.p = float(rate)

    @torch.no_grad()
    def weights_from_dense(self, dense: Mapping[str, Tensor], init: str) -> dict[str, Tensor]:
        """Make the layer's weights from those of a dense network.

        Args:
            dense: weights by their names in the network, or some of them.
            init: ``expert_init``, see the class.

        Returns:
            The experts' weights (E, ...), by their names in this layer's state dict. The router's
            are not among them, since they do not follow from the network.
        """
        parts = {name: self._units.cut(name, weight.detach()) for name, weight in dense.items()}
        experts = range(self.num_experts)
        stacked = {
            name: torch.stack([part[e % self.parts] for e in experts])
            for name, part in parts.items()
        }
        if init == "independent":
            rows = self._hidden_width()
            for first, *others in stacked.values():
                for other in others:
                    _draw_like_(other, first, rows)
        if init == "drop":
            for expert in experts:
                self._units.redraw_({name: weight[expert] for name, weight in stacked.items()})
        return stacked

    def _hidden_width(self) -> int:
        """Return the number of hidden units of an expert; 0 if no linear layer tells it."""
        linear = probe(self._ffn).linear
        return linear.popitem()[1].in_features // self.parts if linear else 0

    def _stack(
        self, module: nn.Module, into: nn.Module, initial: Mapping[str, Tensor], path: str = ""
    ) -> None:
        """Stack the parameters of a module of the network, and of the modules inside it.

        Modules without weights are shared.

        Args:
            module: the module.
            into: the module that gets the stacked parameters.
            initial: their values by dense names.
            path: name of the module in the network.
        """
        for name, parameter in module.named_parameters(recurse=False):
            stacked = initial[f"{path}.{name}".strip(".")]
            into.register_parameter(
                name, nn.Parameter(stacked, requires_grad=parameter.requires_grad)
            )
            self.stacked_shapes[f"{path}.{name}".strip(".")] = stacked.shape
            self._weights[path] = (*self._weights.get(path, ()), name)
        for name, child in module.named_children():
            inside = f"{path}.{name}".strip(".")
            if next(child.parameters(), None) is None:
                self._shared.append(inside)
                into.add_module(name, self._ffn.get_submodule(inside))
            else:
                into.add_module(name, Stacked())
                self._stack(child, into.get_submodule(name), initial, inside)

    def _dense_in(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
        """Return the weights of a dense network in a state dict, by their names in the network."""
        found = {
            name: state_dict[prefix + name]
            for name in self.stacked_shapes
            if prefix + name in state_dict
        }
        return {
            name: weight
            for name, weight in found.items()
            if weight.shape == self._ffn.get_parameter(name).shape
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Experts that began with independent weights all become copies of a dense network.
        init = "drop" if self.expert_init == "drop" else "same"
        dense = self._dense_in(state_dict, prefix)
        if dense:
            for name, weight in self.weights_from_dense(dense, init).items():
                state_dict[prefix + name] = weight
        super()._load_from_state_dict(state_dict, prefix, *args)

    def named_expert_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the stacked parameters, (E, ...), by their dense names.

        In replicas of nn.DataParallel they are plain tensors.
        """
        return [(name, attrgetter(name)(self)) for name in self.stacked_shapes]

    def expert_weights(self) -> dict[str, Tensor]:
        """Return the weights that the experts compute with, (E, ...), by their dense names.

        A module inside that has hooks or another class is called for its weights, so that hooks and
        PEFT's adapters take part.

        Raises:
            RuntimeError: if such a module frees its weights after the call.
        """
        weights: dict[str, Tensor] = {}
        for path, names in self._weights.items():
            if not path:
                weights.update((name, getattr(self, name)) for name in names)
                continue
            module = attrgetter(path)(self)
            if type(module).__name__ in FREEING:
                raise RuntimeError(
                    f"{path} of the experts in {self.path} is sharded by itself, so its weights "
                    "are freed before the experts compute: shard the expert layer or its block "
                    "instead."
                )
            values = (
                tuple(getattr(module, name) for name in names)
                if _only_holds(module)
                else module(names)
            )
            weights.update(zip((f"{path}.{name}" for name in names), values, strict=True))
        return weights if self.dispatcher is None else self.dispatcher.own(weights)

    def _shared_modules(self) -> dict[str, nn.Module]:
        """Return the modules without weights, by their dense names.

        They are looked up each time, since users replace activations.
        """
        return {path: attrgetter(path)(self) for path in self._shared}

    def _call(
        self, network: nn.Module, tensors: Mapping[str, Tensor | None], x: Tensor, mode: Mode
    ) -> Tensor:
        """Call the network, or its grouped form, with tensors by their dense names."""
        return call_with(network, tensors, self._shared_modules(), x, mode)

    def adapted(self) -> list[str]:
        """Return the names, as in the dense network, of the modules that have adapters of PEFT."""
        # The class is asked, which is PEFT's wrapper, since FSDP1's wrappers pass on attributes.
        return [
            path
            for path in self._weights
            if path and hasattr(type(attrgetter(path)(self)), "active_adapter")
        ]

    @torch.no_grad()
    def stacked_weights(self) -> dict[str, Tensor]:
        """Return the weights of all dense networks that the experts are or join to.

        They are stacked, (networks, ...), and detached.

        Raises:
            ValueError: if adapters are unmerged, or parts are left over.
        """
        self._require_merged(self.adapted())
        return {
            name: self._units.join(name, stacked.detach())
            for name, stacked in self.expert_weights().items()
        }

    @torch.no_grad()
    def mean_network(self) -> dict[str, Tensor]:
        """Return the mean of the dense networks that the experts are or join to.

        It is a place for new weights. If parts are left over, all experts are taken M times.

        Raises:
            ValueError: if adapters are unmerged, or weights are computed.
        """
        self.require_plain("would not take the new weights")
        mean = {}
        for name, stacked in self.expert_weights().items():
            times = self.parts if len(stacked) % self.parts else 1
            repeated = torch.cat([stacked.detach()] * times) if times > 1 else stacked.detach()
            mean[name] = mean_over_experts(self._units.join(name, repeated))
        return mean

    def require_plain(self, consequence: str) -> None:
        """Check that the experts' weights are their parameters.

        Args:
            consequence: what becomes of other weights, for the message.

        Raises:
            ValueError: if experts have adapters, or weights that are computed from other parameters
                (pruned).
        """
        experts = self.named_expert_parameters()
        computed = [name for name, stacked in experts if not isinstance(stacked, nn.Parameter)]
        self._require_merged([*computed, *self.adapted()], consequence)

    def _require_merged(self, names: list[str], consequence: str = "would be left out") -> None:
        """Raise ValueError if there are names of modules with adapters or computed weights."""
        if names:
            raise ValueError(
                f"{names[0]} of the experts in {self.path} has adapters or computed weights, "
                f"which {consequence}: merge adapters first, model = "
                "model.merge_and_unload(), or take off what computes weights "
                "(torch.nn.utils.prune.remove, remove_weight_norm, remove_spectral_norm, "
                "parametrize.remove_parametrizations)."
            )

    def dtype_of_rows(self, x: Tensor, mode: Mode) -> torch.dtype | None:
        """Return the type to which to cast rows before they are gathered; None for their own.

        Under autocast a linear layer casts its input. There may be more slots than rows, and to
        gather float32 moves more bytes. A compiler orders casts by itself.
        """
        return autocast_dtype(x) if self._casts_rows and mode is Mode.EAGER else None

    @property
    def is_grouped(self) -> bool:
        """Whether the network runs once over the rows of all experts."""
        return self._grouped is not None

    @property
    def network_name(self) -> str:
        """Name of the dense network's class."""
        return type(self._ffn).__name__

    def run(
        self,
        x_ND: Tensor,
        end_E: Tensor | None,
        slots_per_expert: int | None = None,
        mode: Mode | None = None,
        is_full: bool = False,
    ) -> Tensor:
        """Apply each expert to its run of rows.

        An expert without rows has zero gradients, not None, as data-parallel training needs.

        Args:
            x_ND: rows in the order of the experts.
            end_E: end of each expert's run; None if all have ``slots_per_expert`` rows.
            slots_per_expert: number of rows of each expert, or None.
            mode: mode of the call; by default the present one.
            is_full: whether it is known that no row is after the last run.

        Returns:
            The outputs, (N, width), which are zero after the last run.
        """
        run = partial(self._run, mode=mode or current_mode(), is_full=is_full)
        if self.dispatcher is not None:
            return self.dispatcher.run(run, x_ND, end_E, slots_per_expert)
        return run(x_ND, end_E, slots_per_expert)

    def _run(
        self,
        x_ND: Tensor,
        end_E: Tensor | None,
        slots_per_expert: int | None = None,
        *,
        mode: Mode,
        is_full: bool = False,
    ) -> Tensor:
        """Do what :meth:`run` does with the experts of this process."""
        if slots_per_expert is not None:
            return self.run_batched(x_ND, mode).flatten(0, 1)
        assert end_E is not None
        if self._grouped is None:
            *parts, rest = x_ND.split(sizes_of_runs(end_E, x_ND))
            outputs = [network(rows) for network, rows in zip(self.each(mode), parts, strict=True)]
            return torch.cat([*outputs, outputs[0].new_zeros(rest.shape[0], outputs[0].shape[1])])
        runs = runs_of(end_E, x_ND, *self._widths, is_full=is_full)
        tensors: dict[str, Tensor | None] = {**self.expert_weights()}
        for path in self._weights:
            tensors |= {
                f"{path}.{name}".strip("."): value
                for name, value in zip(Runs._fields, runs, strict=True)
            }
        # A linear layer leaves zeros after the last run.
        if is_full or self._ends_linear:
            return self._call(self._grouped, tensors, x_ND, mode)
        # A network that divides by a norm makes NaN of zeros, so rows after the last run and their
        # gradients are masked.
        is_after_N1 = (torch.arange(x_ND.shape[0], device=x_ND.device) >= end_E[-1]).unsqueeze(1)
        y_NH = self._call(self._grouped, tensors, x_ND.masked_fill(is_after_N1, 0), mode)
        return y_NH.masked_fill(is_after_N1, 0)

    def run_batched(self, x_ND: Tensor, mode: Mode) -> Tensor:
        """Apply each expert of this process to its C of E C rows, by batched products.

        Returns:
            The outputs, (E, C, width).
        """
        if self._grouped is not None:
            weights = self.expert_weights()
            x_ECD = x_ND.view(len(next(iter(weights.values()))), -1, x_ND.shape[1])
            return self._call(self._grouped, weights, x_ECD, mode)
        each = self.each(mode)
        x_ECD = x_ND.view(len(each), -1, x_ND.shape[1])
        return torch.stack([network(x) for network, x in zip(each, x_ECD.unbind(), strict=True)])

    def each(self, mode: Mode | None = None) -> list[Callable[[Tensor], Tensor]]:
        """Return the experts, each as a function of rows (..., D)."""
        mode = mode or current_mode()
        # unbind has one cheap backward for all experts. Indexing would make a gradient of the
        # stack's size for each expert.
        per_expert = {name: stacked.unbind(0) for name, stacked in self.expert_weights().items()}
        return [
            partial(
                self._call,
                self._ffn,
                {name: tensors[expert] for name, tensors in per_expert.items()},
                mode=mode,
            )
            for expert in range(len(next(iter(per_expert.values()))))
        ]

    def run_mean(self, x: Tensor) -> Tensor:
        """Apply the network of the experts' mean weights (EWA, eq. 7) to x of shape (..., D)."""
        mean = {name: mean_over_experts(stacked) for name, stacked in self.expert_weights().items()}
        mean = mean if self.dispatcher is None else self.dispatcher.mean(mean)
        return self.run_network(mean, x)

    def run_network(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Apply one network with these weights, by their dense names, to x of shape (..., D)."""
        return self._call(self._ffn, weights, x, current_mode())

    def to_ffn(self, weights: dict[str, Tensor]) -> nn.Module:
        """Make a network of the original class, with these weights.

        Dropouts have the dense network's rates, or those that were set since the conversion.

        The same parameters require gradients as in the experts, and it is in their mode.
        """
        for path, module in self._shared_modules().items():
            self._ffn.set_submodule(path, module)
        ffn = copy.deepcopy(self._ffn)
        for path, rate in self._dense_rates.items():
            dropout: Any = ffn.get_submodule(path)
            # Else the rate was set, or the dropout replaced, since the conversion.
            if getattr(dropout, "p", None) == self._expert_dropout:
                dropout.p = rate
        ffn.load_state_dict(
            {name: weights[name] for name in self.stacked_shapes}, strict=False, assign=True
        )
        for name, stacked in self.named_expert_parameters():
            ffn.get_parameter(name).requires_grad_(stacked.requires_grad)
        return ffn.train(self.training)

    @torch.no_grad()
    def reset_from_dense(self, ffn: nn.Module) -> None:
        """Set the experts from a dense network, by the ``expert_init`` that they were made with."""
        dense = dict(ffn.named_parameters(remove_duplicate=False))
        for name, weight in self.weights_from_dense(dense, self.expert_init).items():
            attrgetter(name)(self).copy_(weight)

    def init_weights(self) -> None:
        """Refuse, since only the model knows how a dense network is initialised.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"A {type(self).__name__} cannot initialise its experts by itself: call init_weights() "
            "of the model before convert_to_moe, or of a model that was created by the name of one "
            "with experts."
        )

    reset_parameters = init_weights

    def train(self, mode: bool = True) -> "Experts":
        """Set the mode of training or evaluation, also of the dropout inside the experts."""
        for structure in (self._ffn, self._grouped):
            if structure is not None:
                structure.train(mode)
        return super().train(mode)

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script, which calls this.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "Experts have no TorchScript form: compile the model (--torchcompile), or script the "
            "dense model of timm_moe.to_dense."
        )

    def extra_repr(self) -> str:
        """Return the network's class and E, which printing the module shows."""
        return f"ffn={self.network_name}, num_experts={self.num_experts}"


def _draw_like_(other: Tensor, like: Tensor, rows: int) -> None:
    """Draw weights with the mean and the standard deviation of others, in place.

    Each block of ``rows`` is drawn by itself, since the halves of a gated layer may begin apart, as
    in timm's ``GluMlp``.
    """
    is_of_blocks = rows and like.dim() and len(like) % rows == 0
    blocks = len(like) // rows if is_of_blocks else 1
    for new, old in zip(other.view(blocks, -1), like.view(blocks, -1), strict=True):
        new.normal_().mul_(old.std(correction=0)).add_(old.mean())


def mean_over_experts(stacked: Tensor) -> Tensor:
    """Take the mean over the first dimension, in float32 at least.

    It is returned in the dtype of ``stacked``.
    """
    return stacked.mean(0, dtype=torch.promote_types(stacked.dtype, torch.float32)).to(
        stacked.dtype
    )


def dropouts(ffn: nn.Module) -> Iterator[tuple[str, nn.Dropout]]:
    """Return the dropouts of a network with their names in it."""
    return (
        (path, module) for path, module in ffn.named_modules() if isinstance(module, nn.Dropout)
    )


def _only_holds(module: nn.Module) -> bool:
    """Tell if a module does nothing but hold weights, so that it need not be called for them."""
    return type(module) is Stacked and not is_intercepted(module)
