"""Parameters that learn at another rate than the rest, in groups that timm's schedulers heed."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from torch import nn
from torch.optim import Optimizer


def scale_learning_rates(optimizer: Optimizer, parameters: Mapping[nn.Parameter, float]) -> None:
    """Give parameters groups of their own, whose learning rate is a multiple of that of the group that they were in.

    Their key ``lr_scale`` is that of timm's layer decay: timm's schedulers multiply by it.

    Args:
        optimizer: that has taken no step yet.
        parameters: each with its factor.

    Raises:
        ValueError: if the optimizer does not train one of them.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    scales = {id(parameter): scale for parameter, scale in parameters.items()}
    if not scales.keys() <= trained:
        raise ValueError("The optimizer does not train all parameters that are to have a learning rate of their own.")
    for group in list(optimizer.param_groups):
        chosen = [parameter for parameter in group["params"] if id(parameter) in scales]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in scales]
        for scale, members in groupby(sorted(chosen, key=_of(scales)), key=_of(scales)):
            others: dict[str, Any] = {name: value for name, value in group.items() if name != "params"}
            others["lr_scale"] = others.get("lr_scale", 1.0) * scale
            optimizer.add_param_group({**others, "params": list(members)})


def _of(scales: Mapping[int, float]) -> Any:
    return lambda parameter: scales[id(parameter)]
