"""timm's train.py with what it has no option for: ``python -m studies.callbacks NAME train.py OPTIONS``.

The script is run as it is; what is added stands in timm's factories of optimizers and schedulers before it starts.
"""

import functools
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm.optim
import timm.scheduler
from timm.layers import Mlp
from torch import nn
from torch.optim import Optimizer

from timm_moe.callbacks.switch_ema import SwitchEma

#: As EWA's models have them: so many experts in every second block.
NUM_EXPERTS, EVERY = 4, 2
SWITCH_EMA_DECAY = 0.998


def switch_ema() -> None:
    """Switch EMA at the end of each epoch."""

    def attach(optimizer: Optimizer, *, updates_per_epoch: int, **_: Any) -> None:
        SwitchEma(optimizer, SWITCH_EMA_DECAY, updates_per_epoch)

    _after(timm.scheduler, "create_scheduler_v2", lambda _, arguments: attach(**arguments))


def lr_over_experts() -> None:
    """The learning rate of the networks that EWA would convert, divided by the number of experts."""
    _after(
        timm.optim, "create_optimizer_v2", lambda optimizer, arguments: _divide(optimizer, arguments["model_or_params"])
    )


def _divide(optimizer: Optimizer, model: nn.Module) -> None:
    networks = [module for module in model.modules() if isinstance(module, Mlp)][EVERY - 1 :: EVERY]
    slowed = {id(parameter) for network in networks for parameter in network.parameters()}
    for group in list(optimizer.param_groups):
        chosen = [parameter for parameter in group["params"] if id(parameter) in slowed]
        if chosen:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in slowed]
            others = {name: value for name, value in group.items() if name != "params"}
            optimizer.add_param_group({**others, "params": chosen, "lr_scale": 1 / NUM_EXPERTS})


def _after(module: Any, name: str, see: Callable[[Any, dict[str, Any]], object]) -> None:
    """Let a factory of timm's show what it made, and the arguments that it was given."""
    make = getattr(module, name)
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_and_show(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        see(made, signature.bind(*args, **kwargs).arguments)
        return made

    setattr(module, name, make_and_show)


CALLBACKS = {"switch_ema": switch_ema, "lr_over_experts": lr_over_experts}


def main(name: str, script: str, *options: str) -> None:
    """Run a script of timm's with a callback."""
    CALLBACKS[name]()
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
