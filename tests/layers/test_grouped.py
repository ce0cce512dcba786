"""Products of runs of rows with stacked matrices.

Networks run once over the rows of all experts.
"""

import warnings

import pytest
import timm
import torch
import torchvision
from common import FAMILIES, family
from devices import equal_slots
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import GluMlp, LayerScale, Mlp, RmsNorm, SwiGLU
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import timm_moe
from timm_moe.layers import (
    EwaMlp,
    ImageRouter,
    MoeMlp,
    RandomPartition,
    TopKRouter,
    grouped,
    routing_to,
)
from timm_moe.layers.grouped import Runs, grouped_linear, spread_over_rows
from timm_moe.layers.grouped_network import grouped_form

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def slow_linear(x, weight, bias, end):
    """Row by row."""
    y = []
    for row, inputs in enumerate(x):
        expert = sum(row >= e for e in end.tolist())
        if expert == len(end):
            y.append(x.new_zeros(weight.shape[1]))
        else:
            y.append(F.linear(inputs, weight[expert], None if bias is None else bias[expert]))
    return torch.stack(y) if y else x.new_zeros(0, weight.shape[1])


def tensors(sizes, width=3, height=5, dtype=torch.float64, bias=True, after=1):
    rows, experts = sum(sizes) + after, len(sizes)
    x = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(experts, height, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(experts, height, dtype=dtype, requires_grad=True) if bias else None
    return x, weight, bias, torch.tensor(sizes).cumsum(0)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    after=st.integers(0, 2),
    width=st.integers(1, 4),
    height=st.integers(1, 4),
    bias=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    compiled=st.booleans(),
)
def test_values_and_gradients_are_those_of_single_rows(
    sizes, after, width, height, bias, dtype, compiled
):
    x, weight, bias, end = tensors(sizes, width, height, dtype, bias, after)
    inputs = [t for t in (x, weight, bias) if t is not None]
    with pytest.MonkeyPatch.context() as patch:
        if compiled:  # the road alone
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
        y = grouped_linear(x, weight, bias, Runs(end))
        # All take part.
        expected = slow_linear(x, weight, bias, end) + 0 * sum(t.sum() for t in inputs)
        tolerance = dict(rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(y, expected, **tolerance)
        assert (y[sum(sizes) :] == 0).all()
        grad = torch.randn_like(y)
        wanted = torch.autograd.grad(expected, inputs, grad)
        for got, want in zip(torch.autograd.grad(y, inputs, grad), wanted, strict=True):
            torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.first_case
def test_derivatives_of_every_order(bias):
    x, weight, bias, end = tensors([2, 0, 3, 1], bias=bias)
    inputs = [t for t in (x, weight, bias) if t is not None]

    def call(x, weight, bias=None):
        return grouped_linear(x, weight, bias, Runs(end))

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)
    vectors = torch.randn_like(weight[..., 0]).requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda vectors: spread_over_rows(vectors, Runs(end), 7), vectors
    )
    assert torch.autograd.gradgradcheck(
        lambda *a: torch.ops.timm_moe.grouped_linear(*a, None, end), inputs[:2]
    )


def test_forward_mode_is_an_error_and_not_zero():
    x, weight, bias, end = (t.detach() for t in tensors([2, 0, 3, 1]))

    def loss(weight, x):
        return grouped_linear(x, weight, bias, Runs(end)).square().sum()

    def slow(weight, x):
        return slow_linear(x, weight, bias, end).square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(weight, x), torch.func.grad(slow)(weight, x))
    for with_gradients in (True, False):
        with (
            torch.set_grad_enabled(with_gradients),
            pytest.raises(NotImplementedError, match="forward mode AD"),
        ):
            torch.func.jvp(lambda x: loss(weight, x), (x,), (x,))


@pytest.mark.ci
@pytest.mark.parametrize(("sizes", "after"), [([2, 0, 3], 1), ([0, 0], 0), ([1], 0)])
def test_torch_accepts_the_operators(sizes, after):
    x, weight, bias, end = tensors(sizes, after=after)
    for arguments in ((x, weight, bias, end), (x, weight, None, end)):
        torch.library.opcheck(torch.ops.timm_moe.grouped_linear.default, arguments)
    for with_sum in (True, False):
        arguments = (torch.randn(len(x), 5, dtype=x.dtype, requires_grad=True), x, with_sum, end)
        torch.library.opcheck(torch.ops.timm_moe.grouped_outer.default, arguments)


