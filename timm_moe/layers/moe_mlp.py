"""The expert layers that take the place of a transformer block's feed-forward network."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .dispatch import Routing, combine, dispatch
from .experts import Experts, dropouts
from .kept_mean import mean_over_experts
from .records import RecordingRouter
from .router import Router
from .routers import RandomPartition
from .scripting import ScriptableMlp, ScriptableMoeMlp, in_plain_operators, replacing


class MoeMlp(Experts):
    """A router and E experts: drops in where timm has an Mlp.

    Args:
        ffn: the dense network to replace.
        router: maps x of shape (..., D) to a :class:`timm_moe.layers.Routing` of its rows over the E experts.
        num_experts: E.
        expert_init: see :class:`Experts`.
        expert_dropout: see :class:`Experts`.

    Attributes:
        path: name of the layer in its model, for messages.
        replaced: the parameters of the dense network whose place it took, as long as something still holds them.
        deploys_dense: whether one dense network computes what the layer does when it is deployed.
        fused: whether learned weights make one network of the experts, so that nothing is routed or left to gather.
    """

    deploys_dense: ClassVar[bool] = False
    fused: ClassVar[bool] = False
    #: Called with every layer that comes to be in this process, copies and unpickled ones included.
    observers: ClassVar[list[Callable[["MoeMlp"], Any]]] = []
    replaced: Iterable[nn.Parameter] = ()

    def __init__(
        self,
        ffn: nn.Module,
        router: nn.Module,
        num_experts: int,
        expert_init: str = "same",
        *,
        expert_dropout: float | None = None,
    ):
        super().__init__(ffn, num_experts, expert_init, expert_dropout)
        self.router = router
        self.path = ""
        self._announce()

    def __setstate__(self, state):  # a deep copy or an unpickled layer
        super().__setstate__(state)
        self._announce()

    def _announce(self) -> None:
        for observe in self.observers:
            observe(self)

    @property
    def routed_by(self) -> Router:
        """What may be asked of the router; of a module that is no :class:`Router`, that class's answers."""
        return self.router if isinstance(self.router, Router) else Router(self.num_experts)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}router.logits" in state_dict and not hasattr(self.router, "logits"):
            raise ValueError(
                f"The checkpoint's experts in {prefix.rstrip('.')} are fused by learned weights, the model's are not: "
                "create the model with router='fused'."
            )
        if f"{prefix}router.weight" in state_dict and not self.router.state_dict():
            raise ValueError(
                f"The checkpoint's experts in {prefix.rstrip('.')} are routed, the model's are not: create the model "
                "with router='top_k'."
            )
        if not hasattr(self, "shared") and any(name.startswith(f"{prefix}shared.") for name in state_dict):
            raise ValueError(
                f"The checkpoint has a shared expert in {prefix.rstrip('.')}, the model has none: create the model "
                "with shared_expert=True."
            )
        if any(
            name in state_dict and state_dict[name].shape == stacked.shape[1:]
            for name, stacked in ((prefix + name, stacked) for name, stacked in self.named_expert_parameters())
        ):
            self._complete_dense(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _complete_dense(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Add to the tensors of a dense network what it does not have: the router keeps its weights."""
        for name, value in self.router.state_dict(prefix=f"{prefix}router.").items():
            state_dict.setdefault(name, value)

    def reset_from_dense(self, ffn: nn.Module) -> None:
        """As :class:`Experts`; the router begins anew too.

        Raises:
            RuntimeError: if it has parameters, but no ``reset_parameters``.
        """
        super().reset_from_dense(ffn)
        reset = getattr(self.router, "reset_parameters", None)
        if callable(reset):
            reset()
        elif next(self.router.parameters(), None) is not None:
            raise RuntimeError(
                f"The router {type(self.router).__name__} has parameters, but no reset_parameters() by which they "
                "could begin anew."
            )

    def forward(self, x: Tensor, *, routing: Routing | None = None) -> Tensor:
        """Map each row of x, (..., D), by its own routing or by one that is given, to (..., width of the outputs).

        Raises:
            ValueError: if something wraps a router that has losses.
        """
        self._require_own_router()
        if routing is None:
            routing = self.router(x)
        x_TD = x.reshape(-1, x.shape[-1])
        if in_plain_operators() or (torch.compiler.is_compiling() and not self.is_grouped):
            y_TD = self._weigh_all(x_TD, routing)
        else:
            y_TD = combine(self.run(dispatch(x_TD, routing), routing.offsets), routing)
        return y_TD.reshape(*x.shape[:-1], y_TD.shape[-1])

    def _weigh_all(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Every expert on every row, by operators that every format has; at E times the cost of the network."""
        expert_TK = routing.experts()
        weight_TK = torch.ones_like(expert_TK, dtype=x_TD.dtype) if routing.gates is None else routing.gates
        weighted = []
        for number, expert in enumerate(self.each()):
            output = expert(x_TD)
            is_chosen_TK = expert_TK == number
            gate_T1 = torch.where(is_chosen_TK, weight_TK, 0).sum(1, keepdim=True).to(output.dtype)
            weighted.append(torch.where(is_chosen_TK.any(1, keepdim=True), gate_T1 * output, 0))  # Inf of others aside
        return sum(weighted[1:], start=weighted[0])

    def _require_own_router(self) -> None:
        """Its losses are asked of the router itself, so whatever stands around it would leave them out."""
        if isinstance(self.router, Router):
            return
        if any(isinstance(module, RecordingRouter) for module in self.router.modules()):
            raise ValueError(
                f"The router of {self.path or 'an expert layer'} is wrapped by a {type(self.router).__name__}, which "
                "would leave out its losses: leave routers unwrapped, in PEFT out of the targets and modules_to_save."
            )

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script compiles in the place of this layer, for eval mode only; it shares the weights.

        Raises:
            RuntimeError: if TorchScript cannot choose as the router does.
            ValueError: if the experts have adapters that are not merged.
        """
        choice = self.routed_by.scriptable_choice()
        self._require_merged(self.adapted())
        weights = dict(self.named_expert_parameters())
        scriptable = ScriptableMoeMlp(
            [
                self.to_ffn({name: stacked[expert] for name, stacked in weights.items()})
                for expert in range(self.num_experts)
            ],
            *choice,
            getattr(self, "shared", None),
        )
        return replacing(self, scriptable)


class SharedExpertMlp(MoeMlp):
    """An expert layer with one more network, the shared expert, that every row passes through (ViMoE, section 3.3).

    Its output is added as it is, without a gate.

    Args:
        ffn: the dense network to replace.
        args: as :class:`MoeMlp`.
        shared_init: what the shared expert begins as, here and when a dense checkpoint is loaded: ``"pretrained"``, a
            copy of the dense network like the routed experts, or ``"zero_out"``, the same with its last linear layer
            zero, so that it adds nothing at first.
        kwargs: as :class:`MoeMlp`.

    Raises:
        ValueError: on an unknown ``shared_init``, and as :class:`MoeMlp`.
    """

    SHARED_INITS = ("pretrained", "zero_out")

    def __init__(self, ffn: nn.Module, *args: Any, shared_init: str = "pretrained", **kwargs: Any):
        if shared_init not in self.SHARED_INITS:
            raise ValueError(f"shared_init must be one of {', '.join(self.SHARED_INITS)}, got {shared_init!r}.")
        super().__init__(ffn, *args, **kwargs)
        self.shared = copy.deepcopy(ffn)
        self.shared_init = shared_init
        self._begin_shared()
        for path, module in dropouts(self._ffn):
            self.shared.get_submodule(path).p = module.p  # type: ignore[assignment]

    def _begin_shared(self) -> None:
        for name, parameter in self.shared.named_parameters():
            if self._starts_at_zero(name):
                nn.init.zeros_(parameter)

    def _starts_at_zero(self, name: str) -> bool:
        last = [path for path, module in self.shared.named_modules() if isinstance(module, nn.Linear)][-1]
        return self.shared_init == "zero_out" and name.startswith(f"{last}.")

    def _complete_dense(self, state_dict: dict[str, Any], prefix: str) -> None:
        super()._complete_dense(state_dict, prefix)
        for name, _ in self.named_expert_parameters():
            dense = state_dict.get(prefix + name)
            if dense is not None:
                shared = torch.zeros_like(dense) if self._starts_at_zero(name) else dense
                state_dict.setdefault(f"{prefix}shared.{name}", shared)

    @torch.no_grad()
    def reset_from_dense(self, ffn: nn.Module) -> None:
        """As :class:`MoeMlp`, and the shared expert by ``shared_init``."""
        super().reset_from_dense(ffn)
        for name, parameter in self.shared.named_parameters():
            parameter.copy_(ffn.get_parameter(name))
        self._begin_shared()

    def stacked_weights(self) -> dict[str, Tensor]:
        """Those of the routed experts, then the shared one."""
        shared = dict(self.shared.named_parameters())
        self._require_merged(
            [f"shared.{name.rpartition('.')[0]}" for name in self.stacked_shapes if name not in shared]
        )
        routed = super().stacked_weights()
        return {name: torch.cat([stacked, shared[name].detach()[None]]) for name, stacked in routed.items()}

    def forward(self, x: Tensor, *, routing: Routing | None = None) -> Tensor:
        """As :class:`MoeMlp`; a routing is that of the routed experts."""
        return self.shared(x) + super().forward(x, routing=routing)


class EwaMlp(MoeMlp):
    """The expert layer of EWA (section 3.1): random partitions in training, the mean of the experts in eval mode.

    In training each expert computes its part of a fresh random partition of all rows of the local batch. In eval mode
    the layer computes the feed-forward network that will be deployed, the mean of the experts (eq. 7).

    Args:
        ffn: the dense network to replace.
        num_experts: E.
        expert_init: see :class:`Experts`.
        expert_dropout: see :class:`Experts`.
        eval_mode: ``"average"``, or ``"partition"`` to evaluate the experts on random partitions as in training
            (for analysis: the outputs are random).

    Raises:
        ValueError: on an unknown ``eval_mode``, and as :class:`Experts`.
    """

    deploys_dense = True
    EVAL_MODES = ("average", "partition")

    def __init__(
        self,
        ffn: nn.Module,
        num_experts: int,
        expert_init: str = "same",
        *,
        expert_dropout: float | None = None,
        eval_mode: str = "average",
    ):
        router = RandomPartition(num_experts)
        super().__init__(ffn, router, num_experts, expert_init, expert_dropout=expert_dropout)
        if eval_mode not in self.EVAL_MODES:
            raise ValueError(f"eval_mode must be one of {', '.join(self.EVAL_MODES)}, got {eval_mode!r}.")
        self.eval_mode = eval_mode

    def forward(self, x: Tensor, *, routing: Routing | None = None) -> Tensor:
        """As :class:`MoeMlp`; in eval mode the mean of the experts needs no routing."""
        if not self.training and self.eval_mode == "average":
            return self.run_mean(x)
        return super().forward(x, routing=routing)

    def __prepare_scriptable__(self) -> nn.Module:
        """As :class:`MoeMlp`; the mean of the experts, where it is evaluated, has weights of its own."""
        if self.eval_mode != "average":
            return super().__prepare_scriptable__()
        mean = {name: mean_over_experts(stacked) for name, stacked in self.stacked_weights().items()}
        return replacing(self, ScriptableMlp(self.to_ffn(mean)))
