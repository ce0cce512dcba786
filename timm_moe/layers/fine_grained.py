"""The hidden units of a feed-forward network: parts of them for experts, and drawing some again.

Shape suffixes: E experts, M parts, K dense networks that E = K M experts join to.
"""

import copy
import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from .checks import check_number
from .functional import with_tensors
from .probe import probe

#: Share of an expert's hidden units that Drop-Upcycling draws again: r of arXiv 2502.19261.
DROPPED = 0.5


class HiddenUnits:
    """The hidden units of a dense network, by which it is cut into M parts (DeepSeekMoE).

    The parts are networks that add up to the dense one. Hidden units lie between linear layers,
    with only elementwise operations among them. A layer into them gives one row of its weight for a
    unit, or several blocks of rows, as in gated networks. The bias of the layer out of them is
    divided by M. Weights outside of linear layers belong to every part.

    Args:
        ffn: the dense network; its values are not needed.
        expert_width: 1 / M.
        is_needed: find the units even if M is 1.

    Attributes:
        parts: M.
        size: number of hidden units of a part.

    Raises:
        ValueError: if ``expert_width`` is no 1 / M or M does not divide the hidden width, or the
            network has no such units.
    """

    def __init__(self, ffn: nn.Module, expert_width: float = 1, is_needed: bool = False):
        check_number("expert_width", expert_width, 0, above=True)
        self.parts = round(1 / expert_width)
        if abs(self.parts * expert_width - 1) > 0.015:  # Users write a third as 0.33.
            raise ValueError(
                "expert_width must be 1 divided by a whole number, such as 0.5 or 0.25, got "
                f"{expert_width!r}."
            )
        self.size = 0
        # For each weight the dimension of the hidden units in it, and the number of their blocks.
        self._places: dict[str, tuple[int, int]] = {}
        self._outer_bias = ""
        if is_needed or self.parts > 1:
            self._find(ffn)
            if self.size % self.parts:
                raise ValueError(
                    f"expert_width={expert_width!r} cannot divide the hidden width of {self.size} "
                    f"into {self.parts} equal parts: take 1 / M with an M that divides {self.size}."
                )
            self.size //= self.parts

    def _find(self, ffn: nn.Module) -> None:
        """Find the hidden units, which go into the layer that is called last."""
        width, linear = probe(ffn)
        if len(linear) > 1:
            last, out = linear.popitem()
            self.size = out.in_features
            self._outer_bias = f"{last}.bias"
            for path, into in linear.items():
                blocks = into.out_features // self.size
                self._places[f"{path}.weight"] = (0, blocks)
                self._places[f"{path}.bias"] = (0, blocks)
            self._places[f"{last}.weight"] = (1, 1)
            if self._add_up(ffn, width):
                return
        raise ValueError(
            "expert_width below 1 and expert_init='drop' need a network of linear layers with only "
            f"elementwise operations on its hidden units, which this {type(ffn).__name__} is not: "
            "leave both options out."
        )

    @torch.no_grad()
    def _add_up(self, ffn: nn.Module, width: int) -> bool:
        """Tell if the parts of a network with random weights add up to it, on a few rows of D.

        ``width`` is D.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        random = partial(torch.randn, generator=generator, dtype=torch.float32)
        # If M is 1, the smallest other number of parts will do.
        numbers = (self.parts, *range(2, self.size))
        divisors = (number for number in numbers if number > 1 and self.size % number == 0)
        parts = next(divisors, self.size)
        network = copy.deepcopy(ffn).eval()
        try:
            with torch.device("cpu"):
                dense = {
                    name: random(weight.shape) / width**0.5
                    for name, weight in ffn.named_parameters()
                }
                cut = {name: self.cut(name, weight, parts) for name, weight in dense.items()}
                x = random(4, width)
                whole = with_tensors(network, dense, {})(x)
                each = [
                    with_tensors(network, {name: w[m] for name, w in cut.items()}, {})(x)
                    for m in range(parts)
                ]
            return torch.allclose(sum(each), whole, rtol=0, atol=1e-4 * whole.abs().max().item())
        except Exception:  # A foreign network may raise anything.
            return False

    def cut(self, name: str, weight: Tensor, parts: int | None = None) -> Tensor:
        """Cut a dense weight into M parts, (M, ...).

        Args:
            name: name of the weight in the network.
            weight: the weight.
            parts: another number than M.
        """
        parts = parts or self.parts
        if name not in self._places:
            each = weight / parts if name == self._outer_bias else weight
            return each.expand(parts, *weight.shape)
        dim, blocks = self._places[name]
        by_part = weight.unflatten(dim, (blocks, parts, -1)).movedim(dim + 1, 0)
        return by_part.flatten(dim + 1, dim + 2)

    def join(self, name: str, stacked_E: Tensor) -> Tensor:
        """Join a weight of E = K M experts to the weights of K dense networks, (K, ...).

        What belongs to every part is averaged.

        Args:
            name: name of the weight in the network.
            stacked_E: (E, ...) the weights.

        Raises:
            ValueError: if M does not divide E.
        """
        if len(stacked_E) % self.parts:
            raise ValueError(
                f"{len(stacked_E)} experts of 1/{self.parts} of the hidden width do not join to "
                f"dense networks: it takes a num_experts that is a multiple of {self.parts}."
            )
        if self.parts == 1:
            return stacked_E
        stacked_KM = stacked_E.unflatten(0, (-1, self.parts))
        if name not in self._places:
            total_K = stacked_KM.sum(1, dtype=torch.promote_types(stacked_E.dtype, torch.float32))
            if name != self._outer_bias:
                total_K = total_K / self.parts
            return total_K.to(stacked_E.dtype)
        dim, blocks = self._places[name]
        by_block = stacked_KM.unflatten(dim + 2, (blocks, -1)).movedim(1, dim + 2)
        return by_block.flatten(dim + 1, dim + 3)

    @torch.no_grad()
    def narrow_(self, ffn: nn.Module) -> nn.Module:
        """Make a dense network its own first part, in place, and return it."""
        if self.parts > 1:
            for name, parameter in ffn.named_parameters():
                parameter.data = self.cut(name, parameter.detach())[0].clone()
            for linear in (module for module in ffn.modules() if isinstance(module, nn.Linear)):
                linear.out_features, linear.in_features = linear.weight.shape
        return ffn

    def redraw_(self, weights: Mapping[str, Tensor]) -> None:
        """Draw half of an expert's hidden units again, in place (Drop-Upcycling).

        The new weights of a matrix are normal, with the mean and the standard deviation of those
        that they replace.

        Args:
            weights: the expert's weights by their names in the network.
        """
        units = torch.randperm(self.size, device="cpu")[: math.ceil(DROPPED * self.size)]
        for name, (dim, blocks) in self._places.items():
            if name not in weights:
                continue
            chosen = units.to(weights[name].device)
            for block in weights[name].unflatten(dim, (blocks, -1)).unbind(dim):
                old = block.index_select(dim, chosen)
                new = old.mean() + old.std(correction=0) * torch.randn_like(old)
                block.index_copy_(dim, chosen, new)
