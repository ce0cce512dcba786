"""Routers and dispatch against a slow, obvious implementation, and their limits."""

import copy
import pickle

import pytest
import timm
import torch
from common import SMALL_VIT, TINY, drawn_choices
from devices import equal_slots
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import GluMlp, Mlp, SwiGLU
from torch import nn

import timm_moe
from timm_moe.layers import (
    EnsembleRouter,
    EwaMlp,
    ExpertChoiceRouter,
    ImageRouter,
    MoeMlp,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    TilingRouter,
    TopKRouter,
    routing_to,
)
from timm_moe.layers.dispatch import combine
from timm_moe.layers.functional import Mode
from timm_moe.layers.queues import assign, expert_capacity, partition, queue
from timm_moe.layers.router import generator_device
from timm_moe.layers.top_k_router import LOSSES


def routed(width=5, hidden=6, num_experts=4, expert_init="independent", **options):
    router = TopKRouter(width, num_experts, **options)
    return MoeMlp(Mlp(width, hidden), router, expert_init)


def slow_forward(layer, x, priority, capacity):
    """What the layer computes, one choice after the other; also which choices were kept."""
    gates = (x @ layer.router.weight.T).softmax(1)
    ranked = [
        sorted(range(len(row)), key=lambda e, row=row: (-row[e], e)) for row in gates.tolist()
    ]
    rows = list(range(len(x)))
    if priority:
        rows.sort(key=lambda row: -gates[row].max().item())
    taken, kept, y = [0] * layer.num_experts, set(), torch.zeros_like(x)
    ffns = [
        layer.to_ffn(
            {name: stacked[expert].detach() for name, stacked in layer.named_expert_parameters()}
        )
        for expert in range(layer.num_experts)
    ]
    for choice in range(layer.router.top_k):
        for row in rows:
            expert = ranked[row][choice]
            if taken[expert] < capacity:
                y[row] += gates[row, expert] * ffns[expert](x[row])
                kept.add((row, choice))
            taken[expert] += 1
    return y, kept


@st.composite
def routings(draw):
    num_experts = draw(st.integers(1, 40))
    return dict(
        tokens=draw(st.integers(1, 100)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        factor=draw(st.floats(0.1, 10)),
        multiple=draw(st.sampled_from([1, 4])),
        priority=draw(st.booleans()),
    )


def test_the_host_draws_for_a_generator_that_checkpointing_does_not_restore():
    assert generator_device(torch.device("mps")) == torch.device("cpu")
    assert generator_device(torch.device("cuda", 1)) == torch.device("cuda", 1)


@pytest.mark.parametrize("road", ["eager", "compiled"])
@settings(max_examples=25)
@given(case=routings())
@pytest.mark.first_case
def test_layer_equals_the_slow_reference(road, case):
    torch.manual_seed(0)
    layer = routed(
        num_experts=case["num_experts"],
        top_k=case["top_k"],
        capacity_factor=case["factor"],
        capacity_multiple=case["multiple"],
        batch_priority=case["priority"],
    ).double()
    layer.router.weight.data.normal_()
    x = torch.randn(1, case["tokens"], 5, dtype=torch.float64)
    capacity = expert_capacity(
        case["tokens"] * case["top_k"],
        case["num_experts"],
        case["factor"],
        multiple_of=case["multiple"],
    )
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        expected, kept = slow_forward(layer, x[0], case["priority"], capacity)
        if road == "compiled":  # the road alone: compiling each case would take too long
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
        y = layer(x)
        torch.testing.assert_close(y[0], expected, rtol=1e-9, atol=1e-9)
        nothing_kept = [
            row
            for row in range(case["tokens"])
            if not any((row, k) in kept for k in range(case["top_k"]))
        ]
        assert (y[0, nothing_kept] == 0).all()


@pytest.mark.ci  # tests/layers/test_grouped.py compiles a routed model
@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (50, {"top_k": 2, "capacity_factor": 1.05}),
        (50, {"top_k": 1}),
        (
            3,
            dict(
                num_experts=8,
                top_k=3,
                batch_priority=True,
                capacity_factor=0.5,
                capacity_multiple=1,
            ),
        ),
        (1, {"top_k": 4}),
        (
            8,
            dict(
                top_k=2,
                group_images=1,
                capacity_factor=1.0,
                noise_std=1.0,
                loss_weights={"load": 1.0},
            ),
        ),
    ],
)
def test_compiled_as_one_graph_gives_the_same_values_and_gradients(tokens, options):
    layer = routed(8, 16, **{"loss_weights": {"balance": 1.0}, **options})
    x = torch.randn(2, tokens, 8, requires_grad=True)
    outcomes = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(1)
        layer.router.forget()
        y = call(x)
        loss = y.square().sum() + layer.router.records[0].weighted_loss
        outcomes.append((y, *torch.autograd.grad(loss, [x, *layer.parameters()])))
    for eager, compiled in zip(*outcomes, strict=True):
        torch.testing.assert_close(eager, compiled)


