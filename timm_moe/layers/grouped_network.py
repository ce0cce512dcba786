"""A feed-forward network that runs once over the rows of all experts.

Its linear layers and norms are replaced by grouped ones. Shape suffixes: N rows, D width of the
inputs, H of the outputs, E experts.
"""

import copy
from typing import Any

from torch import Tensor, nn

from .functional import is_intercepted
from .grouped import Runs, batched_linear, grouped_linear, spread_over_rows

#: Libraries whose networks only call their linear layers and norms. A class of the user's may read
#: the weights of these, or call them on some of the rows, unless it says ``only_calls_modules``.
LIBRARIES = ("torch", "torchvision", "timm", "transformers", "timm_moe")
#: Names of torch's and timm's norms over the width that have a weight and perhaps a bias.
_NORMS = ("LayerNorm", "RMSNorm", "RmsNorm")
#: Names that a subclass may define and still compute as the class that it derives from.
_OWN_NAMES = {
    "__init__",
    "__module__",
    "__doc__",
    "__annotations__",
    "__firstlineno__",
    "__static_attributes__",
}


class _Grouped(nn.Module):
    """Base of modules with places for stacked weights and runs, which a call fills in."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            self.register_parameter(name, None)
        for name in Runs._fields:
            self.register_buffer(name, None)

    def runs(self) -> Runs:
        """Return the rows of each expert in the present call."""
        return Runs(*(self._buffers[name] for name in Runs._fields))  # type: ignore[arg-type]


class GroupedLinear(_Grouped):
    """A linear layer for the rows of all experts."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map runs (N, D) to (N, H), or C rows of each expert, (E, C, D), to (E, C, H)."""
        if x.ndim == 3:
            return batched_linear(x, self.weight, self.bias)
        return grouped_linear(x, self.weight, self.bias, self.runs())


class GroupedNorm(_Grouped):
    """A norm over the width for the rows of all experts.

    Args:
        module: the norm of one network.

    Attributes:
        plain: the norm without weights.
    """

    plain: nn.Module

    def __init__(self, module: nn.Module):
        super().__init__()
        plain = copy.copy(module)
        plain._parameters = dict.fromkeys(module._parameters)
        # It is no submodule, since a call replaces nothing in it.
        object.__setattr__(self, "plain", plain)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows (N, H) or (E, C, H), and apply each expert's weight and bias."""
        y = self.plain(x)
        if self.weight is not None:
            y = y * self._for_rows(self.weight, x).to(y.dtype)
        if self.bias is not None:
            y = y + self._for_rows(self.bias, x).to(y.dtype)
        return y

    def _for_rows(self, stacked_EH: Tensor, x: Tensor) -> Tensor:
        """Return each row's vector of its expert, in a shape that broadcasts to x."""
        return (
            stacked_EH.unsqueeze(1)
            if x.ndim == 3
            else spread_over_rows(stacked_EH, self.runs(), len(x))
        )


def grouped_form(ffn: nn.Module) -> nn.Module | None:
    """Make a network with grouped modules instead of its linear layers and norms.

    It maps each row by itself. Modules without weights, such as dropouts, are shared.

    Returns:
        The new network. It is None if a module is not from a known library and does not say that it
        only calls its submodules, has hooks or other weights, or chooses among its submodules. Such
        a network runs expert by expert.
    """
    try:
        return _replace(ffn)
    except KeyError:
        return None


def _replace(module: nn.Module) -> nn.Module:
    """Make the grouped form of a module.

    Raises:
        KeyError: if there is no such form.
    """
    if is_intercepted(module):
        raise KeyError(module)
    if not module._parameters and not module._modules:
        return module
    if _original(module) is nn.Linear:
        return GroupedLinear()
    if _is_known(module) and _original(module).__name__ in _NORMS:
        return GroupedNorm(module)
    if (
        not _is_known(module)
        or module._parameters
        or isinstance(module, (nn.ModuleList, nn.ModuleDict))
    ):
        raise KeyError(module)
    copied = copy.copy(module)
    copied._modules = {
        name: None if child is None else _replace(child) for name, child in module._modules.items()
    }
    return copied


def _original(module: nn.Module) -> Any:
    """Return the class of a module, without subclasses that only change names or constructors."""
    kind: Any = type(module)
    while len(kind.__bases__) == 1 and not vars(kind).keys() - _OWN_NAMES:
        kind = kind.__bases__[0]
    return kind


def _is_known(module: nn.Module) -> bool:
    """Tell if a module only calls its submodules, as those of known libraries do.

    Another class says so by ``only_calls_modules = True``: its forward calls submodules on all rows
    at once, and computes their outputs row by row. A subclass says it anew.
    """
    original = _original(module)
    if vars(original).get("only_calls_modules", False):
        return True
    # Both are asked, since users patch the forward of classes.
    places = {original.__module__, original.forward.__module__}
    return all(place.partition(".")[0] in LIBRARIES for place in places)
