"""Fast creation of models whose initial values do not matter: random numbers take most of the time."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: Numbers that are drawn for a tensor and then repeated.
_DRAWN = 2**14
_METHODS = (Tensor.uniform_, Tensor.normal_)
#: Methods by which initialisations set values.
_SET_VALUES = (*_METHODS, Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_)
#: Functions of torch.nn.init that torch's own layers call.
_INITS = (nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_)


class quick_init(TorchFunctionMode):
    """Within the block, fill tensors with a few random numbers that repeat, or with zeros; skip those on meta.

    Use it only if every tensor is on meta or loaded afterwards. Random numbers are needed at all
    because some initialisations draw until the values lie in a range.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # There are no values, but clamp_ takes milliseconds.
        if func in _SET_VALUES and args[0].is_meta:
            return args[0]
        if func in _METHODS and args[0].numel() > _DRAWN and args[0].is_contiguous():
            numbers, size = func(args[0].new_empty(_DRAWN), *args[1:], **kwargs), args[0].numel()
            args[0].detach().view(-1).copy_(numbers.repeat(size // _DRAWN + 1)[:size])
            return args[0]
        if func in _INITS:
            with torch.no_grad():
                return (args[0] if args else kwargs["tensor"]).zero_()
        return func(*args, **kwargs)
