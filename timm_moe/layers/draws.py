"""What a forward draws at random, so that a repetition which draws anew is noticed.

Gradient checkpointing repeats forwards in backward. If it does not bring back the state of the random generators, the
repetition sends rows to other experts, or adds other noise, and the gradients are those of no function.
"""

from typing import Any

import torch
from torch import Tensor

from .records import in_backward, is_exporting

#: Draws of one kind that are remembered; few enough to forget those that are never repeated.
_LATEST = 4096
#: First entries of a draw that tell it from others.
_ENTRIES = 8


class _Draws:
    """First entries of the latest draws of this process, all of the shape, type and device of the first."""

    def __init__(self, first: Tensor):
        with torch.inference_mode(False):
            self._entries = first.new_empty(_LATEST, *first.shape)
        self._number = 0

    def add(self, first: Tensor) -> None:
        self._entries[self._number % _LATEST] = first
        self._number += 1

    def __contains__(self, first: Tensor) -> bool:
        return bool((self._entries[: self._number] == first).all(1).any())


_seen: dict[tuple[Any, ...], _Draws] = {}


def drawn(values: Tensor) -> Tensor:
    """The values, just drawn at random; no part of the model may use them before.

    Raises:
        RuntimeError: in backward, if no forward has drawn them.
    """
    if torch.compiler.is_compiling():
        return values if is_exporting() else torch.ops.timm_moe.drawn(values)
    if not torch.jit.is_tracing():
        torch.ops.timm_moe.note(values)
    return values


# Compilers that take operators apart find nothing in the first; those that run what was captured as it is run it too.
# The second is one operator, since selective checkpointing looks at each and wants to see the same ones again.
torch.library.define("timm_moe::drawn", "(Tensor(a) values) -> Tensor(a)")
torch.library.define("timm_moe::note", "(Tensor values) -> ()")


@torch.library.impl("timm_moe::drawn", "CompositeImplicitAutograd")
def _drawn(values: Tensor) -> Tensor:
    if type(values) is Tensor:  # and not one without values, while a compiler traces
        torch.ops.timm_moe.note(values)
    return values.view_as(values)


@torch.library.impl("timm_moe::note", "CompositeExplicitAutograd")
def _note(values: Tensor) -> None:
    if type(values) is not Tensor or values.is_meta:
        return
    first = values.flatten()[:_ENTRIES]
    kind = (first.shape, first.dtype, first.device)
    if kind not in _seen:
        _seen[kind] = _Draws(first)
    if not in_backward():
        _seen[kind].add(first)
    elif first not in _seen[kind]:
        raise RuntimeError(
            "Gradient checkpointing repeats a forward with other random numbers, so the gradients would be wrong: "
            "give it preserve_rng_state=True; torch.compile with backend='eager' never does, so take another backend."
        )


@torch.library.register_vmap("timm_moe::note")
def _note_of_many(info: Any, in_dims: Any, values: Tensor) -> tuple[None, None]:
    return None, None
