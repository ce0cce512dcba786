"""Switch EMA (arXiv 2402.09240).

A moving average of the weights is copied back into the model at intervals.
"""

from typing import Any

import torch
from torch.optim import Optimizer

from timm_moe.training.optimizers import is_skipped


class SwitchEma:
    """A moving average of an optimizer's parameters, copied back at regular intervals.

    The average is updated after each step. After every ``interval`` steps the model continues from
    it (section 3.2; the paper switches at the end of each epoch). The two are equal then, so a run
    that is resumed there needs no state of the average. It hooks into the optimizer and needs no
    further call. Create it after the weights are loaded: it starts from the optimizer's parameters
    at that time.

    Args:
        optimizer: one of torch's own, such as AdamW; others may keep weights beside the parameters,
            which would undo a switch.
        decay: decay of the average for each step.
        interval: steps between two switches.

    Raises:
        TypeError: if it is another optimizer.
        ValueError: unless 0 <= decay < 1 and interval >= 1.
    """

    def __init__(self, optimizer: Optimizer, decay: float, interval: int):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay!r}.")
        if interval < 1:
            raise ValueError(f"interval must be at least 1, got {interval!r}.")
        self.decay = decay
        self.interval = interval
        self.steps = 0
        if not type(optimizer).__module__.startswith("torch.optim."):
            raise TypeError(
                f"A {type(optimizer).__name__} may keep weights of its own, which would undo a "
                "switch: take an optimizer of torch, such as AdamW."
            )
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        # In float32 or wider: narrower types would round small steps away.
        wide = {
            parameter: torch.promote_types(parameter.dtype, torch.float32)
            for parameter in parameters
        }
        self._averages = {
            parameter: parameter.detach().to(dtype, copy=True) for parameter, dtype in wide.items()
        }
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stop averaging and switching."""
        self._handle.remove()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_skipped(optimizer):
            return
        self.steps += 1
        for parameter, average in self._averages.items():
            average.lerp_(parameter.to(average.dtype), 1 - self.decay)
            if self.steps % self.interval == 0:
                parameter.copy_(average)
