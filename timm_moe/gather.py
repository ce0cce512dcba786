"""Many feed-forward networks into one."""

from collections.abc import Callable

from torch import nn

from .layers import Experts
from .layers.experts import mean_over_experts


def average(experts: Experts) -> nn.Module:
    """The dense network whose every tensor is the mean of the experts' (EWA, eq. 7)."""
    return experts.to_ffn(
        {name: mean_over_experts(stacked.detach()) for name, stacked in experts.named_expert_parameters()}
    )


GATHERS: dict[str, Callable[[Experts], nn.Module]] = {"average": average}


def get_gather(method: str) -> Callable[[Experts], nn.Module]:
    """The method of that name; ValueError if there is none."""
    if method not in GATHERS:
        raise ValueError(f"method must be one of {', '.join(GATHERS)}, got {method!r}.")
    return GATHERS[method]
