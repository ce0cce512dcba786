"""What a forward draws at random, so that a repetition which draws anew is noticed.

Gradient checkpointing repeats forwards in backward. If it does not bring back the state of the random generators, the
repetition sends rows to other experts, or adds other noise, and the gradients are those of no function.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from .records import in_backward, is_exporting

#: First entries of the latest draws of this process; few enough to forget those that are never repeated.
_seen: "deque[Tensor]" = deque(maxlen=4096)
#: First entries of a draw that tell it from others.
_ENTRIES = 8
#: Draws that are compared at a time; as a rule the one sought is among the first.
_AT_ONCE = 64


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
    first = values.flatten()[:_ENTRIES].clone()
    if not in_backward():
        _seen.append(first)
    elif not _was_seen(first):
        raise RuntimeError(
            "Gradient checkpointing repeats a forward with other random numbers, so the gradients would be wrong: "
            "give it preserve_rng_state=True; torch.compile with backend='eager' never does, so take another backend."
        )


@torch.library.register_vmap("timm_moe::note")
def _note_of_many(info: Any, in_dims: Any, values: Tensor) -> tuple[None, None]:
    return None, None


def _was_seen(first: Tensor) -> bool:
    def kind(values: Tensor) -> tuple[object, ...]:
        return values.shape, values.dtype, values.device

    alike = [seen for seen in reversed(list(_seen)) if kind(seen) == kind(first)]
    parts = (alike[start : start + _AT_ONCE] for start in range(0, len(alike), _AT_ONCE))
    return any(bool((torch.stack(part) == first).all(1).any()) for part in parts)
