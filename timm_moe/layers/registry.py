"""What is alive in this process."""

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """Objects that are alive, in the order in which they came, told apart by identity; held weakly, safe under threads.

    Iteration is over those that are there as it begins: another thread may add some meanwhile. What is held here
    belongs to this process: a copy or a pickle of a registry is an empty one.
    """

    def __init__(self, items: Iterable[T] = ()):
        self._lock = threading.RLock()  # what dies under the lock may enter again
        self._references: tuple[weakref.ref[Any], ...] = ()  # replaced as a whole, so that readers need no lock
        for item in items:
            self.add(item)

    def add(self, item: T) -> None:
        with self._lock:
            if item not in self:
                self._references = (*self._living(), weakref.ref(item))

    def discard(self, item: T) -> None:
        with self._lock:
            self._references = tuple(reference for reference in self._living() if reference() is not item)

    def _living(self) -> list["weakref.ref[Any]"]:
        return [reference for reference in self._references if reference() is not None]

    def __iter__(self) -> Iterator[T]:
        return iter([item for reference in self._references if (item := reference()) is not None])

    def __contains__(self, item: object) -> bool:
        return any(reference() is item for reference in self._references)

    def __bool__(self) -> bool:
        return any(reference() is not None for reference in self._references)

    def __reduce__(self) -> Any:
        return type(self), ()
