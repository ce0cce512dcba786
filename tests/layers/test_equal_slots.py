"""Equally many slots for each expert, as on GPUs, and the host's waits for a GPU, without one."""

import contextlib
from types import SimpleNamespace

import pytest
import timm
import torch
from devices import NETWORKS, WIDTH, equal_slots, move_to_fake_gpu, values_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Mlp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from timm_moe.layers import (
    EnsembleRouter,
    EwaMlp,
    ImageRouter,
    MoeMlp,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    TopKRouter,
    grouped,
)
from timm_moe.layers import dispatch as dispatch_module

ROUTED = (TopKRouter, ImageRouter, EnsembleRouter, PartitionedRouter, MultiHeadRouter)


@st.composite
def layers(draw):
    """An expert layer in float64 and a batch for it."""
    kind = draw(st.sampled_from([None, *ROUTED]))
    members, each = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    num_experts, images, rows = members * each, draw(st.integers(0, 4)), draw(st.integers(1, 7))
    torch.manual_seed(draw(st.integers(0, 99)))
    network = NETWORKS[draw(st.sampled_from(sorted(NETWORKS)))]()
    if kind is None:
        return EwaMlp(network, RandomPartition(num_experts), "independent").double(), torch.randn(
            images, rows, WIDTH
        ).double()
    top_k = draw(st.integers(1, each))
    options = {"ensemble_size": members} if issubclass(kind, EnsembleRouter) else {}
    options["capacity_factor"] = draw(st.sampled_from([None, 0.4, 1.0, 1.5]))
    router = kind(
        WIDTH, num_experts, top_k, capacity_multiple=draw(st.sampled_from([1, 4])), **options
    )
    nn.init.normal_(router.weight)
    copies = top_k if kind is MultiHeadRouter else members if kind is EnsembleRouter else 1
    layer = MoeMlp(network, router, "independent").double()
    return layer, torch.randn(images * copies, rows, WIDTH).double()


@settings(max_examples=60, deadline=None)
@given(case=layers())
def test_values_and_gradients_are_those_without_unused_slots(case):
    layer, x = case
    expected = values_and_gradients(layer, x)
    with equal_slots():
        actual = values_and_gradients(layer, x)
    assert {name for name, value in actual.items() if value is None} <= {"router.weight"}
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("kind", ROUTED)
def test_what_any_router_drops_adds_nothing(kind):
    options = {"ensemble_size": 2} if issubclass(kind, EnsembleRouter) else {}
    router = kind(WIDTH, 4, 2, capacity_factor=0.4, capacity_multiple=1, **options)
    nn.init.normal_(router.weight)
    layer = MoeMlp(Mlp(WIDTH, 12), router, "independent").double()
    x = torch.randn(4, 9, WIDTH).double()
    expected = layer(x)
    with equal_slots():
        assert router(x).is_dropped.any()
        torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-12)


def test_groups_have_slots_of_their_own():
    router = TopKRouter(WIDTH, 4, capacity_factor=1.0, capacity_multiple=1, group_images=1)
    nn.init.normal_(router.weight)
    layer = MoeMlp(Mlp(WIDTH, 12), router, "independent").double()
    x = torch.randn(3, 7, WIDTH).double()
    expected = values_and_gradients(layer, x)
    with equal_slots():
        actual = values_and_gradients(layer, x)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 9])
