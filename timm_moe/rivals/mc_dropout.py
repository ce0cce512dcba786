"""MC dropout (pBE, arXiv 2110.03360, table 9): samples with the experts' dropout are the members of an ensemble."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from timm.models import VisionTransformer
from torch import Tensor, nn

from ..convert.blocks import moe_layers
from ..layers import tile
from ..layers.experts import dropouts


@contextmanager
def sampling(model: nn.Module, name: str, samples: int) -> Iterator[None]:
    """Make a forward in eval mode return M samples of each image in a row, (B M, ...).

    In a ViT images are repeated at the input of the first block that has experts with dropout, so earlier blocks run
    once; in other models at the model's input. The model is in eval mode, and its name is for messages.

    Raises:
        ValueError: if the model has members of its own, or no experts with dropout.
    """
    if hasattr(model, "forward_members"):
        raise ValueError(f"{name} has members of its own, which are not sampled by dropout.")
    found = [(path, module) for path, layer in moe_layers(model).items() for _, module in dropouts(layer) if module.p]
    if not found:
        raise ValueError(f"{name} has no experts with dropout: train it with --model-kwargs expert_dropout=0.1.")
    # In a ViT blocks alone follow; elsewhere what leaves a block may meet what did not pass it.
    block = model.get_submodule(".".join(found[0][0].split(".")[:2]) if isinstance(model, VisionTransformer) else "")
    sampled = nn.ModuleList([module for _, module in found])
    blocks = [module for module in model.modules() if type(module) is type(block)]
    tiling = tile(blocks[blocks.index(block) :], samples)
    try:
        sampled.train()
        yield
    finally:
        for handle in tiling:
            handle.remove()
        sampled.eval()


def sampled_members(samples: int) -> Callable[[nn.Module, str, Tensor], Tensor]:
    """Make a function for ``members`` of :func:`timm_moe.analysis.evaluation.evaluate` that samples a model.

    The function takes a model, its name and images (B, channels, height, width), and returns outputs (B, M, ...). It
    raises the errors of :func:`sampling`.

    Raises:
        ValueError: if there are fewer than 2 samples.
    """
    if samples < 2:
        raise ValueError(f"mc_dropout must be at least 2 samples, got {samples}.")

    def members(model: nn.Module, name: str, x: Tensor) -> Tensor:
        with sampling(model, name, samples):
            return model(x).unflatten(0, (x.shape[0], samples))

    return members
