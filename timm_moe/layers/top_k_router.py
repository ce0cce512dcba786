"""The router of rows to their K best experts (V-MoE, Switch).

Shape suffixes: T rows, D width, E experts, K choices of a row, G groups, S rows of a group, B
images (entries of the batch) of a group, N rows of an image.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_choice, check_flag, check_integer, check_number
from .functional import Mode, current_mode, no_autocast
from .losses import (
    balance_loss,
    global_entropy_loss,
    importance_loss,
    load_loss,
    local_entropy_loss,
    z_loss,
)
from .queues import ROUNDINGS, Queues, assign, expert_capacity, images_of_group, queue
from .recording_router import RecordingRouter
from .router import linear_logits, with_noise
from .routing import Routing

LOSSES = ("importance", "load", "balance", "balance_top_k", "local_entropy", "global_entropy", "z")
SCORES = ("softmax", "sigmoid")
#: Options that a printed router shows if they are set.
SHOWN = (
    "ensemble_size",
    "noise_std",
    "capacity_factor",
    "eval_capacity_factor",
    "batch_priority",
    "group_images",
)
GATE_MODES = ("prob", "one", "renorm")


class TopKRouter(RecordingRouter):
    """Router of each row to the K experts of largest gate (V-MoE, arXiv 2106.05974, section 2).

    With K = 1 it is the router of Switch Transformers (arXiv 2101.03961). The gate is the softmax
    over all experts, taken before the choice, or the sigmoid of the logit. Logits, gates and losses
    are computed in float32 at least, under autocast too.

    Args:
        dim: D.
        num_experts: E.
        top_k: K, the number of experts of each row.
        noise_std: in training, normal noise of standard deviation ``noise_std / E`` is added to the
            logits.
        capacity_factor: in training, an expert takes ``ceil(S * K * capacity_factor / E)`` choices
            of a group, and further choices are dropped; None to drop nothing.
        eval_capacity_factor: the same in eval mode.
        capacity_multiple: the rounded capacity is rounded up to a multiple of this.
        capacity_rounding: first rounding of the capacity: ``"ceil"``, ``"round"`` or ``"floor"``.
        batch_priority: rows with a larger first gate queue first, instead of in their order.
        group_images: number of entries of the batch that share queues, capacities and losses; by
            default all. In eval mode a batch that this number does not divide is one group.
        loss_weights: weight of each of the losses ``"importance"``, ``"load"``, ``"balance"`` (of
            first choices), ``"balance_top_k"`` (of all choices), ``"local_entropy"``,
            ``"global_entropy"`` and ``"z"``. The weight of others is 0.
        gate_mode: factor of a chosen expert's output. ``"prob"``: its gate. ``"one"``: one, so that
            the router learns from its losses alone. ``"renorm"``: its gate divided by the sum of
            the chosen experts' gates.
        score: ``"softmax"``, or ``"sigmoid"``, by which experts do not compete (DeepSeek-V3, arXiv
            2412.19437).
        route_scale: factor of all gates.
        bias_rate: rate of a bias on the gates, for the choice alone (:class:`BalancingBias`); 0 for
            no bias.

    Attributes:
        weight: (E, D) parameter.
        own_losses: names of further losses, which a subclass computes in :meth:`extra_losses`.

    Raises:
        ValueError: on an option outside its range.
    """

    noisy_in_eval = False
    own_losses: tuple[str, ...] = ()

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 1,
        noise_std: float = 0.0,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        capacity_multiple: int = 4,
        capacity_rounding: str = "ceil",
        batch_priority: bool = False,
        group_images: int | None = None,
        loss_weights: Mapping[str, float] | None = None,
        gate_mode: str = "prob",
        score: str = "softmax",
        route_scale: float = 1.0,
        bias_rate: float = 0.0,
    ):
        loss_weights = dict(loss_weights or {})
        check_integer("top_k", top_k, 1, num_experts)
        check_number("noise_std", noise_std, 0)
        check_number("capacity_factor", capacity_factor, 0, above=True, or_none=True)
        check_number("eval_capacity_factor", eval_capacity_factor, 0, above=True, or_none=True)
        check_integer("capacity_multiple", capacity_multiple, 1)
        check_integer("group_images", group_images, 1, or_none=True)
        check_flag("batch_priority", batch_priority)
        check_choice("capacity_rounding", capacity_rounding, ROUNDINGS)
        check_choice("gate_mode", gate_mode, GATE_MODES)
        check_choice("score", score, SCORES)
        check_number("route_scale", route_scale, 0, above=True)
        check_number("bias_rate", bias_rate, 0)
        names = (*LOSSES, *self.own_losses)
        for name, weight in loss_weights.items():
            if name not in names:
                raise ValueError(f"A router's losses are {', '.join(names)}, got {name!r}.")
            check_number(f"The weight of the {name} loss", weight, 0)
        if loss_weights.get("load") and (bias_rate or not noise_std):
            raise ValueError(
                "The load loss is about a choice by noisy logits: give a noise_std above 0 and no "
                "bias_rate, or leave the loss out."
            )
        super().__init__(
            num_experts,
            {name: weight for name, weight in loss_weights.items() if weight},
            bias_rate,
        )
        is_always_one = gate_mode == "one" or (gate_mode == "renorm" and top_k == 1)
        if is_always_one and top_k < num_experts and not self.loss_weights.keys() - {"z"}:
            warnings.warn(
                f"With top_k={top_k} and gate_mode={gate_mode!r} all gates are one, and the "
                "router has no loss of its choices, so nothing trains it: give it a loss "
                "(aux_loss_weight above 0), or take gate_mode='prob'.",
                stacklevel=2,
            )
        self.top_k = top_k
        self.noise_std = noise_std
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.capacity_multiple = capacity_multiple
        self.capacity_rounding = capacity_rounding
        self.batch_priority = batch_priority
        self.group_images = group_images
        self.gate_mode = gate_mode
        self.score = score
        self.route_scale = route_scale
        self.part_size = num_experts  # experts among which a row chooses
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small normal weights, as in timm's linear layers.

        With zeros the order of the experts would decide the choice.
        """
        nn.init.trunc_normal_(self.weight, std=0.02)
        if self.balancing_bias is not None:
            self.balancing_bias.reset_parameters()

    @property
    def needs_whole_images(self) -> bool:  # type: ignore[override]
        """Whether groups count images, so that no padding can be left out."""
        return self.group_images is not None

    def experts_of_row(self) -> int:
        """Return K."""
        return self.top_k

    @contextmanager
    def dropping_nothing(self) -> Iterator[None]:
        """Within the block, drop no choice in eval mode."""
        factor, self.eval_capacity_factor = self.eval_capacity_factor, None
        try:
            yield
        finally:
            self.eval_capacity_factor = factor

    def forward(self, x: Tensor) -> Routing:
        """Route the rows of x of shape (B, ..., D).

        Raises:
            ValueError: if the capacity would be below 1, and in training if ``group_images`` does
                not divide B.
            RuntimeError: as :meth:`is_recording`.
        """
        batch, rows, mode = x.shape[0], math.prod(x.shape[1:-1]), current_mode()
        groups = self._groups(batch)
        x_GBND = x.reshape(groups, batch // groups, rows, x.shape[-1])
        capacity = self._capacity(batch // groups * rows)
        logits_GBNE = self._logits(x_GBND)
        is_noisy = self.noise_std and (self.training or self.noisy_in_eval)
        noisy_GBNE = with_noise(logits_GBNE, self.noise_std) if is_noisy else logits_GBNE
        gate_GBNE = self._gates(noisy_GBNE)
        chosen_GBNK, choice_GBNK = self._choose(gate_GBNE, noisy_GBNE)
        chosen_GSK, expert_GSK = (
            chosen_GBNK.flatten(1, 2),
            self._experts(choice_GBNK).flatten(1, 2),
        )
        priority_GS = chosen_GSK[..., 0] if self.batch_priority else None
        queues = queue(expert_GSK, self.num_experts, priority_GS, mode)
        may_wait = not self.training and mode is Mode.EAGER
        routing = assign(expert_GSK, self._factors(chosen_GSK), queues, capacity, mode, may_wait)
        if self.is_recording():
            losses = self._losses(logits_GBNE, noisy_GBNE, gate_GBNE, choice_GBNK, queues)
            self.record(losses, queues.load, capacity)
        return routing

    def probabilities(self, x: Tensor) -> Any:  # a tensor, but None in PartitionedRouter
        """Return the gates without noise, divided by their sum, (T, E), for rows (B, ..., D)."""
        return self._shares(
            self._gates(self._logits(x.reshape(1, x.shape[0], -1, x.shape[-1])))
        ).flatten(0, 2)

    def _gates(self, logits: Tensor) -> Tensor:
        """Return the gates (..., E) of logits (..., E)."""
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def _choose(self, gate: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts' gates and numbers, (..., K), by gates and logits (..., E).

        Rounding may make gates equal whose logits are not, so the logits decide. With a bias on the
        gates they decide between those that are equal.
        """
        bias = self.balancing_bias
        if bias is None and self.top_k == 1 and self.score == "softmax":
            return gate.max(-1, keepdim=True)  # One operator; of nearly equal logits the first.
        biased = None if bias is None else bias(gate.detach())
        choice = _places_of_largest(logits.detach(), self.top_k, biased)
        return gate.gather(-1, choice), choice

    def _shares(self, gate: Tensor) -> Tensor:
        """Divide gates (..., E) by their sum, as losses and reports need them."""
        return (
            gate if self.score == "softmax" else gate / gate.sum(-1, keepdim=True).clamp(min=1e-20)
        )

    def _factors(self, chosen_GSK: Tensor) -> Tensor:
        """Return the factors of the chosen experts' outputs, from their gates."""
        if self.gate_mode == "one":
            one_GSK = torch.ones_like(chosen_GSK)
            # Data-parallel training looks for a way from the outputs to every parameter, and needs
            # zero gradients, not None, of a router that nothing trains.
            chosen_GSK = one_GSK + 0 * chosen_GSK if self.training else one_GSK
        elif self.gate_mode == "renorm":
            chosen_GSK = chosen_GSK / chosen_GSK.sum(2, keepdim=True).clamp(min=1e-20)
        return chosen_GSK if self.route_scale == 1 else chosen_GSK * self.route_scale

    def _groups(self, batch: int) -> int:
        """Return G for a batch of this many entries: only capacities and losses are of groups."""
        drops = self.training or self.eval_capacity_factor is not None
        if self.group_images is None or not drops:
            return 1
        groups = batch // images_of_group(batch, self.group_images, self.training)
        return groups if isinstance(groups, Tensor) else max(1, groups)

    def _logits(self, x_GBND: Tensor) -> Tensor:
        """Return the logits, (G, B, N, E), of the experts among which a row chooses."""
        return linear_logits(x_GBND, self.weight)

    def _experts(self, choice_GBNK: Tensor) -> Tensor:
        """Return the chosen experts, numbered among all experts."""
        return choice_GBNK

    def _loss_groups(self, x_GBN: Tensor) -> Tensor:
        """Arrange rows by the groups of the losses: (G, B, N, ...) -> (G, S, ...)."""
        return x_GBN.flatten(1, 2)

    def _capacity(self, rows: int) -> int | None:
        """Return the number of choices of a group of rows that an expert takes; None for all."""
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        # A row chooses an expert at most once, so that a factor of E drops nothing.
        if factor is None or factor >= self.num_experts or rows == 0:
            return None
        choices, rounding = rows * self.top_k, self.capacity_rounding
        most = rows * self.part_size // self.num_experts  # rows that may choose one expert
        return expert_capacity(
            choices, self.num_experts, factor, rounding, self.capacity_multiple, most
        )

    def _losses(
        self,
        logits_GBNE: Tensor,
        noisy_GBNE: Tensor,
        gate_GBNE: Tensor,
        choice_GBNK: Tensor,
        queues: Queues,
    ) -> dict[str, Tensor]:
        """Return the mean over the groups of each loss with a weight; zero for an empty batch."""
        if logits_GBNE.numel() == 0:
            return dict.fromkeys(self.loss_weights, logits_GBNE.sum())
        groups = self._loss_groups
        std = self.noise_std / self.part_size

        def exact_GSE() -> Tensor:
            """Return the gates without noise."""
            gate = gate_GBNE if noisy_GBNE is logits_GBNE else self._gates(logits_GBNE)
            return self._shares(groups(gate))

        def balance(load_GE: Tensor, choices: int) -> Tensor:
            """Return the balance loss of this many choices of a row."""
            load_of_parts = load_GE.reshape(-1, self.part_size)
            return balance_loss(self._shares(groups(gate_GBNE)), load_of_parts, choices)

        losses = {
            "importance": lambda: importance_loss(exact_GSE()),
            "load": lambda: load_loss(
                groups(logits_GBNE), groups(noisy_GBNE), groups(choice_GBNK)[..., -1], std
            ),
            "balance": lambda: balance(queues.load_first, 1),
            "balance_top_k": lambda: balance(queues.load, self.top_k),
            "local_entropy": lambda: local_entropy_loss(exact_GSE()),
            "global_entropy": lambda: global_entropy_loss(exact_GSE()),
            "z": lambda: z_loss(groups(logits_GBNE)),
        }
        extra: dict[str, Tensor] = {}
        if self.own_losses:
            with no_autocast(logits_GBNE):
                extra = self.extra_losses(groups(logits_GBNE), groups(gate_GBNE))
        return {
            name: _mean(extra[name] if name in extra else losses[name]())
            for name in self.loss_weights
        }

    def extra_losses(self, logits_GSE: Tensor, gate_GSE: Tensor) -> dict[str, Tensor]:
        """Return the losses (G,) that a subclass names in ``own_losses``.

        Args:
            logits_GSE: logits of the rows of each group, without noise.
            gate_GSE: their gates, with noise.
        """
        return {}

    def extra_repr(self) -> str:
        """Return the options that printing the module shows."""
        options = [f"{name}={value}" for name in SHOWN if (value := getattr(self, name, None))]
        return ", ".join([f"num_experts={self.num_experts}, top_k={self.top_k}", *options])


def _mean(of_groups: Tensor) -> Tensor:
    """Return the mean () of a loss over the groups, (G,)."""
    return of_groups.squeeze(0) if of_groups.shape[0] == 1 else of_groups.mean()


def _places_of_largest(x: Tensor, k: int, first: Tensor | None = None) -> Tensor:
    """Return the places of the k largest entries of the last dimension, the largest first.

    Equal entries keep their order. This takes the place of a stable sort, which ONNX lacks.

    Args:
        x: the entries.
        k: their number.
        first: values that are compared first, so that x is compared where they are equal.
    """
    places: list[Tensor] = []
    for number in range(k):
        if number:
            x = x.scatter(-1, places[-1], -torch.inf)
            first = None if first is None else first.scatter(-1, places[-1], -torch.inf)
        if first is None:
            largest = x
        else:
            largest = x.masked_fill(first < first.amax(-1, keepdim=True), -torch.inf)
        places.append(largest.argmax(-1, keepdim=True))
    # All first choices come first in memory, as in the queues.
    return torch.stack([place.squeeze(-1) for place in places]).movedim(0, -1)
