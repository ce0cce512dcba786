"""Expert Choice (arXiv 2202.09368): each expert chooses rows, instead of each row experts.

Shape suffixes: T rows, D width, E experts, G groups, S rows of a group, C rows that an expert takes
of a group.
"""

import math

import torch
from torch import Tensor, nn

from .checks import check_choice, check_integer, check_number
from .functional import current_mode
from .queues import equal_runs, expert_capacity, images_of_group, largest
from .router import Router, linear_logits, with_noise
from .routing import ChosenRows

GATE_MODES = ("prob", "renorm")


class ExpertChoiceRouter(Router):
    """Router in which each expert takes the C rows of a group with its largest gates (section 3.2).

    Of rows with equal gates the first are taken. All experts have equally many rows, so there is no
    loss. A row goes to none, one or several experts. Gates are the softmax over all experts, in
    float32 at least, under autocast too.

    Args:
        dim: D.
        num_experts: E.
        capacity_factor: mean number of experts of a row: ``C = round(S * capacity_factor / E)``.
        noise_std: in training, normal noise of standard deviation ``noise_std / E`` is added to the
            logits.
        gate_mode: factor of an expert's output. ``"prob"`` is its gate; ``"renorm"`` is its gate
            divided by the sum over the experts that took the row.
        group_images: number of entries of the batch among whose rows an expert chooses; by default
            one, so that the outputs for an image do not depend on others. In eval mode a batch that
            this number does not divide is one group.

    Attributes:
        weight: (E, D) parameter.

    Raises:
        ValueError: on an option outside its range.
    """

    # Rows do not choose, and each image gives each expert equally many rows, so there are no routes
    # of classes.
    depends_on_input = False
    needs_whole_images = True

    def __init__(
        self,
        dim: int,
        num_experts: int,
        capacity_factor: float = 1.0,
        noise_std: float = 1.0,
        gate_mode: str = "prob",
        group_images: int = 1,
    ):
        check_number("capacity_factor", capacity_factor, 0, above=True)
        check_number("noise_std", noise_std, 0)
        check_choice("gate_mode", gate_mode, GATE_MODES)
        check_integer("group_images", group_images, 1)
        super().__init__(num_experts)
        self.capacity_factor = capacity_factor
        self.noise_std = noise_std
        self.gate_mode = gate_mode
        self.group_images = group_images
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as timm's ViT does: normal with standard deviation 0.02, truncated."""
        nn.init.trunc_normal_(self.weight, std=0.02)

    def experts_of_row(self) -> float:
        """Return the mean number of experts that a row goes to."""
        return min(self.num_experts, self.capacity_factor)

    def routing_degree(self) -> int:
        """Return the number of all sets of experts, since any of them may take a row."""
        return 2**self.num_experts

    def forward(self, x: Tensor) -> ChosenRows:
        """Route the rows of x of shape (B, ..., D).

        Raises:
            ValueError: if an expert would take no row, and in training if ``group_images`` does not
                divide B.
        """
        images = images_of_group(x.shape[0], self.group_images, self.training)
        groups = x.shape[0] // images
        size = images * math.prod(x.shape[1:-1])
        capacity = expert_capacity(
            size, self.num_experts, self.capacity_factor, "round", multiple_of=1, most=size
        )
        mode = current_mode()
        logits_GSE = linear_logits(x.reshape(groups, size, x.shape[-1]), self.weight)
        if self.noise_std and self.training:
            logits_GSE = with_noise(logits_GSE, self.noise_std)
        gate_GES = logits_GSE.softmax(2).transpose(1, 2)
        row_GEC = largest(gate_GES.detach(), capacity, mode)
        gate_GEC = gate_GES.gather(2, row_GEC)
        if self.gate_mode == "renorm":
            # A table, since GPUs add to the entries of a vector in any order.
            taken_GES = torch.zeros_like(gate_GES).scatter(2, row_GEC, gate_GEC)
            # An expert takes C rows even if the softmax of some is 0.
            total_G1S = taken_GES.sum(1, keepdim=True).clamp(min=1e-20)
            gate_GEC = (taken_GES / total_G1S).gather(2, row_GEC)

        first_row_G11 = torch.arange(groups, device=x.device).view(-1, 1, 1) * size
        token_N = (first_row_G11 + row_GEC).transpose(0, 1).flatten()
        # The slots of a row stand together in slot_N, from where the row begins in sorted_N.
        sorted_N, slot_N = token_N.sort(stable=True)
        return ChosenRows(
            token_indices=token_N,
            slots=slot_N,
            starts=torch.searchsorted(sorted_N, torch.arange(groups * size, device=x.device)),
            gates=gate_GEC.transpose(0, 1).flatten(),
            rows=groups * size,
            **equal_runs(self.num_experts, groups * capacity, x.device, mode),
        )

    def extra_repr(self) -> str:
        """Return the options that printing the module shows."""
        return f"num_experts={self.num_experts}, capacity_factor={self.capacity_factor}"