def test_autocast_and_dtypes_as_a_linear_layer():
    x, weight, bias, end = tensors([2, 0, 3], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_linear(x, weight, bias, Runs(end))
        assert y.dtype == F.linear(x, weight[0], bias[0]).dtype == torch.bfloat16
        assert (
            grouped_linear(*(t.double() for t in (x, weight, bias)), Runs(end)).dtype
            == torch.float64
        )
    y.float().sum().backward()
    assert {t.grad.dtype for t in (x, weight, bias)} == {torch.float32}
    with pytest.raises(RuntimeError, match=r"float32 meet experts of torch\.float64"):
        grouped_linear(x, weight.double(), bias, Runs(end))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        grouped_linear(x, weight[..., :2], bias, Runs(end))


@pytest.mark.parametrize("are_equal", [True, False])
def test_no_cast_weights_are_kept_for_backward(are_equal):
    layer, x = EwaMlp(Mlp(8, 12), RandomPartition(4)), torch.randn(2, 6, 8)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with equal_slots(are_equal), torch.autocast("cpu", torch.bfloat16), hooks:
        layer(x).sum().backward()
    kept = [tensor for tensor in saved if tensor.shape in layer.stacked_shapes.values()]
    assert {tensor.data_ptr() for tensor in kept} == {
        layer.fc1.weight.data_ptr(),
        layer.fc2.weight.data_ptr(),
    }
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


@torch.no_grad()
def test_an_evaluation_on_the_cpu_casts_the_experts_that_have_rows(monkeypatch):
    layer = MoeMlp(Mlp(32, 64), ImageRouter(32, 4), "independent").eval()
    image = torch.randn(1, 2, 32)
    sizes, to = [], torch.Tensor.to

    # A dispatch mode does not see what an operator of this package does inside.
    def counting(x, *args, **kwargs):
        sizes.append(x.numel())
        return to(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counting)
    with torch.autocast("cpu", torch.bfloat16):
        layer(image)
    expert = sum(parameter[0].numel() for _, parameter in layer.named_expert_parameters())
    assert expert <= sum(sizes) < 1.5 * expert


@pytest.mark.parametrize(
    ("sizes", "after", "is_full"),
    [
        ([4, 0, 9], 3, False),
        ([4, 0, 9], 0, True),
        ([0, 8], 0, False),
        ([5], 0, False),
        ([5], 0, True),
    ],
)
@pytest.mark.parametrize("with_gradients", [True, False])
def test_what_a_gpu_would_run(sizes, after, is_full, with_gradients):
    """torch.nn.functional.grouped_mm is slow here, but here."""
    x, weight, bias, end = (t.detach() for t in tensors(sizes, 16, 8, torch.bfloat16, after=after))
    with torch.set_grad_enabled(with_gradients):
        runs, by_offsets = Runs(end), grouped.runs_by_offsets(end, len(x), is_full)
    assert (by_offsets.is_after is None) == is_full
    with_bias = grouped_linear(x, weight, bias, runs)
    tolerance = dict(rtol=TOLERANCE[torch.bfloat16], atol=TOLERANCE[torch.bfloat16])
    for arguments in (
        (x, weight, bias),
        (x, weight, None),
        (with_bias, weight.transpose(1, 2), None),
    ):
        torch.testing.assert_close(
            grouped_linear(*arguments, by_offsets), grouped_linear(*arguments, runs), **tolerance
        )
    # A dropped choice gives its slot after the last run a gradient, which is no expert's.
    gradient = torch.randn_like(with_bias)
    for with_sum in (True, False):
        got, expected = (
            grouped._outer(gradient, x, with_sum, *each.tensors()) for each in (by_offsets, runs)
        )
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, **tolerance)
    assert torch.equal(
        spread_over_rows(bias, by_offsets, len(x)), spread_over_rows(bias, runs, len(x))
    )
    got, expected = (
        grouped._outer(gradient, x[:, :0], True, *each.tensors()) for each in (by_offsets, runs)
    )
    torch.testing.assert_close(got, expected, **tolerance)


def test_operators_that_read_nothing_may_be_in_cuda_graphs():
    tags = {name: getattr(torch.ops.timm_moe, name).default.tags for name in OPERATORS}
    assert {name for name, found in tags.items() if torch.Tag.cudagraph_unsafe in found} == set(
        OPERATORS[:2]
    )


OPERATORS = ("grouped_linear", "grouped_outer", "linear_by_offsets", "outer_by_offsets")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        self.scale = LayerScale(8, 0.5)

    def forward(self, x):
        return self.scale(self.layers(x))


class ByWeight(nn.Module):
    """Asks more of a linear layer than to be called."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return x @ self.fc.weight.t()


class Own(nn.Module):
    """A class of a user's: two linear layers, and something done to what they give."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

    def plain(self, x):
        return self.fc2(self.act(self.fc1(x)))

    forward = plain


class Named(Mlp):
    """A subclass that overrides nothing."""


class Narrow(Mlp):
    def __init__(self, dim):
        super().__init__(dim, 3)


