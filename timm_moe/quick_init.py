"""Fast creation of models whose initial values do not matter.

Drawing random numbers takes most of the time of an ordinary creation.
"""

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
    """Within the block, initialise tensors cheaply.

    Tensors are filled with a few random numbers that repeat, or with zeros. Those on the meta
    device are skipped. Use it only if every tensor is on meta or loaded afterwards. Random numbers
    are needed at all because some initialisations draw until the values lie in a range.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # On meta there are no values to set, but clamp_ would take milliseconds.
        if func in _SET_VALUES and args[0].is_meta:
            return args[0]
        if func in _METHODS and args[0].numel() > _DRAWN and args[0].is_contiguous():
            size = args[0].numel()
            numbers = func(args[0].new_empty(_DRAWN), *args[1:], **kwargs)
            args[0].detach().view(-1).copy_(numbers.repeat(size // _DRAWN + 1)[:size])
            return args[0]
        if func in _INITS:
            with torch.no_grad():
                return (args[0] if args else kwargs["tensor"]).zero_()
        return func(*args, **kwargs)
