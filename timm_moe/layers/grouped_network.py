"""A feed-forward network that runs once over the rows of all experts, its linear layers replaced by grouped ones.

Shape suffixes: N rows, D width of the inputs, H of the outputs, E experts.
"""

import copy

import torch
from timm.layers import LayerNorm, LayerScale, RmsNorm
from torch import Tensor, nn

from .grouped import grouped_linear, spread_over_rows


class _Grouped(nn.Module):
    """Base of what takes the place of a module with weights: holds them stacked, and where the run of each expert ends.

    All of these are placeholders, for which the tensors of a call stand in.
    """

    end: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, module: nn.Module, num_experts: int):
        super().__init__()
        for name in ("weight", "bias", *module._parameters):
            parameter = module._parameters.get(name)
            if parameter is None:
                self.register_parameter(name, None)
            else:
                stacked = torch.empty(num_experts, *parameter.shape, device="meta", dtype=parameter.dtype)
                self.register_parameter(name, nn.Parameter(stacked))
        self.register_buffer("end", torch.empty(num_experts, device="meta", dtype=torch.long))


class GroupedLinear(_Grouped):
    """E linear layers."""

    weight: Tensor

    def forward(self, x_ND: Tensor) -> Tensor:
        return grouped_linear(x_ND, self.weight, self.bias, self.end)


class GroupedNorm(_Grouped):
    """E norms over the width, which differ in their weights alone."""

    plain: nn.Module

    def __init__(self, module: nn.Module, num_experts: int):
        super().__init__(module, num_experts)
        plain = copy.copy(module)
        plain._parameters = dict.fromkeys(module._parameters)
        object.__setattr__(self, "plain", plain)  # no submodule: it has nothing that a call replaces

    def forward(self, x_NH: Tensor) -> Tensor:
        y_NH = self.plain(x_NH)
        if self.weight is not None:
            y_NH = y_NH * spread_over_rows(self.weight, self.end, len(x_NH)).to(y_NH.dtype)
        if self.bias is not None:
            y_NH = y_NH + spread_over_rows(self.bias, self.end, len(x_NH)).to(y_NH.dtype)
        return y_NH


class GroupedScale(_Grouped):
    """E scales, a factor for each entry of a row."""

    gamma: Tensor

    def forward(self, x_NH: Tensor) -> Tensor:
        return x_NH * spread_over_rows(self.gamma, self.end, len(x_NH))


#: By the method that a module is called by: that of a subclass may do anything.
_GROUPED: dict[object, type[_Grouped]] = {
    nn.Linear.forward: GroupedLinear,
    nn.LayerNorm.forward: GroupedNorm,
    LayerNorm.forward: GroupedNorm,
    nn.RMSNorm.forward: GroupedNorm,
    RmsNorm.forward: GroupedNorm,
    LayerScale.forward: GroupedScale,
}


def grouped_form(ffn: nn.Module, num_experts: int) -> nn.Module | None:
    """The network with grouped modules in the place of those with weights; None if there is no such form of it.

    Args:
        ffn: on the meta device; what has no weights, such as a dropout, is shared with it.
        num_experts: E.
    """
    try:
        grouped = _replace(ffn, num_experts)
    except KeyError:
        return None
    widths = {module.in_features for module in ffn.modules() if isinstance(module, nn.Linear)}
    return grouped if any(_accepts(grouped, width) for width in widths) else None


def grouped_paths(network: nn.Module) -> list[str]:
    """Where the grouped modules are."""
    return [path for path, module in network.named_modules() if isinstance(module, _Grouped)]


def _replace(module: nn.Module, num_experts: int) -> nn.Module:
    """Raises KeyError for a module with weights that has no grouped form."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise KeyError(module)
    if module._parameters:
        return _GROUPED[type(module).forward](module, num_experts)
    if not module._modules:
        return module
    copied = copy.copy(module)
    copied._modules = {
        name: None if child is None else _replace(child, num_experts) for name, child in module._modules.items()
    }
    return copied


def _accepts(network: nn.Module, width: int) -> bool:
    """Whether it runs on rows of this width: it could ask for more of its linear layers than to be called."""
    try:
        network(torch.empty(2, width, device="meta"))
    except Exception:  # whatever a class of the user's raises
        return False
    return True