@pytest.mark.parametrize("options", [{}, {"noise_std": 0, "aux_loss": "importance+balance"}])
@pytest.mark.ci
def test_inductor_compiles_a_model_as_one_graph_forward_and_backward(options):
    model = timm.create_model("vmoe_s32", **TINY, **options)
    images = torch.randn(4, 3, 16, 16)
    outcomes = []
    for call in (model, torch.compile(model, fullgraph=True)):
        loss = call(images).square().mean() + timm_moe.auxiliary_loss(model)
        outcomes.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for eager, compiled in zip(*outcomes, strict=True):
        assert compiled.isfinite().all()
        if options:  # inductor draws other noise from the same seed
            torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    model.eval()
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True)(images), model(images), rtol=1e-4, atol=1e-5
    )


@settings(max_examples=25)
@given(tokens=st.integers(1, 40), num_experts=st.integers(1, 9))
def test_all_of_equal_experts_without_dropping_compute_the_dense_network(tokens, num_experts):
    dense = Mlp(8, 16)
    layer = MoeMlp(dense, TopKRouter(8, num_experts, top_k=num_experts))
    x = torch.randn(tokens, 8)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-5)


def test_every_expert_and_the_router_have_a_gradient_even_without_rows():
    layer = routed(num_experts=6)
    layer(torch.randn(1, 1, 5)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
    assert layer.fc1.weight.grad.abs().sum((1, 2)).count_nonzero() == 1


@pytest.mark.parametrize(
    "options",
    [
        dict(top_k=3, gate_mode="one"),
        dict(top_k=3, gate_mode="one", score="sigmoid"),
        dict(top_k=3, gate_mode="one", score="sigmoid", bias_rate=0.1),
        dict(top_k=1, gate_mode="renorm"),
    ],
)
def test_a_router_that_nothing_trains_has_a_gradient_of_zero(options):
    """DistributedDataParallel refuses the second step of a model with a parameter that has none."""
    layer = routed(num_experts=3, **options)
    layer(torch.randn(2, 4, 5)).sum().backward()
    torch.testing.assert_close(
        layer.router.weight.grad, torch.zeros_like(layer.router.weight), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("dim", "experts", "top_k", "share"), [(768, 32, 2, 0.16), (384, 4, 1, 0.36)]
)
def test_the_gates_of_a_new_router_sum_to(dim, experts, top_k, share):
    """Gates of a new router for rows after a LayerNorm are those of docs/vmoe.md."""
    sums = []
    for _ in range(20):
        gates = TopKRouter(dim, experts, top_k)(
            nn.functional.layer_norm(torch.randn(1, 512, dim), (dim,))
        ).gates
        sums.append(gates.view(512, top_k).sum(1).mean())
    assert torch.stack(sums).mean().item() == pytest.approx(share, abs=0.01)


def test_a_layer_computes_where_its_rows_are():
    """The default device may be another one."""
    layer, x = routed(top_k=2), torch.randn(2, 7, 5)
    gradients = []
    for default in ("cpu", "meta"):
        rows = x.clone().requires_grad_()
        with torch.device(default):
            layer(rows).square().sum().backward()
        gradients.append(rows.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("layer_class", ["routed", "ewa"])
@pytest.mark.first_case
def test_second_derivatives_and_no_forward_mode(layer_class):
    layer = (
        routed(top_k=2, capacity_factor=0.5)
        if layer_class == "routed"
        else EwaMlp(Mlp(5, 6), RandomPartition(4))
    ).double()
    x, v = torch.randn(2, 7, 5, dtype=torch.float64), torch.randn(2, 7, 5, dtype=torch.float64)

    def call(x):
        torch.manual_seed(3)
        return layer(x)

    for with_gradients in (True, False):
        with (
            torch.set_grad_enabled(with_gradients),
            pytest.raises(NotImplementedError, match="forward"),
        ):
            torch.func.jvp(call, (x,), (v,))
    assert torch.autograd.gradgradcheck(call, (x[:1].clone().requires_grad_(),), atol=1e-4)


def test_eval_has_its_own_capacity_and_no_noise():
    layer = routed(capacity_factor=0.1, eval_capacity_factor=None, noise_std=5.0)
    x = torch.randn(3, 20, 5)
    assert (layer(x) == 0).all(2).sum() > 20
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert not (layer(x) == 0).all(2).any()
    layer.router.eval_capacity_factor = 0.1
    assert (layer(x) == 0).all(2).sum() > 20
    assert len(layer.router.records) == 1  # of training only


def test_groups_have_their_own_queues():
    layer = routed(capacity_factor=1.0, group_images=2)
    x = torch.randn(6, 7, 5)
    torch.testing.assert_close(
        layer(x), torch.cat([layer(part) for part in x.split(2)]), rtol=1e-5, atol=1e-6
    )


def test_choices_are_counted_over_all_groups_and_dropped_in_each():
    layer = routed(4, capacity_factor=1.0, capacity_multiple=1, group_images=1)
    layer.router.weight.data = torch.eye(4)
    chosen = torch.tensor([[0, 0, 1, 2], [1, 1, 2, 3]])
    layer(torch.eye(4)[chosen])
    (record,) = layer.router.records
    assert record.capacity == 1
    assert record.load.tolist() == [2, 3, 2, 1]
    assert record.dropped == 2


def test_losses_are_means_over_the_groups(monkeypatch):
    noise = torch.randn(1, 2, 7, 4)
    monkeypatch.setattr(torch, "randn_like", lambda x, **_: noise.expand_as(x))
    layer = routed(
        group_images=2, noise_std=1.0, loss_weights={"importance": 0.1, "load": 0.2, "balance": 0.3}
    )
    x = torch.randn(6, 7, 5)
    outcomes = []
    for parts in ([x], x.split(2)):
        layer.router.forget()
        for part in parts:
            layer(part)
        outcomes.append(layer.router.records)
    (whole,), groups = outcomes
    for name, loss in whole.losses.items():
        torch.testing.assert_close(
            loss, torch.stack([group.losses[name] for group in groups]).mean()
        )
    torch.testing.assert_close(
        whole.weighted_loss, torch.stack([group.weighted_loss for group in groups]).mean()
    )


def test_groups_that_do_not_divide_the_batch():
    layer = routed(capacity_factor=1.0, group_images=4)
    with pytest.raises(ValueError, match=r"group_images=4 .*6 images; 1, 2, 3, 6 "):
        layer(torch.randn(6, 7, 5))
    # The last batch of a validation set.
    assert layer.eval()(torch.randn(6, 7, 5)).shape == (6, 7, 5)


def test_the_last_batch_of_an_evaluation_is_one_group():
    layer = routed(eval_capacity_factor=0.5, capacity_multiple=1, group_images=4).eval()
    x = torch.randn(6, 7, 5)
    experts = layer.router(x).experts()
    layer.router.group_images = 6
    assert torch.equal(experts, layer.router(x).experts())


def test_router_computes_in_float32_under_autocast_and_in_low_precision():
    losses = set(LOSSES) - {"load"}
    layer = routed(8, 16, top_k=2, loss_weights=dict.fromkeys(losses, 1.0))
    x = torch.randn(2, 30, 8)
    expected, exact = layer.router(x), layer.router.records[-1]
    probabilities = layer.router.probabilities(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = layer.router(x)
        assert torch.equal(layer.router.probabilities(x), probabilities)
        assert layer(x).dtype == torch.bfloat16
    assert torch.equal(routing.token_indices, expected.token_indices)
    assert torch.equal(routing.gates, expected.gates)
    assert layer.router.records[-1].losses == exact.losses
    low = copy.deepcopy(layer).bfloat16()
    assert low(x.bfloat16()).dtype == torch.bfloat16
    assert low.router(x.bfloat16()).gates.dtype == torch.float32


def test_copies_and_pickles_carry_no_graph():
    layer = routed(loss_weights={"balance": 1.0})
    layer(torch.randn(2, 3, 5))
    for duplicate in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert duplicate.router.records == []
        assert torch.equal(duplicate.router.weight, layer.router.weight)
    assert len(layer.router.records) == 1


def test_a_dense_checkpoint_leaves_the_router_alone_and_an_expert_one_must_have_it():
    layer, dense = routed(), Mlp(5, 6)
    before = layer.router.weight.clone()
    layer.load_state_dict(dense.state_dict())
    assert torch.equal(layer.router.weight, before)
    assert torch.equal(layer.fc2.weight[3], dense.fc2.weight)
    state_dict = routed().state_dict()
    layer.load_state_dict(state_dict)
    assert torch.equal(layer.router.weight, state_dict.pop("router.weight"))
    with pytest.raises(RuntimeError, match=r"Missing key.*router\.weight"):
        layer.load_state_dict(state_dict)


@pytest.mark.parametrize("row", [0, 3])
def test_not_a_number_stays_with_its_token(row):
    layer = routed(top_k=2, capacity_factor=0.3, batch_priority=True)
    x = torch.randn(2, 19, 5)
    layer(x)
    x[0, row] = float("nan")
    y = layer(x)
    y[0, row] = 0
    assert y.isfinite().all()
    assert (y == 0).all(2).sum() > 5


@pytest.mark.parametrize("gate_mode", ["prob", "renorm"])
def test_not_a_number_in_a_router_shows_in_the_outputs(gate_mode):
    layer = routed(gate_mode=gate_mode)
    with torch.no_grad():
        layer.router.weight[1] = float("nan")
    assert not layer(torch.randn(2, 19, 5)).isfinite().any()


def test_an_empty_batch():
    layer = routed(top_k=2, capacity_factor=1.0, eval_capacity_factor=1.0, group_images=2).eval()
    assert layer(torch.randn(0, 7, 5)).shape == (0, 7, 5)
    assert layer(torch.randn(2, 0, 5)).shape == (2, 0, 5)


def test_nothing_is_dropped_if_asked_by_name():
    """timm drops options that are None, so there has to be another way to say it."""
    for value in ("none", "None", 1000):
        model = timm.create_model("vit_tiny_moe", capacity_factor=value, **SMALL_VIT)
        model(torch.randn(4, 3, 32, 32))
        assert model.blocks[1].mlp.router.records[0].dropped == 0


def test_expert_dropout_is_of_the_experts_only():
    without_noise = dict(noise_std=0, aux_loss="importance")
    model = timm.create_model("vmoe_s32", **TINY, **without_noise, expert_dropout=0.5)
    assert model.blocks[0].mlp.drop1.p == 0
    layer = model.blocks[1].mlp
    x = torch.ones(2, 5, 16)
    assert not torch.equal(layer(x)[0, 0], layer(x)[0, 1])
    layer.eval()
    assert torch.equal(layer(x)[0, 0], layer(x)[0, 1])


@pytest.mark.parametrize("rate", [1.5, -0.1, "0.1"])
def test_an_impossible_expert_dropout_leaves_the_model_as_it_was(dense_vit, rate):
    with pytest.raises(ValueError, match=r"expert_dropout must be .* 0 and at most 1, got"):
        timm_moe.convert_to_moe(dense_vit, expert_dropout=rate)
    assert not timm_moe.moe_layers(dense_vit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, r"top_k .*1 and 4, .* 0\."),
        ({"top_k": 5}, r"top_k .*1 and 4, .* 5\."),
        ({"top_k": 1.5}, r"top_k .*1 and 4, .* 1\.5\."),
        ({"noise_std": -1}, r"noise_std .* -1\."),
        ({"capacity_factor": 0}, r"^capacity_factor .*None, .* 0\."),
        ({"capacity_factor": -1.0}, r"^capacity_factor .*None, .* -1\.0\."),
        ({"capacity_factor": float("nan")}, "^capacity_factor .*None, .* nan"),
        ({"eval_capacity_factor": "all"}, "eval_capacity_factor .*None, .*'all'"),
        ({"batch_priority": "false"}, "batch_priority .*True or False, .*'false'"),
        ({"pre_logits": "false"}, "pre_logits .*True or False, .*'false'"),
        ({"aux_loss": "balance+balance"}, r"aux_loss .*different .*'balance\+balance'"),
        ({"capacity_multiple": 0}, r"capacity_multiple .* 0\."),
        ({"capacity_rounding": "up"}, "capacity_rounding .*ceil, round, floor, .*'up'"),
        ({"group_images": 0}, r"group_images .*None, .* 0\."),
        ({"aux_loss_weight": -0.1}, r"aux_loss_weight .* -0\.1\."),
        ({"aux_loss": "entropy"}, "losses .*importance, .*, global_entropy, z, .*'entropy'"),
        ({"aux_loss": "load"}, "load loss .*noise_std"),
        ({"router": "random"}, "capacity_factor .*router='top_k', .*router='random'"),
        ({"share_rate": 0.8}, r"share_rate .*0\.75 .* 0\.8\."),
    ],
)
@pytest.mark.first_case
def test_bad_options_end_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("vit_tiny_moe", **SMALL_VIT, **options)


def test_a_load_loss_is_not_of_a_choice_by_a_bias():
    with pytest.raises(ValueError, match=r"load loss .*no bias_rate"):
        TopKRouter(8, 4, noise_std=1.0, bias_rate=0.01, loss_weights={"load": 0.1})


def test_a_capacity_below_one():
    layer = routed(capacity_factor=0.01, capacity_rounding="floor")
    with pytest.raises(ValueError, match=r"capacity_factor=0\.01 .*6 choices over 4"):
        layer(torch.randn(2, 3, 5))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_capacity_in_a_trace_is_that_of_the_batch(tmp_path):
    layer = routed(eval_capacity_factor=0.1, capacity_rounding="floor", capacity_multiple=1).eval()
    many, few = torch.randn(8, 10, 5), torch.randn(1, 3, 5)
    torch.jit.save(torch.jit.trace(layer, many), tmp_path / "layer.pt")
    traced = torch.jit.load(tmp_path / "layer.pt")
    torch.testing.assert_close(traced(many[:5]), layer(many[:5]))
    with pytest.raises(ValueError, match="below 1"):
        layer(few)
    # Which cannot refuse a batch, so that each expert takes one row.
    assert (traced(few) != 0).any(2).sum() > 0


@pytest.mark.parametrize(
    "options", [{}, {"batch_priority": True}, {"group_images": 1}, {"capacity_rounding": "floor"}]
)
def test_a_huge_capacity_factor_drops_nothing(options):
    x = torch.randn(2, 30, 5)
    layer = routed(top_k=2, capacity_factor=1e308, eval_capacity_factor=1e308, **options)
    expected = layer(x)
    assert layer.router.records[-1].dropped == 0
    torch.testing.assert_close(layer.eval()(x), expected)
    layer.router.eval_capacity_factor = None
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("capacity_factor", [None, 0.6])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.first_case
def test_combine_has_the_gradients_of_the_plain_sum(top_k, capacity_factor, dtype):
    torch.manual_seed(0)
    router = TopKRouter(8, 4, top_k, capacity_factor=capacity_factor, capacity_multiple=1).double()
    routing = router(torch.randn(3, 5, 8, dtype=torch.float64))
    is_kept = routing.slots < routing.offsets[-1]
    own = routing.gates.detach().requires_grad_()
    outputs = torch.randn(len(routing.token_indices), 8, dtype=dtype, requires_grad=True)

    def combined(weight, outputs):
        return combine(outputs, routing._replace(gates=torch.where(is_kept, weight, 0)))

    weight = torch.where(is_kept, own, 0)
    plain = sum(
        weight[:, choice, None].to(dtype) * outputs[routing.slots[:, choice]]
        for choice in range(routing.slots.shape[1])
    )
    fast = combined(own, outputs)
    assert fast.dtype == dtype
    if dtype == torch.float64:
        assert torch.equal(fast, plain)
    else:  # added in float32 and rounded once, where the plain sum rounds every term
        exact = (weight.to(dtype)[..., None].double() * outputs[routing.slots].double()).sum(1)
        torch.testing.assert_close(fast.double(), exact, rtol=2**-8, atol=1e-15)
    grad = torch.randn_like(fast)
    for got, expected in zip(
        torch.autograd.grad(fast, [outputs, own], grad),
        torch.autograd.grad(plain, [outputs, own], grad),
        strict=True,
    ):
        tolerance = 1e-12 if dtype == torch.float64 else 2e-2
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    if dtype == torch.float64:
        torch.autograd.gradcheck(combined, [own, outputs])
        torch.autograd.gradgradcheck(combined, [own, outputs])


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("are_equal", [False, True])
@pytest.mark.parametrize("top_k", [2, 1])
def test_bfloat16_is_as_exact_as_a_loop_of_linear_layers(top_k, are_equal):
    def looped(layer, x, experts, weights):
        y = torch.zeros_like(x)
        for number, expert in enumerate(layer.each()):
            for choice in range(top_k):
                rows = (experts[:, choice] == number).nonzero().squeeze(1)
                y = y.index_add(0, rows, weights[rows, choice, None].to(x.dtype) * expert(x[rows]))
        return y

    def outcome(call, layer, x, grad):
        x = x.clone().requires_grad_()
        y = call(layer, x)
        return [
            y,
            *torch.autograd.grad(y, [x, *dict(layer.named_expert_parameters()).values()], grad),
        ]

    torch.manual_seed(0)
    layer = routed(32, 64, top_k=top_k, capacity_factor=1.0).bfloat16()
    x, grad = torch.randn(2, 200, 32).bfloat16()
    with equal_slots(are_equal), torch.no_grad():
        routing = layer.router(x[None])
    chosen = routing.experts(), routing.weights()

    def loop(layer, x):
        return looped(layer, x, *chosen)

    exact = outcome(loop, copy.deepcopy(layer).double(), x.double(), grad.double())
    simple = outcome(loop, layer, x, grad)
    for got, plain, true in zip(
        outcome(lambda layer, x: layer(x, routing=routing), layer, x, grad),
        simple,
        exact,
        strict=True,
    ):
        assert error(got, true) <= 1.5 * error(plain, true)


@pytest.mark.parametrize("are_equal", [True, False])
@pytest.mark.parametrize(
    ("router", "options"),
    [
        (TopKRouter, dict(top_k=1)),
        (TopKRouter, dict(top_k=2, capacity_factor=0.5)),
        (ImageRouter, dict(top_k=2)),
    ],
)
def test_rows_are_cast_before_they_are_gathered_to_the_same_values(
    are_equal, router, options, monkeypatch
):
    torch.manual_seed(0)
    layer = MoeMlp(Mlp(8, 16), router(8, 4, **options), "independent")
    x = torch.randn(3, 6, 8, requires_grad=True)
    outcomes = []
    for casts in (True, False):
        if not casts:
            monkeypatch.setattr(MoeMlp, "dtype_of_rows", lambda *_: None)
        with equal_slots(are_equal), torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        gradients = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])
        outcomes.append([y, *gradients])
    for cast, gathered in zip(*outcomes, strict=True):
        assert cast.dtype == gathered.dtype
        assert torch.equal(cast, gathered)


