"""Learning rates of their own for some parameters, in groups that timm's schedulers respect."""

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer


def scale_learning_rates(optimizer: Optimizer, parameters: Mapping[nn.Parameter, float]) -> None:
    """Multiply the learning rate of some parameters, which move to groups of their own.

    The key ``lr_scale`` of these groups is the one of timm's layer decay, which timm's schedulers multiply by. The
    optimizer must not have taken a step yet.

    Raises:
        ValueError: if the optimizer does not train one of them.
    """
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not parameters.keys() <= trained:
        raise ValueError("The optimizer does not train all parameters that are to have a learning rate of their own.")
    for group in list(optimizer.param_groups):
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_scale.setdefault(parameters.get(parameter, 1.0), []).append(parameter)
        group["params"] = by_scale.pop(1.0, [])
        for scale, members in sorted(by_scale.items()):
            own = {**group, "lr_scale": group.get("lr_scale", 1.0) * scale, "params": members}
            optimizer.add_param_group(own)
