"""Ensembles inside one model, in narrow types and with masks for each image.

They are pBE, batch ensembles, MIMO and MC dropout.
"""

from functools import partial

import pytest
import timm
import torch
from common import SMALL_VIT

from studies.rivals import with_samples

EXPERTS = dict(num_experts=4, moe_layers="last-2", expert_dropout=0.0)
NAMES = {
    "vmoe_pbe_s32": EXPERTS,
    "vit_be_s32": {},
    "vit_mimo_s32": {},
    "vmoe_mimo_s32": EXPERTS,
}
PARTING = ("vmoe_pbe_s32", "vit_be_s32")


def ensemble(name, **options):
    torch.manual_seed(0)
    return timm.create_model(
        name, ensemble_size=2, **{**SMALL_VIT, "num_classes": 50, **NAMES[name], **options}
    ).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_weights", [False, True])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
@pytest.mark.first_case
def test_the_mean_of_the_members_is_not_rounded(name, of_weights, dtype):
    """Else many classes would be equally probable, and the first of them predicted."""
    model, images = ensemble(name), torch.randn(64, 3, 32, 32)
    if of_weights:
        model, images = model.to(dtype), images.to(dtype)
    with torch.autocast("cpu", dtype, enabled=not of_weights):
        output, members = model(images), model.forward_members(images)
    assert members.dtype == dtype
    exact = members.double().log_softmax(2).exp().mean(1).log()
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(output.argmax(1), exact.argmax(1))


def masks():
    """Which tokens each token of each image sees: (B, 1, N, N), and one for all images."""
    torch.manual_seed(1)
    of_images = torch.rand(3, 1, 17, 17) < 0.6
    of_images |= torch.eye(17, dtype=torch.bool)
    return of_images, of_images[0, 0]


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_an_image_has_its_own_mask_in_all_members(name, positional):
    model, images = (
        ensemble(name, eval_capacity_factor=8.0) if "vmoe" in name else ensemble(name),
        torch.randn(3, 3, 32, 32),
    )
    of_images, of_all = masks()
    masked = model(images, of_images) if positional else model(images, attn_mask=of_images)
    each = [model(images[[index]], attn_mask=of_images[index, 0]) for index in range(3)]
    torch.testing.assert_close(masked, torch.cat(each), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(masked, model(images, attn_mask=of_all), atol=1e-4)
    alone = [model(images[[index]], attn_mask=of_images[[index]]) for index in range(3)]
    torch.testing.assert_close(torch.cat(alone), torch.cat(each))
    features = model.forward_intermediates(
        images, attn_mask=of_images, output_fmt="NLC", intermediates_only=True
    )
    alone = model.forward_intermediates(
        images[:1], attn_mask=of_all, output_fmt="NLC", intermediates_only=True
    )
    torch.testing.assert_close(features[-1][:1], alone[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_masks_of_images_in_training(name):
    """The rows of MIMO show several images each, which have different masks."""
    model, images = ensemble(name, proj_drop_rate=0.0).train(), torch.randn(4, 3, 32, 32)
    mask = torch.ones(4, 1, 17, 17, dtype=torch.bool)
    if name in PARTING:
        assert model(images, attn_mask=mask).shape == (4, 2, 50)
        return
    assert (
        model(images, attn_mask=mask[0, 0]).shape
        == model(images, attn_mask=mask[:1]).shape
        == (4, 2, 50)
    )


@torch.no_grad()
def test_samples_of_mc_dropout_have_the_masks_of_their_images(monkeypatch):
    model = timm.create_model("vit_small_moe", **SMALL_VIT, expert_dropout=1e-9).eval()
    images, (of_images, _) = torch.randn(3, 3, 32, 32), masks()
    alone = model(images, attn_mask=of_images)
    monkeypatch.setattr(model, "forward", partial(model.forward, attn_mask=of_images))
    samples = with_samples(model, 4).forward_members(images)
    torch.testing.assert_close(samples, alone[:, None].expand(-1, 4, -1))
    torch.testing.assert_close(model(images), alone)
