"""MIMO.

Mixed batches are compared with a slow reference. Weights are those of ordinary models, and models
run in all ways that timm's scripts take.
"""

import pytest
import timm
import torch
from common import SMALL_VIT
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.loss import SoftTargetCrossEntropy
from timm.task import ClassificationTask, LogitDistillationTask
from torch import nn

import timm_moe
from studies.rivals.mimo import draw_mixture, mix, unmix
from timm_moe.analysis.info import model_info
from timm_moe.layers.ensemble import MemberLoss

BOTH = ("vit_mimo_s32", "vmoe_mimo_s32")


def mimo(name="vit_mimo_s32", **options):
    experts = (
        dict(
            num_experts=4,
            noise_std=0,
            aux_loss="importance",
            aux_loss_weight=0.0,
            expert_dropout=0.0,
        )
        if name.startswith("vmoe")
        else {}
    )
    return timm.create_model(name, **{**SMALL_VIT, **experts, **options})


@settings(max_examples=40)
@given(
    st.integers(4, 9), st.integers(1, 4), st.sampled_from([0.0, 0.3, 0.5, 0.75]), st.integers(1, 3)
)
def test_each_member_sees_each_image_equally_often(batch, members, input_repetition, repetitions):
    rows = batch * repetitions
    shuffled = int(rows * (1 - input_repetition))
    if members > 1 and shuffled < 2:
        with pytest.raises(ValueError, match="leaves nothing to shuffle"):
            draw_mixture(batch, members, input_repetition, repetitions)
        return
    image_TM = draw_mixture(batch, members, input_repetition, repetitions)
    expected = torch.arange(batch).repeat_interleave(repetitions)
    assert torch.equal(image_TM.sort(0).values, expected[:, None].expand(rows, members))
    assert torch.equal(image_TM[shuffled:], image_TM[shuffled:, :1].expand(-1, members))
    output = torch.randn(rows, members, 3)
    sorted_BNC = unmix(output, image_TM, batch)
    for image in range(batch):
        own = torch.stack(
            [output[t, m] for m in range(members) for t in range(rows) if image_TM[t, m] == image]
        )
        torch.testing.assert_close(sorted_BNC[image].sum(0), own.sum(0))
        assert sorted_BNC[image].shape == own.shape


@pytest.mark.parametrize("target", [torch.tensor([0, 1, 2, 3, 4, 0]), torch.rand(6, 5).softmax(1)])
@pytest.mark.parametrize("name", BOTH)
def test_the_loss_is_that_of_a_loop_over_rows_and_members(name, target, images):
    """Its gradients too: the paper's targets belong to the images that each member sees."""
    model = mimo(name, ensemble_size=3, batch_repetitions=2).double()
    images = images.double()
    criterion = nn.CrossEntropyLoss() if target.ndim == 1 else SoftTargetCrossEntropy()
    torch.manual_seed(1)
    task = ClassificationTask(model, criterion=criterion, verbose=False)
    result = task(images, target.double() if target.ndim == 2 else target)
    loss = result["loss"]
    torch.manual_seed(1)
    image_TM = draw_mixture(6, 3, 0.5, 2)
    rows = torch.stack([torch.cat([images[image_TM[t, m]] for m in range(3)]) for t in range(12)])
    logits = model.forward_head(model.forward_features(rows))
    assert logits.shape == (12, 3, 5)
    losses = [
        criterion(logits[t, m][None], target[image_TM[t, m]][None])
        for t in range(12)
        for m in range(3)
    ]
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(loss, expected)
    learned = [model.head.weight, model.patch_embed.proj.weight]
    torch.testing.assert_close(
        torch.autograd.grad(loss, learned), torch.autograd.grad(expected, learned)
    )


@pytest.mark.parametrize("members", [1, 3])
def test_an_ordinary_checkpoint_is_repeated(members, dense_vit, images):
    """A member then sees the mean of the images.

    Its logits are the dense model's, but for the division of both.
    """
    torch.nn.init.normal_(dense_vit.head.bias)
    model = mimo(ensemble_size=members).eval()
    model.load_state_dict(dense_vit.state_dict())
    features = dense_vit.forward_head(dense_vit.forward_features(images), pre_logits=True)
    logits = features @ dense_vit.head.weight.T / members + dense_vit.head.bias
    torch.testing.assert_close(
        model.forward_members(images), logits[:, None].expand(-1, members, -1)
    )
    torch.testing.assert_close(model(images), logits.log_softmax(1))
    several = [images, *torch.randn(members - 1, 6, 3, 32, 32)]
    mean = dense_vit.forward_features(torch.stack(several).mean(0))
    torch.testing.assert_close(
        model.forward_features(torch.cat(several, 1)), mean, rtol=1e-4, atol=1e-4
    )


