"""Feed-forward networks that their block holds as several modules, one called after the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Function(nn.Module):
    """A function as a module, as the activation of an ``nn.TransformerEncoderLayer``."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class SplitFfn(nn.Module):
    """The parts of a block that are a feed-forward network together, as one module.

    Experts of it take the place of the first part, and the others pass on what they get.

    Args:
        block: that holds the parts.
        names: of the parts in the block, in the order in which it calls them.
    """

    def __init__(self, block: nn.Module, *names: str):
        super().__init__()
        for name in names:
            part = getattr(block, name)
            self.add_module(name, part if isinstance(part, nn.Module) else Function(part))
        self.training = block.training

    def forward(self, x: Tensor) -> Tensor:
        """Map rows x of shape (..., D) as the block does."""
        for part in self.children():
            x = part(x)
        return x

    def make_room(self, model: nn.Module, block: nn.Module, layer: nn.Module) -> None:
        """Put an expert layer in the place of the parts."""
        first, *others = self._modules
        setattr(block, first, layer)
        for name in others:
            setattr(block, name, nn.Identity())

    def put_back(self, model: nn.Module, block: nn.Module) -> None:
        """Put the parts where they belong."""
        for name, part in self.named_children():
            if isinstance(part, Function):
                delattr(block, name)
            setattr(block, name, part.function if isinstance(part, Function) else part)


class AddResidual(nn.Module):
    """What is left of the last part of a :class:`ResidualFfn` in its block."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual


class ResidualFfn(SplitFfn):
    """One whose last part also adds the residual, which its block hands to it.

    So are the blocks of many models in earlier versions of transformers. What is added afterwards is no part of the
    network: a normalisation of the sum, as in BERT, makes it none.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map rows x of shape (..., D) as the block does, without the residual."""
        *parts, last = self.children()
        for part in parts:
            x = part(x)
        return last(x, x.new_zeros(()))

    def adds_the_residual(self, x: Tensor) -> bool:
        """Whether the last part adds what it is handed, and does nothing else with it; x as in ``forward``."""
        *parts, last = self.children()
        hidden = x
        for part in parts:
            hidden = part(hidden)
        return torch.allclose(last(hidden, x), self(x) + x, atol=1e-5)

    def make_room(self, model: nn.Module, block: nn.Module, layer: nn.Module) -> None:
        super().make_room(model, block, layer)
        setattr(block, list(self._modules)[-1], AddResidual())


class EncoderLayerFfn(SplitFfn):
    """That of an ``nn.TransformerEncoderLayer``.

    In eval mode torch may compute such a layer, and the encoder around it, from the weights of its parts without
    calling them; not as long as experts stand there.
    """

    def __init__(self, block: nn.TransformerEncoderLayer):
        super().__init__(block, "linear1", "activation", "dropout", "linear2")
        self.fused_activation: Any = block.activation_relu_or_gelu  # 0 for none, 1 for ReLU, 2 for GELU

    def make_room(self, model: nn.Module, block: Any, layer: nn.Module) -> None:
        super().make_room(model, block, layer)
        block.activation_relu_or_gelu = 0
        for encoder in _encoders_of(model, block):
            vars(encoder).setdefault("use_nested_tensor_when_dense", encoder.use_nested_tensor)
            encoder.use_nested_tensor = False

    def put_back(self, model: nn.Module, block: Any) -> None:
        super().put_back(model, block)
        block.activation_relu_or_gelu = self.fused_activation
        for encoder in _encoders_of(model, block):
            if all(isinstance(layer.linear1, nn.Linear) for layer in encoder.layers):
                encoder.use_nested_tensor = vars(encoder).pop("use_nested_tensor_when_dense")


def _encoders_of(model: nn.Module, block: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoder) and any(layer is block for layer in module.layers)
    ]