def test_a_partition_is_the_same_and_its_unused_slots_get_no_gradient(rows):
    layer, x = EwaMlp(Mlp(WIDTH, 12), RandomPartition(4), "independent"), torch.randn(rows, WIDTH)
    torch.manual_seed(0)
    expected = layer.router(x)
    with equal_slots():
        torch.manual_seed(0)
        routing = layer.router(x)
        assert torch.equal(routing.experts(), expected.experts())
        assert routing.slots_per_expert == -(-rows // 4)
        x_ND = dispatch_module.dispatch(x.requires_grad_(), routing)
        x_ND.retain_grad()
        dispatch_module.combine(
            layer.run(x_ND, routing.offsets, routing.slots_per_expert), routing
        ).sum().backward()
    is_used_N = torch.zeros(len(x_ND), dtype=torch.bool)
    is_used_N[torch.arange(rows) if routing.slots is None else routing.slots.flatten()] = True
    assert (x_ND.grad[~is_used_N] == 0).all()
    assert is_used_N.sum() == rows


@pytest.mark.ci
@pytest.mark.parametrize("are_equal", [False, True])
def test_inductor_compiles_a_partition(are_equal):
    """Before torch 2.14 it fails on rows that a permutation picks (pytorch #158457)."""
    layer = EwaMlp(Mlp(WIDTH, 12), RandomPartition(4), "independent")
    torch.compiler.reset()
    with equal_slots(are_equal):
        for rows in (8, 9):
            x = torch.randn(rows, WIDTH)
            outcomes = []
            for call in (layer, torch.compile(layer, fullgraph=True, dynamic=False)):
                torch.manual_seed(0)
                layer.zero_grad()
                call(x).square().sum().backward()
                outcomes.append([parameter.grad for parameter in layer.parameters()])
            torch.testing.assert_close(outcomes[1], outcomes[0])


def test_a_partition_is_exported_for_any_batch():
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    layer = EwaMlp(Mlp(WIDTH, 12), RandomPartition(4), "independent")
    exported = torch.export.export(
        layer, (torch.randn(4, 6, WIDTH),), dynamic_shapes=shapes, strict=False
    ).module()
    assert exported(torch.randn(3, 6, WIDTH)).shape == (3, 6, WIDTH)


@pytest.mark.parametrize(("factor", "slots"), [(1.5, 16 * 13), (8.0, 128)])
def test_an_evaluation_does_not_compute_mostly_unused_slots(factor, slots):
    router = TopKRouter(WIDTH, 16, capacity_factor=8.0, eval_capacity_factor=factor)
    nn.init.normal_(router.weight)
    x = torch.randn(128, WIDTH)
    with equal_slots():
        assert len(router(x).token_indices) == 16 * 65  # in training it waits for nothing
        routing = router.eval()(x)
    assert len(routing.token_indices) == slots
    assert torch.equal(routing.experts(), router(x).experts())


@pytest.mark.parametrize("top_k", [1, 2])
def test_not_a_number_stays_with_its_row(top_k):
    """Rows that are dropped share a slot, which reaches none of them."""
    router = TopKRouter(WIDTH, 4, top_k, capacity_factor=0.3, capacity_multiple=1)
    layer, x = MoeMlp(Mlp(WIDTH, 12), router, "independent"), torch.randn(2, 19, WIDTH)
    with equal_slots():
        for row in range(19):
            broken = x.clone()
            broken[1, row] = torch.nan
            y = layer(broken)
            y[1, row] = 0
            assert y.isfinite().all()


def test_a_layer_computes_a_routing_once():
    """Count the kernels of a forward and backward pass, for which a GPU waits.

    The numbers are today's and may fall.
    """
    layers = {
        "EWA": (EwaMlp(Mlp(WIDTH, 12), RandomPartition(4)), 15),
        "top-1": (
            MoeMlp(
                Mlp(WIDTH, 12),
                TopKRouter(WIDTH, 4, 1, capacity_factor=1.0, loss_weights=BALANCE),
            ),
            50,
        ),
        "top-2": (
            MoeMlp(
                Mlp(WIDTH, 12),
                TopKRouter(WIDTH, 4, 2, capacity_factor=1.0, loss_weights=BALANCE),
            ),
            58,
        ),
    }
    for name, (layer, most) in layers.items():
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        with equal_slots(), Kernels() as kernels:
            y = layer(x)
            records = getattr(layer.router, "records", [])
            torch.autograd.backward(
                [y, *(record.weighted_loss for record in records)],
                [x.detach(), *ONE[: len(records)]],
            )
        assert kernels.number <= most, name


BALANCE, ONE = {"balance": 0.01}, [torch.ones(())]
#: Operators that start no kernel.
VIEWS = {
    "alias",
    "as_strided",
    "detach",
    "expand",
    "permute",
    "select",
    "slice",
    "split",
    "squeeze",
    "t",
    "transpose",
    "unsqueeze",
    "view",
    "_unsafe_view",
    "empty",
    "empty_like",
    "new_empty",
    "promote_types",
}


class Kernels(TorchDispatchMode):
    """Counts the operators that start a kernel."""

    number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.number += operator.overloadpacket.__name__ not in VIEWS
        return operator(*args, **(kwargs or {}))


def test_second_derivatives():
    layer, x = (
        EwaMlp(Mlp(WIDTH, 4), RandomPartition(3)).double(),
        torch.randn(7, WIDTH, dtype=torch.float64, requires_grad=True),
    )
    with equal_slots():

        def run(x):
            torch.manual_seed(0)
            return layer(x)

        assert torch.autograd.gradgradcheck(run, x, atol=1e-6)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a GPU.

    It is a value that is read, and a tensor that is copied from or to the GPU.
    """

    number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        is_copy = (
            operator.overloadpacket is torch.ops.aten._to_copy and args[0].is_cuda != result.is_cuda
        )
        self.number += is_copy or operator.overloadpacket is torch.ops.aten._local_scalar_dense
        return result


@contextlib.contextmanager
def cuda_autocast(dtype):
    """torch.autocast, which switches itself off where there is no GPU."""
    if dtype is None:
        yield
        return
    previous = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", previous)


#: Waits of each expert layer in a forward pass of training, and in one of eval mode.
MODELS = {
    "vit_xtiny_ewa_moe": (dict(num_experts=3), 0, 0),
    "swin_tiny_patch2_window4_32_ewa_moe": (
        dict(embed_dim=16, depths=(1, 1), num_heads=(2, 2), num_experts=3),
        0,
        0,
    ),
    "widenet_b": (dict(img_size=32, embed_dim=32, depth=2, num_heads=2), 0, 1),
    "vmoe_s32": (dict(img_size=64, embed_dim=32, depth=4, num_heads=2), 0, 1),
    "vmoe_pbe_s32": (dict(img_size=64, embed_dim=32, depth=4, num_heads=2), 0, 1),
    "vimoe_s14_shared": (dict(img_size=28, embed_dim=32, depth=2, num_heads=2), 1, 1),
    "vit_tiny_moe": (
        dict(img_size=32, embed_dim=32, depth=2, num_heads=2, top_k=2, capacity_factor=4.0),
        1,
        1,
    ),
    "soft_moe_s16": (
        dict(img_size=32, embed_dim=32, depth=2, num_heads=2, num_experts=3, moe_layers="every-2"),
        0,
        0,
    ),
    "vit_tiny_ewa_moe": (
        dict(
            img_size=32,
            embed_dim=32,
            depth=2,
            num_heads=2,
            router="expert_choice",
            capacity_factor=2.0,
        ),
        0,
        0,
    ),
    "ones_b": (dict(img_size=32, embed_dim=32, depth=2, num_heads=2), 0, 1),
}


@pytest.mark.parametrize("amp", [torch.float16, None, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.first_case
def test_waits_of_a_forward_pass(name, amp):
    """One for each layer without capacities, or in evaluation with large ones; none for others."""
    options, training, evaluation = MODELS[name]
    model = timm.create_model(name, num_classes=4, **options)
    size = options.get("img_size", 32)
    calls = []
    for layer in model.modules():
        if isinstance(layer, MoeMlp):  # WideNet's is called once for each block
            layer.register_forward_hook(lambda *_: calls.append(1))
    with FakeTensorMode():
        model, images = move_to_fake_gpu(model), torch.empty(4, 3, size, size, device="cuda")
        for mode, expected in ((True, training), (False, evaluation)):
            model.train(mode)
            with torch.no_grad(), cuda_autocast(amp), Waits() as waits:
                assert model(images).is_cuda
            assert waits.number == expected * len(calls)
            calls.clear()


def test_operators_of_a_gpu_and_their_backward_formulas_read_nothing():
    with FakeTensorMode(), Waits() as waits:
        x, weight = (
            torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((12, 16), (3, 8, 16))
        )
        bias = torch.empty(3, 8, dtype=torch.bfloat16, device="cuda")
        runs = grouped.runs_by_offsets(torch.empty(3, dtype=torch.long, device="cuda"), 12)
        y = grouped._linear_by_offsets(x, weight, bias, *runs)
        product, total = grouped._outer_by_offsets(y, x, True, *runs)
        linear = SimpleNamespace(
            saved_tensors=(x, weight, *runs), needs_input_grad=(True, True, True)
        )
        outer = SimpleNamespace(
            saved_tensors=(y, x, *runs), needs_input_grad=(True, True), with_sum=True
        )
        gradients = [
            *grouped._Linear.backward(linear, y)[:3],
            *grouped._Outer.backward(outer, product, total)[:2],
        ]
    assert [tuple(tensor.shape) for tensor in (y, product, total)] == [(12, 8), (3, 8, 16), (3, 8)]
    assert [tuple(tensor.shape) for tensor in gradients] == [
        (12, 16),
        (3, 8, 16),
        (3, 8),
        (12, 8),
        (12, 16),
    ]
    assert waits.number == 0
