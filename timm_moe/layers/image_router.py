"""The router of whole images (ViMoE). Shape suffixes: T rows, D width, B images, N rows of one."""

from torch import Tensor

from .routing import Routing
from .top_k_router import TopKRouter


class ImageRouter(TopKRouter):
    """Router of whole images, whose class token chooses (ViMoE, arXiv 2410.15732, section 3.1).

    All rows of an image go to the K experts that its class token, the first row, chooses.
    Capacities, groups and losses count images.
    """

    routing_unit = "image"

    def forward(self, x: Tensor) -> Routing:
        """Route the rows of x of shape (B, N, D) by the first row of each image.

        Raises:
            ValueError: if x has another shape, and as :meth:`TopKRouter.forward`.
        """
        if x.ndim != 3:
            raise ValueError(
                "Image-level routing needs tokens of shape (B, N, D), the first the class token, "
                f"got {tuple(x.shape)}."
            )
        return super().forward(x[:, 0]).for_all_rows(x.shape[1])

    def probabilities(self, x: Tensor) -> Tensor:
        """Return for each row of x, (B, N, D), the gates of its image's class token, (T, E)."""
        return super().probabilities(x[:, :1]).repeat_interleave(x.shape[1], 0)
