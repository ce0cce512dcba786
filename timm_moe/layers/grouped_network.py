"""A feed-forward network that runs once over the rows of all experts, its linear layers replaced by grouped ones.

Shape suffixes: N rows, D width of the inputs, H of the outputs, E experts.
"""

import copy
import math

import torch
from timm.layers import GluMlp, LayerNorm, LayerScale, Mlp, RmsNorm, SwiGLU
from torch import Tensor, nn

from .functional import with_tensors
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


#: Known to call their linear layers and norms and to do nothing else with them, and to end with a linear layer.
_PLAIN = (Mlp, GluMlp, SwiGLU)


def grouped_form(ffn: nn.Module, num_experts: int) -> nn.Module | None:
    """The network with grouped modules in the place of those with weights; None if there is no such form of it.

    There is none of a network that does more with its linear layers than to call them (reads a weight, asks for a
    class), or for which its rows are not those that came in: what any class of the user's computes is compared.

    Args:
        ffn: its weights are not looked at; what has no weights, such as a dropout, is shared with it.
        num_experts: E.
    """
    try:
        if keeps_zeros(ffn) or _computes_the_same(ffn):
            return _replace(ffn, num_experts)
    except KeyError:
        pass
    return None


def keeps_zeros(ffn: nn.Module) -> bool:
    """Whether what a grouped linear layer leaves zero, the rows after the last run, are zero in the end."""
    return type(ffn) in _PLAIN


def grouped_paths(network: nn.Module) -> list[str]:
    """Where the grouped modules are."""
    return [path for path, module in network.named_modules() if isinstance(module, _Grouped)]


def _replace(module: nn.Module, num_experts: int) -> nn.Module:
    """Raises KeyError for a module with weights that has no grouped form."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module) or (module._parameters and module._modules):
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


def _computes_the_same(ffn: nn.Module) -> bool:
    """Whether a grouped form computes what each expert does, tried with arbitrary weights; KeyError if there is none.

    Three experts, of which one has no rows; two rows come after the last run.
    """
    grouped = _replace(ffn, 3)
    shapes = {name: parameter.shape for name, parameter in ffn.named_parameters()}
    weights = {name: _arbitrary(seed, 3, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    end = torch.tensor([3, 3, 5], device="cpu")
    ends = {f"{path}.end": end for path in grouped_paths(grouped)}
    experts = [
        with_tensors(ffn, {name: stacked[expert] for name, stacked in weights.items()}).eval() for expert in range(3)
    ]
    together = with_tensors(grouped, {**weights, **ends}).eval()
    widths = {module.in_features for module in ffn.modules() if isinstance(module, nn.Linear)}
    return any(_agree(together, experts, _arbitrary(width, 7, width)) for width in widths)


@torch.no_grad()
def _agree(together: nn.Module, experts: list[nn.Module], x_ND: Tensor) -> bool:
    try:
        expected = torch.cat([experts[0](x_ND[:3]), experts[2](x_ND[3:5])])
        got = together(x_ND)
        return got.shape == (7, *expected.shape[1:]) and torch.allclose(got[:5], expected, rtol=1e-3, atol=1e-4)
    except Exception:  # whatever a class of the user's raises, or a mode in which tensors have no values
        return False


def _arbitrary(seed: int, *shape: int) -> Tensor:
    """Numbers that repeat after a while, since drawing millions takes time; those of each row and expert differ."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(4099, generator=generator, device="cpu", dtype=torch.float32)
    numbers = math.prod(shape)
    return drawn.repeat(numbers // len(drawn) + 1)[:numbers].view(shape) / math.sqrt(shape[-1])
