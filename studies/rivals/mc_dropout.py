"""MC dropout (pBE, arXiv 2110.03360, table 9): samples with the experts' dropout are the members of an ensemble."""

from collections.abc import Callable
from contextlib import ExitStack

from timm.models import VisionTransformer
from torch import Tensor, nn

from timm_moe.convert.blocks import moe_layers
from timm_moe.layers import tile
from timm_moe.layers.experts import dropouts


def sampled_members(samples: int) -> Callable[[nn.Module, str, Tensor], Tensor]:
    """Make a function for ``members`` of :func:`timm_moe.analysis.evaluation.evaluate` that samples a model M times.

    It takes a model in eval mode, its name for messages and images (B, channels, height, width), and returns outputs
    (B, M, ...). In a ViT images are repeated at the input of the first block that has experts with dropout, so earlier
    blocks run once; in other models at the model's input. It raises ValueError if the model has members of its own, or
    no experts with dropout.

    Raises:
        ValueError: if there are fewer than 2 samples.
    """
    if samples < 2:
        raise ValueError(f"mc_dropout must be at least 2 samples, got {samples}.")

    def members(model: nn.Module, name: str, x: Tensor) -> Tensor:
        if hasattr(model, "forward_members"):
            raise ValueError(f"{name} has members of its own, which are not sampled by dropout.")
        layers = moe_layers(model).items()
        found = [(path, module) for path, layer in layers for _, module in dropouts(layer) if module.p]
        if not found:
            raise ValueError(f"{name} has no experts with dropout: train it with --model-kwargs expert_dropout=0.1.")
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

    return members
