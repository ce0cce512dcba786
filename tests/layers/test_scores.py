"""Scores, scales and biases of routers, and the losses about them, against a slow reference."""

import math

import pytest
import timm
import torch
from common import SMALL_VIT, loads, output_of_expert
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Mlp

import timm_moe
from timm_moe.layers import MoeMlp, TopKRouter, losses


def layer(num_experts=4, top_k=2, **options):
    router = TopKRouter(5, num_experts, top_k, **options)
    torch.nn.init.normal_(router.weight)
    return MoeMlp(Mlp(5, 6), router, "independent").double()


def reference(moe, x):
    """Compute the rows (T, D) choice by choice."""
    router, outputs = moe.router, []
    steps = router.balancing_bias.steps.tolist() if router.balancing_bias else [0] * moe.num_experts
    bias = [
        router.balancing_bias.rate * (step - sum(steps) / len(steps)) if any(steps) else 0
        for step in steps
    ]
    for row in x:
        logits = router.weight @ row
        gates = list(
            1 / (1 + (-logits).exp())
            if router.score == "sigmoid"
            else logits.exp() / logits.exp().sum()
        )
        best = sorted(range(moe.num_experts), key=lambda e: -(gates[e].item() + bias[e]))[
            : router.top_k
        ]
        total = sum(gates[e] for e in best) if router.gate_mode == "renorm" else 1
        y = torch.zeros_like(row)
        for e in best:
            y = y + router.route_scale * gates[e] / total * output_of_expert(moe, e, row)
        outputs.append(y)
    return torch.stack(outputs)


@given(
    tokens=st.integers(1, 9),
    num_experts=st.integers(2, 5),
    top_k=st.integers(1, 2),
    score=st.sampled_from(["softmax", "sigmoid"]),
    gate_mode=st.sampled_from(["prob", "renorm"]),
    route_scale=st.sampled_from([1.0, 2.5]),
    bias_rate=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=30)
def test_values_and_gradients_equal_the_reference(tokens, num_experts, top_k, **options):
    moe = layer(num_experts, top_k, loss_weights={"z": 1.0}, **options)
    if moe.router.balancing_bias is not None:
        moe.router.balancing_bias.steps.copy_(torch.randint(-9, 9, (num_experts,)))
    x = torch.randn(1, tokens, 5, dtype=torch.float64, requires_grad=True)
    wanted, tensors = torch.randn_like(x), [x, *moe.parameters()]
    y, expected = moe(x), reference(moe, x[0])[None]
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    found, gradients = (
        torch.autograd.grad((out * wanted).sum(), tensors, materialize_grads=True)
        for out in (y, expected)
    )
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("score", "spread", "bias_rate"), [("sigmoid", 1, 0), ("sigmoid", 1, 0.1), ("softmax", 200, 0)]
)
def test_the_largest_logits_are_chosen_where_their_gates_are_rounded_to_equal_ones(
    score, spread, bias_rate
):
    router = TopKRouter(8, 8, 2, score=score, gate_mode="renorm", bias_rate=bias_rate)
    torch.nn.init.eye_(router.weight)
    logits = 18 + spread * torch.randn(1, 100, 8)
    wanted = logits[0].topk(2).indices
    torch.testing.assert_close(router(logits).experts(), wanted)
    if bias_rate:  # The bias comes first.
        router.balancing_bias.steps[3] = 1
        assert (router(logits).experts()[:, 0] == 3).all()


