"""The hidden units of a feed-forward network: a part of them for each expert, or some of them drawn again.

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

#: Share of an expert's hidden units that Drop-Upcycling draws again: r of arXiv 2502.19261.
DROPPED = 0.5


class HiddenUnits:
    """Cuts a dense network into M networks of a part of its hidden units each, which add up to it (DeepSeekMoE).

    Hidden units lie between linear layers, with only elementwise operations among them. A layer
    into them gives one row of its weight for a unit, or several blocks of rows, as in gated
    networks. The bias of the layer out of them is divided by M. Weights outside of linear layers
    belong to every part.

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
        if abs(self.parts * expert_width - 1) > 0.015:  # 0.33 is a third
            raise ValueError(
                "expert_width must be 1 divided by a whole number, such as 0.5 or 0.25, got "
                f"{expert_width!r}."
            )
        self.size = 0
        # Of weights: dimension of the units, number of blocks.
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
        """Find the layer out of the hidden units: the one with which the parts add up to the network."""
        linear = {
            path: module for path, module in ffn.named_modules() if isinstance(module, nn.Linear)
        }
        for last in reversed(linear):  # usually the last
            self.size, self._outer_bias = linear[last].in_features, f"{last}.bias"
            into = {path: layer for path, layer in linear.items() if path != last}
            blocks = {path: layer.out_features // self.size for path, layer in into.items()}
            self._places = {
                f"{path}.{name}": (0, blocks[path]) for path in into for name in ("weight", "bias")
            }
            self._places[f"{last}.weight"] = (1, 1)
            if into and self._add_up(ffn, next(iter(into.values())).in_features):
                return
        raise ValueError(
            "expert_width below 1 and expert_init='drop' need a network of linear layers with only "
            f"elementwise operations on its hidden units, which this {type(ffn).__name__} is not: "
            "leave both options out."
        )

    @torch.no_grad()
    def _add_up(self, ffn: nn.Module, width: int) -> bool:
        """Run a network of random weights and its parts on a few rows, in eval mode."""
        random = partial(
            torch.randn, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32
        )
        divisors = (
            number
            for number in (self.parts, *range(2, self.size))
            if number > 1 and self.size % number == 0
        )
        parts, network = next(divisors, self.size), copy.deepcopy(ffn).eval()
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
        except Exception:  # a foreign network may raise anything
            return False

    def cut(self, name: str, weight: Tensor, parts: int | None = None) -> Tensor:
        """Cut a dense weight into M parts, (M, ...)."""
        parts = parts or self.parts
        if name not in self._places:
            return (weight / parts if name == self._outer_bias else weight).expand(
                parts, *weight.shape
            )
        dim, blocks = self._places[name]
        return (
            weight.unflatten(dim, (blocks, parts, -1)).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)
        )

    def join(self, name: str, stacked_E: Tensor) -> Tensor:
        """Join a weight of E = K M experts to K dense ones, (K, ...); what belongs to every part is averaged.

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
            return (total_K if name == self._outer_bias else total_K / self.parts).to(
                stacked_E.dtype
            )
        dim, blocks = self._places[name]
        return (
            stacked_KM.unflatten(dim + 2, (blocks, -1))
            .movedim(1, dim + 2)
            .flatten(dim + 1, dim + 3)
        )

    @torch.no_grad()
    def narrow_(self, ffn: nn.Module) -> nn.Module:
        """Make the first part of a dense network, in place."""
        if self.parts > 1:
            for name, parameter in ffn.named_parameters():
                parameter.data = self.cut(name, parameter.detach())[0].clone()
            for linear in (module for module in ffn.modules() if isinstance(module, nn.Linear)):
                linear.out_features, linear.in_features = linear.weight.shape
        return ffn

    def redraw_(self, weights: Mapping[str, Tensor]) -> None:
        """Draw half of an expert's hidden units again, in place (Drop-Upcycling).

        The new weights of a matrix are normal, with mean and standard deviation of the ones that
        they replace.
        """
        units = torch.randperm(self.size, device="cpu")[: math.ceil(DROPPED * self.size)]
        for name, (dim, blocks) in self._places.items():
            if name in weights:
                chosen = units.to(weights[name].device)
                for block in weights[name].unflatten(dim, (blocks, -1)).unbind(dim):
                    old = block.index_select(dim, chosen)
                    block.index_copy_(
                        dim, chosen, old.mean() + old.std(correction=0) * torch.randn_like(old)
                    )
