"""Soft MoE: values and gradients against a slow reference, padding, refusals."""

import pytest
import torch
from common import output_of_expert
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Mlp, SwiGLU

from timm_moe.layers import SoftMoeMlp, SoftRouter


def layer(width=5, hidden=6, num_experts=3, slots=2, ffn=None):
    ffn = Mlp(width, hidden) if ffn is None else ffn
    router = SoftRouter(width, num_experts, slots)
    torch.nn.init.normal_(router.scale, 3)
    return SoftMoeMlp(ffn, router, "independent").double()


def unit(vector):
    return vector / (vector.square().sum() + 1e-6).sqrt()


def reference(moe, image):
    """Compute the tokens (N, D) of one image slot by slot and token by token.

    This is algorithm 1 of arXiv 2308.00951.
    """
    experts, slots, _ = moe.router.slots.shape
    logits = torch.stack(
        [
            torch.stack(
                [
                    moe.router.scale[0] * unit(token) @ unit(slot)
                    for slot in moe.router.slots.flatten(0, 1)
                ]
            )
            for token in image
        ]
    )
    outputs = []
    for index in range(experts * slots):
        share = logits[:, index].exp() / logits[:, index].exp().sum()
        mixed = sum(share[n] * token for n, token in enumerate(image))
        outputs.append(output_of_expert(moe, index // slots, mixed))
    return torch.stack(
        [
            sum(share * y for share, y in zip(row.exp() / row.exp().sum(), outputs, strict=True))
            for row in logits
        ]
    )


@given(*(st.integers(1, 4) for _ in range(5)))
@settings(max_examples=15)
def test_values_and_gradients_equal_the_reference(images, tokens, width, num_experts, slots):
    moe = layer(width, 3, num_experts, slots)
    x = torch.randn(images, tokens, width, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn_like(x)
    tensors = [x, *moe.parameters()]
    expected = torch.stack([reference(moe, image) for image in x])
    y = moe(x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    found, gradients = (torch.autograd.grad((out * wanted).sum(), tensors) for out in (y, expected))
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-9)


def test_maps_of_tokens_and_other_networks():
    moe = layer(ffn=SwiGLU(5, 6))
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(moe(x).flatten(1, 2), moe(x.flatten(1, 2)))
    assert moe(x[:0]).shape == (0, 3, 4, 5)


def test_an_image_does_not_depend_on_others_nor_on_padding():
    moe = layer()
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    y = moe(x)
    torch.testing.assert_close(moe(x[:1]), y[:1])
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    moe.padding = padding
    padded = moe(x)
    torch.testing.assert_close(padded[0], y[0])
    torch.testing.assert_close(padded[1, :4], moe(x[1:, :4])[0])
    assert (padded[1, 4:] == 0).all()
    assert not torch.allclose(y[1, :4], padded[1, :4])
    torch.testing.assert_close(moe(x), y)  # padding is of one forward


def test_an_image_of_padding_alone_leaves_the_gradients_of_others():
    moe, x = layer(), torch.randn(2, 6, 5, dtype=torch.float64)
    moe(x[:1]).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in moe.named_parameters()}
    moe.zero_grad()
    moe.padding = torch.tensor([[False] * 6, [True] * 6])
    moe(x).sum().backward()
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_weights_are_computed_in_float32_under_autocast():
    router = SoftRouter(8, 4)
    x = torch.randn(2, 16, 8)
    with torch.autocast("cpu", torch.bfloat16):
        weights = router(x)
    assert all(torch.equal(ours, other) for ours, other in zip(weights, router(x), strict=True))


def test_initial_slots_have_the_variance_of_vmoe():
    router = SoftRouter(64, 32, 2)
    assert router.slots.std().item() == pytest.approx((32 * 64) ** -0.5, rel=0.05)
    assert router.scale.tolist() == [1]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"slots_per_expert .* 0\."):
        SoftRouter(4, 2, 0)
    with pytest.raises(ValueError, match="tokens of images"):
        layer()(torch.randn(3, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match="no routing to give"):
        layer()(torch.randn(1, 3, 5, dtype=torch.float64), routing=object())


def test_values_and_gradients_equal_vmoe(golden):
    case = golden("soft_moe")
    experts, hidden, width = case["fc1_w"].shape
    moe = layer(width, hidden, experts, slots=2)
    tensors = {name: case[f"{name[:3]}_{name[4]}"] for name in moe.stacked_shapes}
    moe.load_state_dict(
        {
            **tensors,
            "router.slots": case["mu"].permute(1, 2, 0),
            "router.scale": case["scale"][None],
        }
    )
    x = case["x"].requires_grad_()
    dispatch, combine = moe.router(x)
    torch.testing.assert_close(dispatch, case["dispatch"].flatten(2), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(combine, case["combine"].flatten(2), rtol=1e-9, atol=1e-9)
    y = moe(x)
    torch.testing.assert_close(y, case["y"], rtol=1e-9, atol=1e-9)
    gradients = torch.autograd.grad(
        (y * case["wanted"]).sum(), [x, moe.router.slots, moe.router.scale]
    )
    expected = [case["grad_x"], case["grad_mu"].permute(1, 2, 0), case["grad_scale"][None]]
    torch.testing.assert_close(list(gradients), expected, rtol=1e-9, atol=1e-9)
