"""Models whose weights a file replaces at once are created without drawing them, which takes most of the time."""

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: What initialisations of torch's and timm's come down to; ``erfinv_`` is that of a truncated normal one.
_DRAWING = {
    *(Tensor.uniform_, Tensor.normal_, Tensor.erfinv_),
    *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_),
}


class uninitialized(TorchFunctionMode):
    """In the block, tensors that would be filled at random keep what happens to be in their memory.

    Only for models of which every tensor is loaded afterwards.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
