"""The routers of an ensemble inside one model (pBE), and of its paper's ablations.

Shape suffixes: D width, E experts, K choices of a row, G groups, B images (entries of the batch) of
a group, N rows of an image, M members of an ensemble.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .checks import check_integer
from .routing import Routing
from .top_k_router import TopKRouter


class TiledRouter(TopKRouter):
    """Base of the routers of a batch that holds each image M times in a row.

    There is one copy for each member of an ensemble.

    Args:
        dim: D.
        num_experts: E.
        top_k: K.
        ensemble_size: M.
        options: as :class:`TopKRouter`; ``group_images`` counts images, each with its M entries.
    """

    needs_whole_images = True

    def __init__(
        self, dim: int, num_experts: int, top_k: int = 1, *, ensemble_size: int, **options: Any
    ):
        check_integer("ensemble_size", ensemble_size, 1)
        super().__init__(dim, num_experts, top_k, **options)
        self.ensemble_size = ensemble_size

    def copies(self) -> int:
        """Return M."""
        return self.ensemble_size

    def routing_degree(self) -> int:
        """Return the number of sets of experts that the copies of a row can go to together."""
        return math.comb(self.part_size, self.top_k) ** self.ensemble_size

    def _groups(self, batch: int) -> int:
        return super()._groups(batch // self.ensemble_size)


class TilingRouter(TiledRouter):
    """Router whose members all choose among all experts (pBE, arXiv 2110.03360, table 3).

    It is the ablation "only tiling". Members differ only by the noise on their logits, so there
    must be noise, and it is added in eval mode too.

    Raises:
        ValueError: if ``noise_std`` is 0; and as :class:`TopKRouter`.
    """

    noisy_in_eval = True

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        if not self.noise_std:
            raise ValueError(
                "The members of ensemble='tiling' differ by noise alone: give a noise_std above 0."
            )


class EnsembleRouter(TiledRouter):
    """Router whose M members have parts of the experts (pBE, arXiv 2110.03360, section 4).

    Member m chooses among experts m E/M to (m + 1) E/M - 1 as a separate router would: the softmax
    is over these experts, the noise has a standard deviation of ``noise_std * M / E``, the capacity
    is for E/M experts and the rows of one member, and losses are means over the members.

    Args:
        dim: D.
        num_experts: E.
        top_k: K, at most E/M.
        ensemble_size: M, which divides E.
        options: as :class:`TiledRouter`, but no ``bias_rate``.

    Raises:
        ValueError: if M does not divide E, or K exceeds E/M, and as :class:`TopKRouter`.
    """

    def __init__(
        self, dim: int, num_experts: int, top_k: int = 1, *, ensemble_size: int, **options: Any
    ):
        super().__init__(dim, num_experts, top_k, ensemble_size=ensemble_size, **options)
        size, rest = divmod(num_experts, ensemble_size)
        if rest:
            raise ValueError(
                f"{num_experts=} cannot be divided among the members of {ensemble_size=}."
            )
        if top_k > size:
            raise ValueError(
                f"{top_k=} exceeds the {size} experts that each of the {ensemble_size} members has "
                f"of {num_experts=}."
            )
        self.part_size = size

    def _by_member(self, x_GBN: Tensor) -> Tensor:
        """Give the members a dimension of their own: (G, B, N, ...) -> (G, B / M, M, N, ...)."""
        return x_GBN.unflatten(1, (x_GBN.shape[1] // self.ensemble_size, self.ensemble_size))

    def _logits(self, x_GBND: Tensor) -> Tensor:
        # All experts' logits are computed and a member's own kept, which costs less than sorting
        # rows by member.
        logits_GBMNME = self._by_member(super()._logits(x_GBND)).unflatten(
            -1, (self.ensemble_size, -1)
        )
        return logits_GBMNME.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3).flatten(1, 2)

    def _experts(self, choice_GBNK: Tensor) -> Tensor:
        first_M = torch.arange(0, self.num_experts, self.part_size, device=choice_GBNK.device)
        return (self._by_member(choice_GBNK) + first_M.view(-1, 1, 1)).flatten(1, 2)

    def _loss_groups(self, x_GBN: Tensor) -> Tensor:
        return self._by_member(x_GBN).transpose(1, 2).flatten(0, 1).flatten(1, 2)


class PartitionedRouter(EnsembleRouter):
    """Router of each row to K experts of each of the M parts (pBE, section 4.2).

    It is the ablation "only partitioning": each image is in the batch once.
    """

    # As for TopKRouter, and not for TiledRouter, since no image is repeated.
    needs_whole_images = TopKRouter.needs_whole_images

    def copies(self) -> int:
        """Return 1, since no image is repeated."""
        return 1

    def probabilities(self, x: Tensor) -> None:
        """Return None, since a row chooses in each part."""

    def experts_of_row(self) -> int:
        """Return K M."""
        return self.top_k * self.ensemble_size

    def forward(self, x: Tensor) -> Routing:
        """Route the rows of x of shape (B, ..., D), as if each image were there M times."""
        members, rows = self.ensemble_size, math.prod(x.shape[1:-1])

        def choices_of_row(per_member: Tensor | None) -> Any:
            if per_member is None:
                return None
            return (
                per_member.reshape(-1, members, rows, self.top_k)
                .transpose(1, 2)
                .reshape(-1, members * self.top_k)
            )

        routing = super().forward(x.repeat_interleave(members, 0))
        copies = routing.token_indices
        return routing._replace(
            token_indices=copies // (members * rows) * rows + copies % rows,
            slots=choices_of_row(routing.slots),
            gates=choices_of_row(routing.gates),
            is_dropped=choices_of_row(routing.is_dropped),
            chosen=choices_of_row(routing.chosen),
        )


class MultiHeadRouter(TopKRouter):
    """Router of each of a row's K copies to one of its choices (pBE, naive multi-head MoE, eq. 2).

    The batch holds each image K times in a row. The k-th copy of a row goes to the row's k-th
    choice. The first copy decides.
    """

    needs_whole_images = True

    def copies(self) -> int:
        """Return K."""
        return self.top_k

    def experts_of_row(self) -> int:
        """Return 1, since each copy takes one of the choices."""
        return 1

    def routing_degree(self) -> int:
        """Return the number of sets of experts that the copies of a row can go to together."""
        return math.comb(self.num_experts, self.top_k)

    def forward(self, x: Tensor) -> Routing:
        """Route the rows of x of shape (B K, ..., D), with the copies of an image in a row."""
        rows = math.prod(x.shape[1:-1])

        def choice_of_copy(per_row: Tensor | None) -> Any:
            if per_row is None:
                return None
            return per_row.reshape(-1, rows, self.top_k).transpose(1, 2).reshape(-1, 1)

        routing = super().forward(x[:: self.top_k])
        slots = choice_of_copy(routing.slots)
        copies = torch.arange(slots.shape[0], device=x.device)
        return routing._replace(
            token_indices=torch.zeros_like(routing.token_indices).scatter_(
                0, slots.flatten(), copies
            ),
            slots=slots,
            gates=choice_of_copy(routing.gates),
            is_dropped=choice_of_copy(routing.is_dropped),
            chosen=choice_of_copy(routing.chosen),
        )
