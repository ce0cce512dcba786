"""Expert parallelism: each process holds some experts of every layer."""

import weakref
from typing import Any

from torch import nn

from ..convert.expert_layers import moe_layers
from ..convert.wrappers import ModelT
from ..layers import EwaMlp, MoeMlp
from ..layers.all_to_all import AllToAllDispatcher, Dispatcher


def parallelize_experts(model: ModelT, mesh: Any) -> ModelT:
    """Spread the experts of each layer over processes, in place.

    Rows go to the process that holds their expert. Routers, capacities and queues stay where the
    rows are, so training is that of one process, but for rounding. In layers of EWA nothing is
    sent: each process trains its own experts on its own images, and the averaging after each step
    adds up their weights.

    Parameters of experts become DTensors, ``Shard(0)`` on the mesh. Shard the rest of the model
    afterwards, by ``fully_shard(model, mesh=mesh,
    ignored_params=set(timm_moe.expert_parameters(model).values()))``, and make the optimizer last.
    Gradients of experts are means over the processes, as all gradients are under FSDP.

    Args:
        model: a model with the same weights in all processes, before ``fully_shard``.
        mesh: one dimension of a ``DeviceMesh``, as ``mesh["ep"]``, whose size divides E.

    Returns:
        The same model.

    Raises:
        ValueError: if the mesh has more dimensions, or a size that does not divide the number of
            experts; if the model has no experts, or was parallelized or sharded before; if its
            experts are adapted (PEFT) or computed (pruned). Nothing is then changed.
    """
    layers = moe_layers(model)
    if not layers:
        raise ValueError(
            f"This {type(model).__name__} has no experts to parallelize: "
            "convert it first, by timm_moe.convert_to_moe."
        )
    _check(layers, mesh)
    for layer in layers.values():
        # An optimizer that was made before would leave the new parameters untrained. Its first step
        # refuses the layer, which remembers the old ones.
        old = [stacked for _, stacked in layer.named_expert_parameters()]
        layer.replaced += tuple(map(weakref.ref, old))
        _spread(layer, mesh)
        if isinstance(layer, EwaMlp):
            layer.dispatcher = Dispatcher(mesh, layer.num_experts)
            layer.router.num_experts = layer.num_experts // mesh.size()
        else:
            layer.dispatcher = AllToAllDispatcher(mesh, layer.num_experts)
    return model


def _check(layers: dict[str, MoeMlp], mesh: Any) -> None:
    """Raise ValueError if the experts of a layer cannot be spread over a mesh."""
    from torch.distributed.tensor import DTensor

    if mesh.ndim != 1:
        raise ValueError(
            f"Experts are spread over one dimension of a mesh, got {mesh.ndim}: give it as "
            "mesh['ep']."
        )
    for name, layer in layers.items():
        if layer.num_experts % mesh.size():
            raise ValueError(
                f"{mesh.size()} processes cannot hold equally many of the {layer.num_experts} "
                f"experts in {name}: take a dimension of the mesh whose size divides "
                f"{layer.num_experts}."
            )
        layer.require_plain("cannot be spread")
        if any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
            raise ValueError(
                f"{name} is sharded or parallelized already: call parallelize_experts once, and "
                "first."
            )


def _spread(layer: MoeMlp, mesh: Any) -> None:
    """Replace the experts of a layer by DTensors that are sharded over a mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, stacked in layer.named_expert_parameters():
        path, _, own = name.rpartition(".")
        part = distribute_tensor(stacked.detach(), mesh, [Shard(0)])
        spread = nn.Parameter(part, stacked.requires_grad)
        layer.get_submodule(path).register_parameter(own, spread)
