"""Feed-forward networks that a block holds as several modules, called one after the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..timm_classes import is_from


def has_tokens_first(block: nn.Module) -> bool:
    """Tell if a block takes its tokens as (N, B, D), as torch's encoder layers do by default."""
    return isinstance(block, nn.TransformerEncoderLayer) and not block.self_attn.batch_first


def has_images_first(model: nn.Module, path: str) -> bool:
    """Tell if the first dimension of a network's input is images, not tokens or parts of images.

    Args:
        model: the model.
        path: name of the network in the model.
    """
    names = path.split(".")
    outer = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
    # In MobileViT (of timm and of transformers) each position in a patch is an entry of the batch,
    # in the inner network of TNT each patch.
    mobile_vits = ("MobileVitBlock", "MobileViTLayer")
    has_parts_first = any(type(module).__name__ in mobile_vits for module in outer)
    is_inner = is_from(outer[-1], "tnt") and names[-1] == "mlp_in"
    return not (has_parts_first or is_inner or has_tokens_first(outer[-1]))


class Function(nn.Module):
    """A function as a module, e.g. the activation of an ``nn.TransformerEncoderLayer``.

    Args:
        function: maps a tensor to a tensor.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's value."""
        return self.function(x)


class SplitFfn(nn.Module):
    """The parts of a block that form its feed-forward network, as one module.

    Experts replace the first part; the other parts become identities.

    Args:
        block: the block that holds the parts.
        names: names of the parts in the order in which the block calls them.
    """

    def __init__(self, block: nn.Module, *names: str):
        super().__init__()
        for name in names:
            part = getattr(block, name)
            self.add_module(name, part if isinstance(part, nn.Module) else Function(part))
        self.training = block.training

    def forward(self, x: Tensor) -> Tensor:
        """Call the parts one after the other with rows (..., D)."""
        for part in self.children():
            x = part(x)
        return x

    def install(self, model: nn.Module, block: nn.Module, layer: nn.Module) -> None:
        """Replace the parts in a block of a model by an expert layer."""
        first, *others = self._modules
        setattr(block, first, layer)
        for name in others:
            setattr(block, name, nn.Identity())

    def restore(self, model: nn.Module, block: nn.Module) -> None:
        """Put the parts back into the block."""
        for name, part in self.named_children():
            if isinstance(part, Function):
                delattr(block, name)
            setattr(block, name, part.function if isinstance(part, Function) else part)


class AddResidual(nn.Module):
    """The addition that replaces the last part of a :class:`ResidualFfn` in its block."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add two tensors (..., D)."""
        return x + residual


class ResidualFfn(SplitFfn):
    """A network whose last part also adds the residual, which the block passes to it.

    YOLOS and VideoMAE of transformers are built so. The addition is not part of the network. If the
    last part then normalises the sum, as in BERT, the block cannot be converted.
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the network on rows (..., D); the residual is zero unless it is given."""
        first, last = self.children()
        return last(first(x), x.new_zeros(()) if residual is None else residual)

    def adds_the_residual(self, x: Tensor) -> bool:
        """Tell whether the last part adds the residual and does nothing else with it."""
        return torch.allclose(self(x, x), self(x) + x, atol=1e-5)

    def install(self, model: nn.Module, block: nn.Module, layer: nn.Module) -> None:
        """Replace the parts by an expert layer and the addition of the residual."""
        super().install(model, block, layer)
        setattr(block, list(self._modules)[-1], AddResidual())


class EncoderLayerFfn(SplitFfn):
    """The network of an ``nn.TransformerEncoderLayer``.

    In eval mode torch's fast path computes such a layer, and the encoder around it, from the
    weights without calling the parts. The fast path is off while experts are installed.

    Args:
        block: the layer.
    """

    def __init__(self, block: nn.TransformerEncoderLayer):
        super().__init__(block, "linear1", "activation", "dropout", "linear2")

    def install(self, model: nn.Module, block: Any, layer: nn.Module) -> None:
        """Replace the parts by an expert layer, and switch torch's fast path off."""
        super().install(model, block, layer)
        block.activation_relu_or_gelu = 0
        for encoder in _encoders_of(model, block):
            vars(encoder).setdefault("use_nested_tensor_when_dense", encoder.use_nested_tensor)
            encoder.use_nested_tensor = False

    def restore(self, model: nn.Module, block: Any) -> None:
        """Put the parts back into the block, and switch torch's fast path on where it was."""
        super().restore(model, block)
        activation = block.activation  # not the block's first one, if the experts got another
        is_relu = activation is F.relu or isinstance(activation, nn.ReLU)
        is_gelu = activation is F.gelu or isinstance(activation, nn.GELU)
        # The numbers are torch's; 0 means that there is no fast path.
        block.activation_relu_or_gelu = 1 if is_relu else 2 if is_gelu else 0
        for encoder in _encoders_of(model, block):
            if all(isinstance(layer.linear1, nn.Linear) for layer in encoder.layers):
                # An encoder that got the layer with its experts has no such note.
                before = vars(encoder).pop(
                    "use_nested_tensor_when_dense", encoder.use_nested_tensor
                )
                encoder.use_nested_tensor = before


def _encoders_of(model: nn.Module, block: nn.Module) -> list[Any]:
    """Return the encoders of a model that hold a block."""
    return [
        part
        for part in model.modules()
        if isinstance(part, nn.TransformerEncoder) and block in part.layers
    ]
