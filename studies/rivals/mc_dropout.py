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
    """Give a model a method ``forward_members``, which samples it M times.

    It maps images (B, channels, H, W) to logits (B, M, C).

    In a ViT images are repeated at the input of the first block that has experts with dropout, so
    earlier blocks run once; in other models at the model's input.

    Raises:
        ValueError: if there are fewer than 2 samples, the model has members of its own, or no
            experts with dropout.
    """
    if samples < 2:
        raise ValueError(f"mc_dropout must be at least 2 samples, got {samples}.")
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


def _sample(model: nn.Module, x: Tensor, samples: int) -> Tensor:
    """Run a model in eval mode M times, but for the dropout of its experts: outputs (B, M, ...)."""
    found = _sampled(model)
    # In a ViT blocks alone follow; elsewhere what leaves a block may meet what did not pass it.
    first_block = ".".join(found[0][0].split(".")[:2])
    block = model.get_submodule(first_block if isinstance(model, VisionTransformer) else "")
    blocks = [module for module in model.modules() if type(module) is type(block)]
    sampled = nn.ModuleList([module for _, module in found])
    with ExitStack() as stack:
        for handle in tile(blocks[blocks.index(block) :], samples):
            stack.enter_context(handle)
        stack.callback(sampled.eval)
        sampled.train()
        return model(x).unflatten(0, (x.shape[0], samples))
