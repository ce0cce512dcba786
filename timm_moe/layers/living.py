"""Objects of this process that must be found without a reference to them, held weakly.

This is the one such list of the package. torch gives the hooks of an optimizer step the optimizer but no model, and a
step of a plain loop, which told nobody of its model, must be refused while router losses wait: so expert layers are
here. An averaging is here since optimizers that work by one another share it, and the optimizers of timm's schedulers
are here since timm's ``update_summary`` names none.
"""

import weakref
from typing import Any, TypeVar

T = TypeVar("T")

_living: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def register(item: object) -> None:
    unregister(item)
    _living[id(item)] = item


def unregister(item: object) -> None:
    _living.pop(id(item), None)


def living(kind: type[T]) -> list[T]:
    """List the objects of a class that are alive, in the order in which they came; other threads may add some."""
    return [item for reference in _living.valuerefs() if isinstance(item := reference(), kind)]
