"""The cosine router.

Values and gradients are compared with a slow reference; initial weights and refusals are tested.
"""

import math

import pytest
import timm
import torch
from common import SMALL_VIT, output_of_expert
from timm.layers import Mlp

import timm_moe
from timm_moe.layers import CosineRouter, MoeMlp


def layer(num_experts=4, **options):
    router = CosineRouter(5, num_experts, **options)
    torch.nn.init.normal_(router.weight)
    return MoeMlp(Mlp(5, 6), router, "independent").double()


def reference(moe, rows):
    """Compute rows (T, D) one by one: Tutel's formula, then the experts of largest gate."""
    router, outputs = moe.router, []
    for row in rows:
        projected = router.projection @ row + router.projection_bias
        logits = [(projected @ w) / (projected.norm() * w.norm()) for w in router.weight]
        gates = (torch.stack(logits) * router.log_scale.clamp(max=math.log(100)).exp()).softmax(0)
        y = torch.zeros_like(row)
        for e in sorted(range(len(gates)), key=lambda e: -gates[e].item())[: router.top_k]:
            y = y + gates[e] * output_of_expert(moe, e, row)
        outputs.append(y)
    return torch.stack(outputs)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("log_scale", [0.3, 9.0])
def test_values_and_gradients_equal_the_reference(top_k, log_scale):
    torch.manual_seed(0)
    moe = layer(top_k=top_k)
    torch.nn.init.constant_(moe.router.log_scale, log_scale)
    x = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    wanted, tensors = torch.randn_like(x), [x, *moe.parameters()]
    y, expected = moe(x), reference(moe, x.view(-1, 5)).view_as(x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    found, gradients = (
        torch.autograd.grad((out * wanted).sum(), tensors, materialize_grads=True)
        for out in (y, expected)
    )
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-9)
    assert bool(found[-1].any()) == (log_scale < 9)  # a scale above 100 is held there


def test_the_length_of_neither_rows_nor_weights_matters():
    router = layer().router
    torch.nn.init.zeros_(router.projection_bias)
    x = torch.randn(1, 6, 5, dtype=torch.float64)
    before = router.probabilities(x)
    router.weight.data *= 7
    torch.testing.assert_close(router.probabilities(3 * x), before)


def test_half_precision_is_left_at_the_door():
    router = CosineRouter(5, 4)
    x = torch.randn(1, 6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        gates, probabilities = router(x).gates, router.probabilities(x)
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates, router(x).gates)
    torch.testing.assert_close(probabilities, router.probabilities(x))


def test_initial_weights():
    router = CosineRouter(64, 32)
    assert router.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert 0.12 < router.projection.abs().max().item() <= 1 / 8
    assert router.log_scale.item() == pytest.approx(math.log(1 / 0.5))
    assert {name: tuple(parameter.shape) for name, parameter in router.named_parameters()} == {
        "weight": (32, 256),
        "projection": (256, 64),
        "projection_bias": (256,),
        "log_scale": (1,),
    }


def test_a_reset_takes_its_bias_along():
    router = CosineRouter(8, 4, bias_rate=0.1)
    router.balancing_bias.steps.fill_(7)
    router.reset_parameters()
    assert router.balancing_bias.steps.tolist() == [0] * 4


def test_an_option_of_every_model_routed_by_tokens():
    model = timm.create_model("vit_tiny_moe", score="cosine", num_experts=3, **SMALL_VIT)
    routers = [module.router for module in timm_moe.moe_layers(model).values()]
    assert {type(router) for router in routers} == {CosineRouter}
    (model(torch.randn(2, 3, 32, 32)).sum() + timm_moe.auxiliary_loss(model)).backward()
    assert all(parameter.grad.any() for router in routers for parameter in router.parameters())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_tiny_moe", dict(score="relu"), "score .*softmax, sigmoid, cosine.*'relu'"),
        ("vimoe_s14", dict(score="cosine"), "score='cosine' .*routing_unit and ensemble_size"),
        ("vmoe_pbe_s32", dict(score="cosine"), "score='cosine' .*routing_unit and ensemble_size"),
        ("vit_tiny_ewa_moe", dict(score="cosine"), "score .*router='top_k'"),
    ],
)
def test_where_it_is_refused(name, options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        timm.create_model(name, **options, **SMALL_VIT)