def test_experts_and_members_come_from_one_dense_checkpoint_or_a_v_moe(dense_vit, images):
    vmoe = timm.create_model(
        "vmoe_s32", num_experts=4, noise_std=0, aux_loss="importance", **SMALL_VIT
    ).eval()
    for source in (dense_vit, vmoe):
        model = mimo("vmoe_mimo_s32").eval()
        model.load_state_dict(source.state_dict())
        features = model.forward_head(model.forward_features(images), pre_logits=True)
        expected = features @ source.head.weight.T / 2 + source.head.bias
        torch.testing.assert_close(
            model.forward_members(images), expected[:, None].expand(-1, 2, -1)
        )


def test_a_checkpoint_of_its_own_loads_and_others_are_refused():
    model = mimo(ensemble_size=2)
    again = mimo(ensemble_size=2)
    again.load_state_dict(model.state_dict())
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items()
    )
    with pytest.raises(RuntimeError, match="size mismatch"):
        mimo(ensemble_size=4).load_state_dict(model.state_dict())


@pytest.mark.parametrize("name", BOTH)
def test_timms_own_methods(name, images, tmp_path):
    model = mimo(name, in_chans=3).eval()
    assert timm.data.resolve_model_data_config(model)["input_size"][0] == 3
    model.reset_classifier(7)
    assert (model.num_classes, model.head.out_features) == (7, 14)
    assert model(images).shape == (6, 7)
    assert model.train()(images).shape == (6, 2, 7)
    model.reset_classifier(0)
    assert model(images).shape == (6, 32)
    features = mimo(name, features_only=True, out_indices=[1, 3])(images)
    assert [feature.shape for feature in features] == [(6, 32, 4, 4)] * 2
    grey = mimo(name, in_chans=1, ensemble_size=3)
    assert grey(images[:, :1]).shape == (6, 3, 5)


def test_the_dense_form_keeps_its_members(images):
    model = mimo("vmoe_mimo_s32", ensemble_size=3, gate_mode="renorm").eval()
    for layer in timm_moe.moe_layers(model).values():
        for _, stacked in layer.named_expert_parameters():
            stacked.data[:] = stacked.data[:1]
        layer.router.weight.data.zero_()
    dense = timm_moe.to_dense(model)
    assert type(dense).__name__ == "MimoVisionTransformer"
    assert not timm_moe.moe_layers(dense)
    again = timm.create_model("vit_mimo_s32", **dense._model_args).eval()
    again.load_state_dict(dense.state_dict())
    assert again.forward_members(images).shape == (6, 3, 5)
    torch.testing.assert_close(again(images), dense(images))
    torch.testing.assert_close(dense(images), model(images))


def test_it_learns_to_tell_its_images_apart():
    """Members find the class of their own image, though every forward shows two images."""
    torch.manual_seed(0)
    colors = torch.eye(3)[:, :, None, None].repeat(8, 1, 8, 8)
    labels = torch.arange(3).repeat(8)
    size = dict(img_size=8, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=3)
    model = timm.create_model("vit_mimo_s32", input_repetition=0, **size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = MemberLoss(nn.CrossEntropyLoss())
    for _ in range(60):
        optimizer.zero_grad()
        loss(model(colors), labels).backward()
        optimizer.step()
    model.eval()
    image_TM = draw_mixture(24, 2, 0, 1)
    logits_TMC = model.forward_members(mix(colors, image_TM))
    assert torch.equal(logits_TMC.argmax(2), labels[image_TM])
    assert torch.equal(model(colors).argmax(1), labels)


def test_an_ensemble_in_timms_tasks_and_in_info(dense_vit):
    with pytest.raises(ValueError, match=r"LogitDistillationTask .*MimoVisionTransformer"):
        LogitDistillationTask(mimo(), dense_vit, nn.CrossEntropyLoss(), verbose=False)
    assert model_info("vmoe_mimo_b32", ensemble_size=4).members == 4


@pytest.mark.ci
@pytest.mark.parametrize("name", BOTH)
def test_compiled(name, images):
    model = mimo(name).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), model(images))
    assert torch.compile(model.train(), backend="aot_eager")(images).shape == (6, 2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ensemble_size=0), r"ensemble_size .* 0\."),
        (dict(batch_repetitions=0), r"batch_repetitions .* 0\."),
        (dict(input_repetition=-0.1), r"input_repetition .* -0\.1\."),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        mimo(**options)


def test_a_batch_too_small_to_be_mixed():
    model = mimo()
    with pytest.raises(ValueError, match=r"batch of 2 .*input_repetition=0\.5 "):
        model(torch.randn(2, 3, 32, 32))
    with pytest.raises(ValueError, match=r"batch of 8 .*input_repetition=1 "):
        mimo(input_repetition=1)(torch.randn(8, 3, 32, 32))
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 5)
