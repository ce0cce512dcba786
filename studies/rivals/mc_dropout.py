"""MC dropout (pBE, arXiv 2110.03360, table 9).

Samples with the experts' dropout are the members of an ensemble.
"""

from contextlib import ExitStack
from types import MethodType
from typing import Any

from timm.models import VisionTransformer
from torch import Tensor, nn

from timm_moe.convert.expert_layers import moe_layers
from timm_moe.layers import tile
from timm_moe.layers.experts import dropouts


def with_samples(model: Any, samples: int) -> Any:
    """Give a ViT a method ``forward_members``, which samples it M times.

    It maps images (B, channels, H, W) to logits (B, M, C).

    Images are repeated at the input of the first block that has experts with dropout, so earlier
    blocks run once.

    Raises:
        ValueError: if there are fewer than 2 samples, the model is no VisionTransformer, has
            members of its own, or no experts with dropout.
    """
    if samples < 2:
        raise ValueError(f"mc_dropout must be at least 2 samples, got {samples}.")
    # In other models what leaves a block may meet what did not pass it.
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"MC dropout samples timm's VisionTransformer, not {type(model).__name__}."
        )
    if hasattr(model, "forward_members"):
        raise ValueError(
            f"This {type(model).__name__} has members of its own, which are not sampled by dropout."
        )
    if not _sampled(model):
        raise ValueError(
            f"This {type(model).__name__} has no experts with dropout: train it with "
            "--model-kwargs expert_dropout=0.1."
        )

    def forward_members(self: nn.Module, x: Tensor) -> Tensor:
        return _sample(self, x, samples)

    model.forward_members = MethodType(forward_members, model)
    return model


def _sampled(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the dropouts inside the experts, with the paths of their layers."""
    layers = moe_layers(model).items()
    return [(path, module) for path, layer in layers for _, module in dropouts(layer) if module.p]


def _sample(model: Any, x: Tensor, samples: int) -> Tensor:
    """Run a ViT in eval mode M times, but for the dropout of its experts: outputs (B, M, ...)."""
    found = _sampled(model)
    first = int(found[0][0].split(".")[1])  # blocks.<number>.mlp
    sampled = nn.ModuleList([module for _, module in found])
    with ExitStack() as stack:
        for handle in tile(model.blocks[first:], samples):
            stack.enter_context(handle)
        stack.callback(sampled.eval)
        sampled.train()
        return model(x).unflatten(0, (x.shape[0], samples))
