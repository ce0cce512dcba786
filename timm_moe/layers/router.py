"""What the rest of the package asks of a router beside its routing, and the way to write one of your own."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from .dispatch import Routing, assign_all


class Router(nn.Module):
    """Maps rows x of shape (..., D) to a :class:`Routing` over E experts; subclasses write ``forward``.

    Any module that does so can route. What it does not state by being one of these is taken from this class: one
    expert for each row, rows that are routed one by one by what is in them, no capacities.

    Args:
        num_experts: E.

    Attributes:
        routing_unit: what is routed, ``"token"`` or ``"image"``, all rows of an entry of the batch together.
        depends_on_input: whether where a row goes says anything of the image; else there are no routes to be shown.
    """

    routing_unit = "token"
    depends_on_input = True

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts

    def experts_of_row(self) -> int:
        """Number of experts that a row goes to."""
        return 1

    def routing_degree(self) -> int:
        """Number of sets of experts that a row, or an image that is routed as a whole, can go to (ViMoE, 4.2)."""
        return math.comb(self.num_experts, self.experts_of_row())

    def probabilities(self, x: Tensor) -> Tensor | None:
        """(T, ...) how likely each row of x, (B, ..., D), goes to each of the experts among which it chooses, by the
        router's softmax without noise; None of a router that has no such thing."""
        return None

    @contextmanager
    def dropping_nothing(self) -> Iterator[None]:
        """For the time of the block no choice is dropped in eval mode."""
        yield


def routing_to(expert_TK: Tensor, weight_TK: Tensor, num_experts: int) -> Routing:
    """The routing that sends every row to its chosen experts and drops nothing.

    Args:
        expert_TK: (T, K) integers in [0, E), those of a row all different.
        weight_TK: (T, K) factors of the experts' outputs; gradients reach what they were computed from.
        num_experts: E.

    Raises:
        ValueError: if the two are not of one shape (T, K), or the experts no integers.
    """
    if expert_TK.ndim != 2 or expert_TK.shape != weight_TK.shape or expert_TK.is_floating_point():
        raise ValueError(
            "A routing needs integers and their weights of one shape (T, K), got "
            f"{expert_TK.dtype} {tuple(expert_TK.shape)} and {tuple(weight_TK.shape)}."
        )
    return assign_all(expert_TK, weight_TK, num_experts)