class Doubled(Mlp):
    def forward(self, x):
        return 2 * super().forward(x)


class Declared(Own):
    """Says that it only calls its modules."""

    only_calls_modules = True


class RenamedDeclared(Declared):
    """Overrides nothing."""


class OverDeclared(Declared):
    """Does not say so of its own forward."""

    def forward(self, x):
        return torch.cat([self.plain(piece) for piece in x.split(4)])


class OverNorm(Own):
    def forward(self, x):
        y = self.plain(x)
        return y / y.norm(dim=-1, keepdim=True)


class OverWeightNorm(Own):
    def forward(self, x):
        return self.plain(x) / self.fc2.weight.norm()


class OverShape(Own):
    def forward(self, x):
        return self.plain(x) / self.fc2.weight.shape[0]


class ByClass(Own):
    def forward(self, x):
        return self.plain(x) * (2 if isinstance(self.fc1, nn.Linear) else 1)


class BiasAgain(Own):
    def forward(self, x):
        return self.plain(x) + self.fc2.bias


class TwoViews(Own):
    """More rows than came in."""

    def forward(self, x):
        first, second = self.plain(torch.cat([x, -x])).tensor_split(2)
        return first - second


class InPieces(Own):
    def forward(self, x):
        return torch.cat([self.plain(piece) for piece in x.split(4)])


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrized_bias():
    ffn = Own()
    nn.utils.parametrize.register_parametrization(ffn.fc1, "bias", Twice())
    return ffn


def patched():
    ffn = Mlp(8, 12)
    ffn.fc1.forward = lambda x: 2 * F.linear(x, ffn.fc1.weight, ffn.fc1.bias)
    return ffn


def hooked():
    ffn = Mlp(8, 12)
    ffn.fc1.register_forward_hook(lambda module, inputs, output: 2 * output)
    return ffn


class Unit(nn.Module):
    """Makes NaN of zeros, such as a norm makes of rows after the last run."""

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)


NETWORKS = {
    "Mlp": lambda: Mlp(8, 12),
    "Mlp with a norm": lambda: Mlp(8, 12, norm_layer=nn.LayerNorm),
    "Mlp with an RMS norm": lambda: Mlp(8, 12, norm_layer=RmsNorm, bias=False),
    "GluMlp": lambda: GluMlp(8, 24),
    "SwiGLU with a norm": lambda: SwiGLU(8, 12, norm_layer=timm.layers.LayerNorm),
    "torchvision": lambda: torchvision.ops.MLP(8, [12, 8], norm_layer=nn.LayerNorm),
    "another width": lambda: Mlp(8, 12, 6),
    "zeros become others": lambda: nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), nn.Sigmoid()),
    "zeros become NaN": lambda: nn.Sequential(nn.LayerNorm(8), Unit(), nn.Linear(8, 8), Unit()),
    "by another name": lambda: Named(8, 12),
    "by another constructor": lambda: Narrow(8),
    "declared": Declared,
    "declared, by another name": RenamedDeclared,
    "doubled": lambda: Doubled(8, 12),
    "scaled": Scaled,
    "PReLU": lambda: nn.Sequential(nn.Linear(8, 12), nn.PReLU(12), nn.Linear(12, 8)),
    "own": Own,
    "over a declared one": OverDeclared,
    "over its norm": OverNorm,
    "by its weight": ByWeight,
    "over a weight's norm": OverWeightNorm,
    "over a weight's shape": OverShape,
    "by class": ByClass,
    "bias again": BiasAgain,
    "two views": TwoViews,
    "in pieces": InPieces,
    "hooked": hooked,
}
IN_TURN = {"doubled", "scaled", *list(NETWORKS)[list(NETWORKS).index("PReLU") :]}


def layer_of(name, router=None, num_experts=4):
    torch.manual_seed(0)
    router = router or TopKRouter(8, num_experts, 2, capacity_factor=0.8, capacity_multiple=1)
    layer = MoeMlp(NETWORKS[name](), router, "independent")
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def outcome(layer, x):
    x = x.clone().requires_grad_()
    y = layer(x)
    return y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.first_case
def test_a_network_over_all_rows_is_one_for_each_expert(name, dtype):
    layer = layer_of(name).to(dtype)
    assert layer.is_grouped == (name not in IN_TURN)
    x = torch.randn(3, 7, 8, dtype=dtype)
    got = outcome(layer, x)
    object.__setattr__(layer, "_grouped", None)
    for a, b in zip(got, outcome(layer, x), strict=True):
        torch.testing.assert_close(
            a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * b.abs().max().item()
        )


