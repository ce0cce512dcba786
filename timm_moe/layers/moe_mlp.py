"""The expert layer that takes the place of a transformer block's feed-forward network."""

import weakref
from typing import ClassVar

from torch import Tensor, nn

from .dispatch import dispatch, undispatch
from .experts import Experts
from .routing import RandomPartition, Routing


class MoeMlp(Experts):
    """E experts and a random partition: drops in where timm has an Mlp (EWA, section 3.1).

    In training each expert computes its part of a fresh random partition of all rows of the local batch. In eval mode
    the layer computes the feed-forward network that will be deployed, the mean of the experts (eq. 7).

    Args:
        ffn: the dense network to replace.
        num_experts: E.
        expert_init: see :class:`Experts`.
        share_rate: how far the experts are averaged after each optimizer step, in [0, (E - 1) / E]. The layer only
            holds the number; :class:`timm_moe.ExpertWeightAveraging` carries it out.
        share_schedule: name of the course that the rate takes over training, see ``timm_moe.schedules``.
        eval_mode: ``"average"``, or ``"partition"`` to evaluate the experts on random partitions as in training
            (for analysis: the outputs are random).

    Raises:
        ValueError: on an unknown ``eval_mode``, and as :class:`Experts`.
    """

    EVAL_MODES = ("average", "partition")
    #: Every layer alive in this process, copies included; lets an optimizer be matched to the layers it trains.
    alive: ClassVar["weakref.WeakSet[MoeMlp]"] = weakref.WeakSet()

    def __init__(
        self,
        ffn: nn.Module,
        num_experts: int,
        expert_init: str = "same",
        share_rate: float = 0.3,
        share_schedule: str = "linear",
        eval_mode: str = "average",
    ):
        super().__init__(ffn, num_experts, expert_init)
        if eval_mode not in self.EVAL_MODES:
            raise ValueError(f"eval_mode must be one of {', '.join(self.EVAL_MODES)}, got {eval_mode!r}.")
        self.router = RandomPartition(num_experts)
        self.share_rate = share_rate
        self.share_schedule = share_schedule
        self.eval_mode = eval_mode
        self.alive.add(self)

    def __setstate__(self, state):  # a deep copy or an unpickled layer
        super().__setstate__(state)
        self.alive.add(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map x of shape (..., D) to the same shape."""
        if not self.training and self.eval_mode == "average":
            return self.run_mean(x)
        x_TD = x.reshape(-1, x.shape[-1])
        return self.run_routed(x_TD, self.router(x_TD)).reshape(x.shape)

    def run_routed(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Send each row of ``x_TD`` through the expert that ``routing`` gives it."""
        return undispatch(self.run(dispatch(x_TD, routing.order), routing.sizes), routing.order)