def test_losses_by_hand():
    logits = torch.randn(2, 7, 3, dtype=torch.float64)
    gates = logits.softmax(2)
    for group in range(2):
        rows = [[gate.item() for gate in row] for row in gates[group]]
        z = sum(math.log(sum(math.exp(v.item()) for v in row)) ** 2 for row in logits[group]) / 7
        local = -sum(gate * math.log(gate) for row in rows for gate in row) / 7
        means = [sum(row[expert] for row in rows) / 7 for expert in range(3)]
        spread = math.log(3) + sum(mean * math.log(mean) for mean in means)
        assert losses.z_loss(logits)[group].item() == pytest.approx(z, abs=1e-9)
        assert losses.local_entropy_loss(gates)[group].item() == pytest.approx(local, abs=1e-9)
        assert losses.global_entropy_loss(gates)[group].item() == pytest.approx(spread, abs=1e-9)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_each_loss_is_of_its_own_gates(score, monkeypatch):
    """Only the balance losses here are of gates with noise, and a row's gates add up to one."""

    def shares(logits):
        gates = logits.softmax(2) if score == "softmax" else logits.sigmoid()
        return gates / gates.sum(2, keepdim=True)

    names = ["importance", "balance", "balance_top_k", "local_entropy", "global_entropy", "z"]
    weights = dict.fromkeys(names, 1.0)
    router = layer(score=score, noise_std=8.0, loss_weights=weights).router
    x = torch.randn(1, 9, 5, dtype=torch.float64)
    noise = torch.randn(1, 9, 4, dtype=torch.float64)
    monkeypatch.setattr(torch, "randn_like", lambda x, **_: noise.view_as(x))
    router(x)
    logits = x @ router.weight.detach().T
    noisy = logits + 8.0 / 4 * noise
    chosen = noisy.topk(2).indices
    expected = {
        "importance": losses.importance_loss(shares(logits)),
        "balance": losses.balance_loss(shares(noisy), loads(chosen[..., :1], 4), 1),
        "balance_top_k": losses.balance_loss(shares(noisy), loads(chosen, 4), 2),
        "local_entropy": losses.local_entropy_loss(shares(logits)),
        "global_entropy": losses.global_entropy_loss(shares(logits)),
        "z": losses.z_loss(logits),
    }
    (record,) = router.records
    assert record.losses.keys() == expected.keys()
    for name, loss in expected.items():
        torch.testing.assert_close(record.losses[name], loss[0], msg=name)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("name", ["importance", "balance", "local_entropy", "global_entropy", "z"])
def test_each_loss_has_a_finite_gradient_even_where_gates_are_rounded_to_zero(name, score):
    for scale in (1.0, 1e4):
        router = TopKRouter(5, 4, 2, score=score, loss_weights={name: 1.0})
        with torch.no_grad():
            router.weight.normal_(std=scale)
        router(torch.randn(1, 9, 5))
        (loss,) = (record.weighted_loss for record in router.records)
        loss.backward()
        assert loss.isfinite()
        assert router.weight.grad.isfinite().all()
        assert scale > 1 or router.weight.grad.any()


@pytest.mark.parametrize("training", [True, False])
def test_a_gate_of_one_is_scaled(training):
    moe = layer(gate_mode="one", route_scale=2.5, loss_weights={"balance": 1.0}).train(training)
    routing = moe.router(torch.randn(1, 7, 5, dtype=torch.float64))
    assert (routing.gates == 2.5).all()


def test_by_name():
    model = timm.create_model(
        "vit_tiny_moe",
        score="sigmoid",
        balance="bias",
        bias_rate=0.01,
        z_loss_weight=0.001,
        route_scale=2,
        **SMALL_VIT,
    )
    routers = [layer.router for layer in timm_moe.moe_layers(model).values()]
    assert [router.loss_weights for router in routers] == [{"z": 0.001}] * len(routers)
    assert {
        (router.score, router.balancing_bias.rate, router.route_scale) for router in routers
    } == {("sigmoid", 0.01, 2)}
    probabilities = routers[0].probabilities(
        torch.randn(2, 4, 16 * 2)[..., : routers[0].weight.shape[1]]
    )
    torch.testing.assert_close(probabilities.sum(1), torch.ones(8))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_tiny_moe", dict(balance="none"), "balance .*loss, bias, .*'none'"),
        ("vit_tiny_moe", dict(bias_rate=0.1), "bias_rate .*balance='bias'"),
        ("vit_tiny_moe", dict(balance="bias", bias_rate=0), r"bias_rate .*above 0, .* 0\."),
        ("vit_tiny_moe", dict(route_scale=0), r"route_scale .*above 0, .* 0\."),
        ("vit_tiny_moe", dict(z_loss_weight=-1), r"weight of the z loss .* -1\."),
        ("vit_tiny_moe", dict(aux_loss="z"), "z_loss_weight: .*aux_loss, .*'z'"),
        (
            "vit_tiny_moe",
            dict(aux_loss="balance+z", z_loss_weight=0.1),
            r"z_loss_weight: .*aux_loss, .*'balance\+z'",
        ),
        (
            "vit_tiny_moe",
            dict(balance="bias", aux_loss_weight=0.1),
            "balance='bias' .*aux_loss_weight",
        ),
        ("vmoe_pbe_s32", dict(balance="bias"), "balance='bias' .*ensemble_size"),
    ],
)
def test_where_it_is_refused(name, options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        timm.create_model(name, **SMALL_VIT, **options)


@pytest.mark.parametrize("top_k", [1, 2])
def test_sigmoids_that_are_rounded_to_one_are_chosen_by_their_logits(top_k):
    moe = layer(top_k=top_k, score="sigmoid").float()
    torch.nn.init.eye_(moe.router.weight)
    x = torch.tensor([[17.0, 30.0, 40.0, 20.0, 0.0]])
    assert moe.router(x).experts().tolist() == [[2, 1][:top_k]]
