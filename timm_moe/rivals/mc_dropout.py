"""MC dropout (pBE, arXiv 2110.03360, table 9): the dropout of experts stays on, and samples of a model are members."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..convert.blocks import moe_layers
from ..layers import MoeMlp, Tile
from ..layers.experts import dropouts


@contextmanager
def sampling(model: nn.Module, name: str, samples: int) -> Iterator[None]:
    """For the time of the block, a forward in eval mode gives M samples of each image in a row, (B M, ...).

    Images are repeated at the input of the first block that has experts with dropout, so that what comes before is
    computed once.

    Args:
        model: in eval mode.
        name: for messages.
        samples: M.

    Raises:
        ValueError: if the model has members already, or no experts with dropout.
    """
    if hasattr(model, "forward_members"):
        raise ValueError(f"{name} has members of its own, which are not sampled by dropout.")
    layers = {path: layer for path, layer in moe_layers(model).items() if _dropouts(layer)}
    if not layers:
        raise ValueError(f"{name} has no experts with dropout: train it with --model-kwargs expert_dropout=0.1.")
    block = model.get_submodule(next(iter(layers)).rpartition(".")[0])
    modules = [module for layer in layers.values() for module in _dropouts(layer)]
    tiling = block.register_forward_pre_hook(Tile(samples))
    try:
        for module in modules:
            module.train()
        yield
    finally:
        tiling.remove()
        for module in modules:
            module.eval()


def sampled_members(samples: int) -> Callable[[nn.Module, str, Tensor], Tensor]:
    """Make M samples of a model its members, for ``members`` of :func:`timm_moe.analysis.evaluation.evaluate`.

    Args:
        samples: M, at least 2.

    Raises:
        ValueError: if they are fewer; the function that is returned as :func:`sampling`.
    """
    if samples < 2:
        raise ValueError(f"mc_dropout must be at least 2 samples, got {samples}.")

    def members(model: nn.Module, name: str, x: Tensor) -> Tensor:
        with sampling(model, name, samples):
            return model(x).unflatten(0, (x.shape[0], samples))

    return members


def _dropouts(layer: MoeMlp) -> list[nn.Dropout]:
    return [module for _, module in dropouts(layer) if module.p]
