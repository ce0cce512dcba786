"""Base class of routers, with what the package asks beside the routing."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .functional import no_autocast


def linear_logits(x: Tensor, weight_ED: Tensor) -> Tensor:
    """Multiply rows (..., D) by a router's weights, to (..., E).

    It is done in float32 at least, under autocast too.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    with no_autocast(x):
        return nn.functional.linear(x.to(dtype), weight_ED.to(dtype))


def generator_device(device: torch.device) -> torch.device:
    """Return the device that draws random numbers for another.

    For MPS it is the CPU, since gradient checkpointing does not restore the generator of MPS (torch
    2.15).
    """
    return torch.device("cpu") if device.type == "mps" else device


def with_noise(logits: Tensor, noise_std: float) -> Tensor:
    """Add normal noise of standard deviation ``noise_std / E`` to logits (..., E)."""
    noise = torch.randn_like(logits, device=generator_device(logits.device)).to(logits.device)
    return logits + noise * (noise_std / logits.shape[-1])


class Router(nn.Module):
    """Base class of routers, which map rows x, (..., D), to a routing over E experts.

    The routing is a :class:`Routing`, or :class:`ChosenRows` where experts choose rows.

    Subclasses write ``forward``; with parameters also ``reset_parameters``, which draws them anew;
    with K choices of a row also :meth:`experts_of_row`; and :meth:`probabilities` for reports. The
    defaults suit top-1 routing by each row's contents, without capacities.

    Args:
        num_experts: E.

    Attributes:
        routing_unit: ``"token"``, or ``"image"`` if all rows of an entry of the batch are routed
            together.
        depends_on_input: whether each row chooses by its contents; else there are no routes of
            classes.
        needs_whole_images: whether the rows must be whole images, so that no padding can be left
            out.
        number_varies: whether rows go to different numbers of experts, so that
            :meth:`experts_of_row` is the most. Costs that are counted are then the most, too.
    """

    routing_unit = "token"
    depends_on_input = True
    needs_whole_images = False
    number_varies = False

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts

    def experts_of_row(self) -> float:
        """Return the number of experts that a row goes to.

        If it varies, it is the most, or the mean where experts choose rows.
        """
        return 1

    def copies(self) -> int:
        """Return how often the batch holds each image in a row, for the members of an ensemble."""
        return 1

    def routing_degree(self) -> int:
        """Return the number of sets of experts that a routed unit can go to (ViMoE, section 4.2).

        The unit is a row, or an image that is routed as a whole.
        """
        most = int(self.experts_of_row())
        sizes = range(most + 1) if self.number_varies else (most,)
        return sum(math.comb(self.num_experts, size) for size in sizes)

    def probabilities(self, x: Tensor) -> Tensor | None:
        """Return the softmax without noise, (T, ...), for the T rows of x, (B, ..., D).

        It is None for a router without probabilities.
        """
        return None

    @contextmanager
    def dropping_nothing(self) -> Iterator[None]:
        """Within the block, drop no choice in eval mode."""
        yield
