"""The cosine router of Swin-MoE (Tutel, arXiv 2206.03382).

Shape suffixes: D width, P width of the projection, E experts, G groups, B images of a group, N rows
of an image.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .functional import no_autocast
from .top_k_router import TopKRouter

#: P.
PROJECTED = 256
#: Largest factor of the cosines.
MOST_SCALE = 100.0
#: First factor of the cosines.
FIRST_SCALE = 2.0


class CosineRouter(TopKRouter):
    """Router of each row to the K experts whose weights are nearest, by angle, to its projection.

    The logit of a row and an expert is the cosine between the row's linear projection to P = 256
    dimensions and the expert's weights, times a learned scale. All else is as for
    :class:`TopKRouter`, which has the same arguments.

    Attributes:
        weight: (E, P) parameter.
        projection: (P, D) parameter.
        projection_bias: (P,) parameter.
        log_scale: (1,) parameter, the logarithm of the scale.
    """

    def __init__(self, dim: int, num_experts: int, top_k: int = 1, **options: Any):
        super().__init__(PROJECTED, num_experts, top_k, **options)
        self.projection = nn.Parameter(torch.empty(PROJECTED, dim))
        self.projection_bias = nn.Parameter(torch.empty(PROJECTED))
        self.log_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw small normal weights, and a projection as in torch's linear layers; set scale 2."""
        super().reset_parameters()
        nn.init.normal_(self.weight, std=0.01)
        if not hasattr(self, "projection"):  # The base's constructor calls this method early.
            return
        bound = self.projection.shape[1] ** -0.5
        for parameter in (self.projection, self.projection_bias):
            nn.init.uniform_(parameter, -bound, bound)
        nn.init.constant_(self.log_scale, math.log(FIRST_SCALE))

    def _logits(self, x_GBND: Tensor) -> Tensor:
        """Compute the logits (G, B, N, E) of rows (G, B, N, D), in float32 at least."""
        dtype = torch.promote_types(x_GBND.dtype, torch.float32)
        with no_autocast(x_GBND):
            x_GBNP = nn.functional.linear(
                x_GBND.to(dtype), self.projection.to(dtype), self.projection_bias.to(dtype)
            )
            scale = self.log_scale.to(dtype).clamp(max=math.log(MOST_SCALE)).exp()
            direction_EP = nn.functional.normalize(self.weight.to(dtype), dim=1) * scale
            # To divide a row's E logits by its norm is cheaper than to divide its P entries.
            norm_GBN1 = torch.linalg.vector_norm(x_GBNP, dim=-1, keepdim=True).clamp(min=1e-12)
            return nn.functional.linear(x_GBNP, direction_EP) / norm_GBN1
