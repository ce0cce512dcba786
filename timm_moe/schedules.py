"""Schedules of the share rate over a training run (EWA, section 3.2.2).

A schedule maps progress, the completed fraction of all updates in (0, 1], and ``share_rate`` to the
rate of this step. Progress may be a tensor on a GPU, so no schedule branches on it.
"""

from collections.abc import Callable
from numbers import Real
from typing import Any

Schedule = Callable[[Any, float], Any]


def linear(progress: Any, share_rate: float) -> Any:
    """Rise from 0 to share_rate over the whole run, the paper's default."""
    return share_rate * progress


def constant(progress: Any, share_rate: float) -> Any:
    """Keep share_rate throughout (EWA, figure 2)."""
    return share_rate


def early(progress: Any, share_rate: float) -> Any:
    """Keep share_rate in the first half of the run, then stop averaging (Early EWA, section 6)."""
    return share_rate * (progress < 0.5)


def late(progress: Any, share_rate: float) -> Any:
    """Keep a small rate until 70 % of the run, then share_rate.

    The small rate keeps the experts apart. This schedule is not in the paper.
    """
    return share_rate * (progress >= 0.7) + min(0.002, share_rate) * (progress < 0.7)


SCHEDULES: dict[str, Schedule] = {
    "linear": linear,
    "constant": constant,
    "early": early,
    "late": late,
}


def get_schedule(name: str) -> Schedule:
    """Look up a schedule by name.

    Raises:
        ValueError: if there is none of that name.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(
            f"share_schedule must be one of {', '.join(SCHEDULES)}, got {name!r}; one of your own "
            "is entered first, into timm_moe.schedules.SCHEDULES."
        )
    return SCHEDULES[name]


def check_share_rate(
    share_rate: float, num_experts: int, name: str = "share_rate", parts: int = 1
) -> None:
    """Check that 0 <= share_rate <= (E - 1) / E.

    At (E - 1) / E one step makes all experts equal; beyond it they overshoot their mean.

    Args:
        share_rate: the rate.
        num_experts: E.
        name: name of the option, for the message.
        parts: number of parts of a dense network that the experts are. Experts of several parts
            hold different hidden units, so their rate is 0.

    Raises:
        ValueError: if the rate is out of range.
    """
    limit = (num_experts - 1) / num_experts
    if num_experts == 1 and share_rate != 0:
        raise ValueError(
            f"A single expert has nothing to be averaged with: num_experts=1 needs {name}=0."
        )
    if parts > 1 and share_rate != 0:
        raise ValueError(
            "Experts of different hidden units are not averaged: expert_width below 1 needs "
            f"{name}=0."
        )
    if not isinstance(share_rate, Real) or not 0 <= share_rate <= limit:
        raise ValueError(
            f"{name} must lie between 0 and (E - 1) / E = {limit:.4g} for {num_experts} experts, "
            f"got {share_rate!r}."
        )
