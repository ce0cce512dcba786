"""Objects of a class in this process, which are held weakly, and modules of a class in a model.

This is the one such list of the package. torch gives the hooks of an optimizer step the optimizer
but no model, and a step of a plain loop, which told nobody of its model, must be refused while
router losses wait: so expert layers are here. An averaging is here since optimizers that work by
one another share it, and the optimizers of timm's schedulers are here since timm's
``update_summary`` names none.
"""

import weakref
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_living: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def register(item: object) -> None:
    unregister(item)
    _living[id(item)] = item


def unregister(item: object) -> None:
    _living.pop(id(item), None)


def living(kind: type[T]) -> list[T]:
    """List the objects of a class that are alive, in the order in which they came; other threads may add some."""
    return [item for reference in _living.valuerefs() if isinstance(item := reference(), kind)]


def find(kind: type[ModuleT], model: nn.Module) -> list[ModuleT]:
    """List the modules of a class in a model, in the order of ``model.modules()``.

    This runs several times in a training step. It remembers nothing that a change of the model
    could make wrong, and costs a fifth of ``modules()``: some 0.1 µs a module.
    """
    found: dict[ModuleT, None] = {model: None} if isinstance(model, kind) else {}
    _search(kind, model, found)
    return list(found)


def _search(kind: type[ModuleT], module: nn.Module, found: dict[ModuleT, None]) -> None:
    for child in module._modules.values():
        if child is not None:
            if isinstance(child, kind):
                found[child] = None  # once, though blocks may share it
            if child._modules:
                _search(kind, child, found)
