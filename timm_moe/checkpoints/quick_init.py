"""Fast creation of models whose weights a file replaces at once: random numbers take most of the time."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Numbers that are drawn for a tensor and then repeated.
_DRAWN = 2**14
_METHODS = (Tensor.uniform_, Tensor.normal_)
#: Functions of torch.nn.init that torch's own layers call.
_INITS = (nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_)


class quick_init(TorchFunctionMode):
    """Within the block, fill tensors with a few random numbers that repeat, or with zeros.

    Use it only if every tensor is loaded afterwards. Random numbers are needed at all because some initialisations draw
    until the values lie in a range.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METHODS and args[0].numel() > _DRAWN and args[0].is_contiguous():
            return _repeat(args[0], func(args[0].new_empty(_DRAWN), *args[1:], **kwargs))
        if func in _INITS:
            with torch.no_grad():
                return (args[0] if args else kwargs["tensor"]).zero_()
        return func(*args, **kwargs)


def _repeat(tensor: Tensor, numbers: Tensor) -> Tensor:
    flat = tensor.detach().view(-1)
    whole = flat.shape[0] // _DRAWN * _DRAWN
    flat[:whole].view(-1, _DRAWN).copy_(numbers)
    flat[whole:].copy_(numbers[: flat.shape[0] - whole])
    return tensor
