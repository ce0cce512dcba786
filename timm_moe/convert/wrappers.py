"""Models in wrappers, sharded over processes, or copied."""

import copy
from typing import Any, TypeVar

from timm.utils import ModelEmaV2, ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

ModelT = TypeVar("ModelT", bound=nn.Module)
#: Wrappers that hold a model as their ``module``, by class and by the name of a class that would
#: take long to import.
_WRAPPERS = (nn.DataParallel, DistributedDataParallel, AveragedModel, ModelEmaV2, ModelEmaV3)
_WRAPPERS_BY_NAME = ("FullyShardedDataParallel", "DeepSpeedEngine")


def unwrapped(model: Any) -> nn.Module:
    """Return a model without its wrappers: DDP, torch.compile, EMA."""
    if isinstance(model, _WRAPPERS) or type(model).__name__ in _WRAPPERS_BY_NAME:
        return unwrapped(model.module)
    return unwrapped(model._orig_mod) if hasattr(model, "_orig_mod") else model


def refuse_wrapped(model: nn.Module, path: str) -> None:
    """Refuse a network that is wrapped, or is inside a module that is.

    The wrapper would not know of the experts.

    Raises:
        ValueError: if the network is wrapped.
    """
    names = path.split(".")
    around = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
    wrappers = [type(module).__name__ for module in around if unwrapped(module) is not module]
    if any(is_sharded(parameter) for parameter in model.get_submodule(path).parameters()):
        wrappers.append("fully_shard")
    if wrappers:
        raise ValueError(
            f"{path} is wrapped already, by {wrappers[0]}, which would not know of the experts: "
            "convert the model first, then wrap it."
        )


def is_sharded(tensor: Tensor) -> bool:
    """Tell if processes hold parts of a tensor, as a DTensor (FSDP2, expert parallelism)."""
    return hasattr(tensor, "placements")


def copied(model: ModelT, memo: dict[int, Any]) -> ModelT:
    """Copy a module, but not the objects in ``memo``, which maps ids to what is taken instead.

    The copy is without the autocast that Accelerate puts around a model's forward, and its parts
    are not compiled, so that its weights have their own names.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    model = copy.deepcopy(model, memo)
    # torchvision's graphs put themselves in training mode, and what the copy shares. Of a model and
    # its parts, the model comes first.
    for name, module in model.named_modules():
        module.train(modes.get(name, module.training))
    if vars(model).pop("_original_forward", None):
        del model.forward
    for part in list(model.modules()):
        for name, child in list(part._modules.items()):
            if hasattr(child, "_orig_mod"):  # of torch.compile
                setattr(part, name, unwrapped(child))
    return model
