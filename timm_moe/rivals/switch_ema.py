"""Switch EMA: the moving average of the weights goes back into the model, again and again (arXiv 2402.09240)."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..training.averaging import with_hooks


class SwitchEma:
    """A moving average of what an optimizer trains, copied back into the model at regular intervals.

    The average follows each step, and after every ``interval`` steps the model goes on from it (section 3.2; the paper
    switches at the end of each epoch). Then the two are equal, so a run that is resumed there needs no state of this.
    It hooks itself into the optimizer: once made, it needs no further call. Make it after weights are loaded: it begins
    with those that are there, and follows the parameters that the optimizer has then. A rival of EWA, which averages
    experts.

    Args:
        optimizer: any of torch's or timm's; of one that works by another (Lookahead) the outer one.
        decay: of the average, for each step.
        interval: steps between two switches.

    Raises:
        TypeError: if the optimizer is none of torch's kind.
        ValueError: unless 0 <= decay < 1 and interval >= 1, or if the optimizer's steps cannot be followed.
    """

    def __init__(self, optimizer: Optimizer, decay: float, interval: int):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay!r}.")
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval!r}.")
        self.decay = decay
        self.interval = interval
        self.steps = 0
        optimizer = with_hooks(optimizer)
        self._averages = {parameter: _wide(parameter) for parameter in _parameters(optimizer)}
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stop."""
        self._handle.remove()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for parameter, average in self._averages.items():
            average.lerp_(parameter.to(average.dtype), 1 - self.decay)
            if self.steps % self.interval == 0:
                parameter.copy_(average)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _wide(parameter: Tensor) -> Tensor:
    """A copy in float32 at least: in narrower types small steps would be rounded away."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