@pytest.mark.parametrize(
    ("network", "dtype"),
    [(Mlp, torch.bfloat16), (GluMlp, torch.bfloat16), (SwiGLU, None), (nn.Sequential, None)],
)
def test_only_rows_that_one_linear_layer_takes_are_cast_before(network, dtype):
    ffn = nn.Sequential(nn.Linear(8, 8)) if network is nn.Sequential else network(8, 16)
    layer = MoeMlp(ffn, TopKRouter(8, 4))
    x = torch.randn(3, 8)
    assert layer.dtype_of_rows(x, Mode.EAGER) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.dtype_of_rows(x, Mode.EAGER) is dtype
        assert layer.dtype_of_rows(x, Mode.COMPILED) is None


@settings(max_examples=30)
@given(rows=st.integers(1, 12), experts=st.integers(1, 5), data=st.data())
def test_a_routing_that_calls_itself_full_has_no_slot_after_the_last_run(rows, experts, data):
    choices = data.draw(st.integers(1, experts))
    expert_TK, gate_TK = drawn_choices(rows, experts, choices)
    is_chosen_TK = torch.rand(rows, choices) < data.draw(st.sampled_from([0.5, 1.0]))
    is_chosen_TK[:, 0] = True
    queues = queue(expert_TK[None], experts)
    routings = [
        routing_to(expert_TK, gate_TK, experts),
        routing_to(expert_TK, gate_TK, experts, is_chosen_TK),
        assign(expert_TK[None], gate_TK[None], queues, capacity=1),
        partition(torch.randperm(rows), experts, Mode.EAGER),
    ]
    assert [routing.is_full for routing in routings] == [True, False, False, True]
    for routing in routings:
        if routing.is_full:
            assert routing.offsets[-1] == len(routing.token_indices)
            assert routing.for_all_rows(3).is_full


FULL = {
    "top-k": lambda: TopKRouter(8, 4, 2, capacity_factor=None),
    "top-k with a capacity": lambda: TopKRouter(8, 4, 2),
    "image-level": lambda: ImageRouter(8, 4, 2),
    "pBE": lambda: EnsembleRouter(8, 4, 2, ensemble_size=2),
    "tiling": lambda: TilingRouter(8, 4, 2, ensemble_size=2, noise_std=1.0),
    "partitioning": lambda: PartitionedRouter(8, 4, 2, ensemble_size=2),
    "multi-head": lambda: MultiHeadRouter(8, 4, 2),
    "expert choice": lambda: ExpertChoiceRouter(8, 4),
    "random partition": lambda: RandomPartition(4),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", FULL)
def test_no_router_calls_a_routing_full_that_is_not(kind, training):
    """A GPU does not write the rows after the last run of such a routing."""
    routing = FULL[kind]().train(training)(torch.randn(4, 6, 8))
    assert not routing.is_full or routing.offsets[-1] == len(routing.token_indices)
    if not training and kind != "random partition":
        assert routing.is_full  # Nothing is dropped.