@pytest.mark.parametrize(
    "name", ["SwiGLU with a norm", "scaled", "over its norm", "PReLU", "by its weight"]
)
@pytest.mark.ci
def test_compiled_as_one_graph(name):
    layer, x = layer_of(name), torch.randn(3, 7, 8)
    expected = outcome(layer, x)
    for a, b in zip(
        outcome(torch.compile(layer, fullgraph=True, backend="aot_eager"), x), expected, strict=True
    ):
        torch.testing.assert_close(a, b)


class Silent(Own):
    """Compiled by no other test."""


@pytest.mark.parametrize("make", [Silent, lambda: Named(8, 12)])
@pytest.mark.ci
def test_compiled_experts_that_compute_every_row_say_so_once(make):
    layer = MoeMlp(make(), TopKRouter(8, 4, 2))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            compiled(torch.randn(3, 7, 8))
    said = [
        str(warning.message)
        for warning in caught
        if "every expert computes every row" in str(warning.message)
    ]
    assert len(said) == (make is Silent)


@pytest.mark.parametrize("make", [parametrized_bias, patched])
def test_what_is_done_to_one_module_is_not_lost(make):
    torch.manual_seed(0)
    assert grouped_form(make()) is None


def test_what_becomes_of_no_rows_stays_inside():
    """Zero over its norm is NaN, of values and of gradients."""
    layer, x = layer_of("over its norm"), torch.randn(3, 7, 8)
    layer(x)
    assert layer.router.records[-1].dropped > 0
    assert all(tensor.isfinite().all() for tensor in outcome(layer, x))


def test_an_idle_expert_may_hold_anything_in_a_trace():
    layer, x = layer_of("Mlp", TopKRouter(8, 4)).eval(), torch.randn(1, 6, 8)
    idle = sorted(set(range(4)) - set(layer.router(x).experts().flatten().tolist()))
    assert idle
    with torch.no_grad():
        layer.fc1.weight[idle[0]] = torch.inf
        torch.testing.assert_close(torch.jit.trace(layer, x)(x), layer(x))
        assert layer(x).isfinite().all()


def test_a_network_is_made_of_tensors_without_values():
    with FakeTensorMode():
        layer = EwaMlp(OverNorm(), RandomPartition(2))
    assert not layer.is_grouped


def test_dropout_inside_and_modes_reach_the_grouped_network():
    layer = MoeMlp(Mlp(8, 12, drop=0.5), TopKRouter(8, 4)).train()
    x = torch.randn(2, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    for module in layer.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert torch.equal(layer.train()(x), layer(x))


def test_no_rows_and_one_row():
    for rows in (0, 1):
        for layer in (layer_of("Mlp"), EwaMlp(Mlp(8, 12), RandomPartition(4)), layer_of("PReLU")):
            y = layer(torch.randn(1, rows, 8))
            assert y.shape == (1, rows, 8)
            y.sum().backward()
            assert all(parameter.grad is not None for parameter in layer.parameters())


def test_all_rows_at_one_expert():
    layer = layer_of("Mlp")
    x = torch.randn(2, 5, 8)
    routing = routing_to(torch.full((10, 1), 3), torch.ones(10, 1), 4)
    expert = NETWORKS["Mlp"]()
    expert.load_state_dict({name: stacked[3] for name, stacked in layer.named_expert_parameters()})
    torch.testing.assert_close(layer(x, routing=routing), expert(x))


def step(model, call, images):
    torch.manual_seed(3)
    loss = call(images).square().mean() + timm_moe.auxiliary_loss(model)
    return loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def equal(got, expected, **tolerance):
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.ci
@pytest.mark.parametrize("are_equal", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_training_step_as_one_graph_for_any_batch(name, are_equal):
    model = family(name)
    with equal_slots(are_equal):
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        for images in (torch.randn(4, 3, 32, 32), torch.randn(6, 3, 32, 32)):
            equal(step(model, compiled, images), step(model, model, images), rtol=1e-4, atol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("name", FAMILIES)
def test_an_evaluation_as_one_graph_and_exported_for_any_batch(name, request):
    if name == "Soft MoE" and torch.__version__ < "2.12":
        reason = "torch 2.10 and 2.11 assert a size of their own making"
        request.applymarker(pytest.mark.xfail(raises=Exception, strict=True, reason=reason))
    model = family(name).eval()
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    exported = torch.export.export(
        model, (torch.randn(4, 3, 32, 32),), dynamic_shapes=shapes, strict=False
    ).module()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for images in (torch.randn(4, 3, 32, 32), torch.randn(6, 3, 32, 32)):
            torch.testing.assert_close(exported(images), model(images))
            torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.first_case
def test_no_count_is_read_in_eager_mode(name):
    """Nobody can read a number of a tensor on the meta device."""
    model = family(name).to("meta")
    images = torch.empty(4, 3, 32, 32, device="meta")
    for _ in range(2):
        model(images).sum().backward()
        model.eval()(images)
        model.train()
