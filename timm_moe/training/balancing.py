"""Steps of the balancing biases by the choices in all processes of a layer.

The biases are :class:`timm_moe.layers.BalancingBias`.
"""

import gc
import logging
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..convert.wrappers import is_sharded
from ..layers import BalancingBias, MoeMlp
from ..layers.living import living
from .optimizers import is_distributed, is_first_time, is_skipped, parameter_ids, trained_layers
from .router_losses import only_recording
from .wrapped_optimizers import Steps

_logger = logging.getLogger(__name__)

#: Name of the class that, beside DDP, trains a model as one over its process_group. Its import
#: would take long.
_FSDP1 = "FullyShardedDataParallel"


def begin_step(optimizer: Optimizer) -> None:
    """Let the step that an optimizer begins move the biases of the layers that it trains."""
    _steps.begin(optimizer)


@torch.compiler.disable
def _end_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Move the biases of layers that an optimizer trains, by the choices since its last step.

    It comes after the step, which may run the forwards itself (Lightning, LBFGS). Of optimizers
    that work by one another it comes after the outermost step: the processes of a
    ZeroRedundancyOptimizer hold different layers in the optimizers within it.
    """
    if not _steps.end(optimizer):
        return
    layers = [
        layer
        for layer in only_recording(trained_layers(parameter_ids(optimizer), living(MoeMlp)))
        if layer.router.balancing_bias is not None and layer.router.balancing_bias.load is not None
    ]
    if not layers or is_skipped(optimizer):
        return
    unknown = [layer for layer in layers if layer.router.balancing_bias.process_groups is None]
    for group, biases in _by_group(layers):
        _move(biases, group)
    alone = [layer for layer in unknown if layer.router.balancing_bias.process_groups == ()]
    if alone and distributed.get_world_size() > 1 and is_first_time(optimizer, "balanced alone"):
        _logger.warning(
            f"The balancing bias of {alone[0].path} counts the choices of this process alone, as "
            "no DistributedDataParallel and no FSDP of all processes holds it. If several of them "
            "train the layer as one, name their groups: router.balancing_bias.process_groups = "
            "(group,); else () says that it is right."
        )


_steps = Steps(_end_step)


def _move(biases: list[BalancingBias], groups: tuple[Any, ...]) -> None:
    """Move biases by their loads, summed over the processes of some groups."""
    loads: list[Any] = [bias.load for bias in biases]
    if groups:
        total = torch.cat([load.to(loads[0].device) for load in loads])
        for group in groups:
            distributed.all_reduce(total, group=group)
        loads = list(total.split([len(load) for load in loads]))
    for bias, load in zip(biases, loads, strict=True):
        bias.update(load.to(bias.steps.device))


def _by_group(layers: list[Any]) -> list[tuple[tuple[Any, ...], list[BalancingBias]]]:
    """Return the biases of the layers that the same processes hold, with these processes' groups.

    There is one group for each dimension of a mesh.
    """
    together: dict[tuple[Any, ...], list[BalancingBias]] = {}
    for layer in layers:
        together.setdefault(_groups_of(layer), []).append(layer.router.balancing_bias)
    return list(together.items())


def _groups_of(layer: Any) -> tuple[Any, ...]:
    """Return the process groups over which a layer is trained as one.

    The user may have named them. Else they are the mesh's (FSDP2), or the group of the
    DistributedDataParallel around the layer. There are none if this process trains it alone.
    """
    bias: BalancingBias = layer.router.balancing_bias
    if bias.process_groups is None and is_distributed():
        bias.process_groups = _mesh_groups(layer) or _wrapper_groups(layer)
    return bias.process_groups or ()


def _mesh_groups(layer: Any) -> tuple[Any, ...]:
    """Return the groups of the mesh over which a layer's router is spread, or else its experts."""
    parameters = (*layer.router.parameters(), *layer.parameters())
    spread: Any = next(filter(is_sharded, parameters), None)
    return () if spread is None else tuple(spread.device_mesh.get_all_groups())


def _wrapper_groups(layer: Any) -> tuple[Any, ...]:
    """Return the process group of the wrapper around a layer, if there is one.

    A layer does not know its wrappers, so this looks at all objects of the process. An FSDP1 of
    some processes alone is left out, since a hybrid one tells one of its two groups.
    """
    for each in gc.get_objects():
        kind = type(each)  # isinstance would make some objects import their libraries
        is_fsdp1 = kind.__name__ == _FSDP1 and _is_of_all(each.process_group)
        is_wrapper = is_fsdp1 or issubclass(kind, DistributedDataParallel)
        if is_wrapper and any(module is layer for module in each.modules()):
            return (each.process_group,)
    return ()


def _is_of_all(group: Any) -> bool:
    """Tell if a group has all processes."""
    return distributed.get_world_size(group) == distributed.get_world_size()
