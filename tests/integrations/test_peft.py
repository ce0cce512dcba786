"""LoRA of the library peft on stacked experts, by its ``target_parameters``."""

import copy
import logging

import pytest
import timm
import torch
from common import SMALL_VIT
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

import timm_moe
from timm_moe.convert.dense import to_dense_

peft = pytest.importorskip("peft", minversion="0.17")

pytestmark = [pytest.mark.ci]

EXPERTS = ["fc1.weight", "fc2.weight"]
SMALL = {"vit_tiny_ewa_moe": SMALL_VIT, "vit_tiny_moe": SMALL_VIT}
SMALL["vimoe_s14_shared"] = dict(img_size=28, embed_dim=32, num_heads=2, num_classes=5)
every_kind = pytest.mark.parametrize("name", SMALL)


def create(name="vit_tiny_ewa_moe", **options):
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL[name], **options)


def adapt(model, **options):
    """With adapters that change the outputs from the start, as after training."""
    config = peft.LoraConfig(
        **{"target_parameters": EXPERTS, "r": 2, "init_lora_weights": False, **options}
    )
    return peft.get_peft_model(model, config)


def images_for(name):
    return torch.randn(4, 3, SMALL[name]["img_size"], SMALL[name]["img_size"])


def gradients(model, images):
    """Of the trained parameters, by name; None where backward brought none."""
    model.zero_grad()
    torch.manual_seed(1)  # the partitions
    loss = model(images).float().square().sum() + timm_moe.auxiliary_loss(model)
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def assert_all_there(gradients):
    assert any(".mlp.fc1.lora_A" in name for name in gradients)
    assert [
        name for name, gradient in gradients.items() if gradient is None or not gradient.any()
    ] == []


@every_kind
def test_every_adapter_is_trained(name):
    model, images = adapt(create(name)).train(), images_for(name)
    plain = gradients(model, images)
    assert_all_there(plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert_all_there(gradients(model, images))
    model.base_model.model.set_grad_checkpointing()
    torch.testing.assert_close(gradients(model, images), plain)
    assert all(".lora_" in trained for trained in plain)  # the experts themselves are frozen


@every_kind
def test_merged_model_is_as_before_with_the_adapted_outputs(name):
    plain, images = create(name).eval(), images_for(name)
    model = adapt(create(name)).eval()
    with torch.no_grad():
        adapted = model(images)
        with model.disable_adapter():
            torch.testing.assert_close(model(images), plain(images), rtol=0, atol=0)
        assert not torch.allclose(adapted, plain(images), atol=1e-4)
        torch.testing.assert_close(copy.deepcopy(model)(images), adapted)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(images), adapted)
    classes, plain_classes = (
        [(path, type(module)) for path, module in m.named_modules()] for m in (merged, plain)
    )
    assert classes == plain_classes
    assert merged.state_dict().keys() == plain.state_dict().keys()


def test_experts_compute_with_their_adapters():
    mlp = adapt(create("vit_tiny_moe")).base_model.model.blocks[1].mlp
    with torch.no_grad():
        expected = mlp.fc1.weight + mlp.fc1.get_delta_weight("default")
        torch.testing.assert_close(dict(mlp.expert_weights())["fc1.weight"], expected)
    assert len(expected) == mlp.num_experts


def test_merged_ewa_model_becomes_the_stock_dense_one(tmp_path):
    model, images = adapt(create()).eval(), images_for("vit_tiny_ewa_moe")
    with torch.no_grad():
        adapted = model(images)
        merged = model.merge_and_unload()
        dense = timm_moe.to_dense(merged)
        assert type(dense) is timm.models.VisionTransformer
        torch.testing.assert_close(dense(images), adapted)
        timm_moe.export_dense(merged, tmp_path / "dense")
        stock = timm.create_model(
            f"local-dir:{tmp_path / 'dense'}", pretrained=True, num_classes=5
        ).eval()
        torch.testing.assert_close(stock(images), adapted)


@every_kind
def test_adapters_are_saved_and_loaded(name, tmp_path):
    model, images = adapt(create(name)).eval(), images_for(name)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(create(name), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"target_parameters": ["blocks.1.mlp.fc1.bias"]},
        {"target_parameters": ["blocks.1.mlp.fc1.bias", "blocks.1.mlp.fc1.weight"]},
        {"target_parameters": [], "target_modules": ["qkv"], "modules_to_save": ["fc1"]},
        {"target_modules": ["qkv"], "modules_to_save": ["head"], "bias": "all"},
    ],
    ids=["bias", "weight_and_bias", "whole_experts", "beside_others"],
)
def test_other_targets(options):
    images = images_for("vit_tiny_moe")
    model = adapt(create("vit_tiny_moe"), **options).train()
    trained = gradients(model, images)
    assert trained
    assert [name for name, gradient in trained.items() if gradient is None] == []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        adapted = model(images)
        torch.testing.assert_close(model.merge_and_unload()(images), adapted)


@pytest.mark.parametrize("name", ["vit_tiny_ewa_moe", "vit_tiny_moe"])
def test_nothing_is_made_of_experts_without_their_adapters(name, tmp_path):
    model = adapt(create(name), target_parameters=["blocks.3.mlp.fc1.weight"])
    inside = model.base_model.model
    makers = [
        lambda: timm_moe.to_dense(model),
        lambda: timm_moe.to_dense(inside),
        lambda: to_dense_(copy.deepcopy(inside)),
        lambda: timm_moe.export_dense(inside, tmp_path / "dense"),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=r"has adapters.*merge_and_unload"):
            make()
    with pytest.raises(ValueError, match=r"fc1 .*blocks\.3\.mlp has adapters.*averaged"):
        timm_moe.average_experts_(model, 0.3)
    assert list(tmp_path.iterdir()) == []


def test_shared_expert_with_adapters_is_not_left_out():
    model = adapt(create("vimoe_s14_shared"), target_parameters=[], target_modules=["shared.fc1"])
    with pytest.raises(ValueError, match=r"shared\.fc1 .*blocks\.10\.mlp has adapters"):
        timm_moe.to_dense(model)
    timm_moe.to_dense(model.merge_and_unload())


def test_averaging_refuses_trained_adapters(caplog):
    model = adapt(create()).train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1)
    with pytest.raises(ValueError, match=r"has adapters .*averaged.*share_rate=0"):
        timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=3)
    with pytest.raises(ValueError, match=r"has adapters .*averaged.*share_rate=0"):
        create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=3)
    gradients(model, images_for("vit_tiny_ewa_moe"))
    with caplog.at_level(logging.WARNING, "timm_moe"):
        optimizer.step()
    assert "nothing averages the experts" in caplog.text


def test_without_a_share_rate_adapters_train_as_they_are(caplog):
    model = adapt(create(share_rate=0.0)).train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1)
    create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=3)
    before = copy.deepcopy(model.state_dict())
    gradients(model, images_for("vit_tiny_ewa_moe"))
    with caplog.at_level(logging.WARNING, "timm_moe"):
        optimizer.step()
    assert caplog.text == ""
    changed = {
        name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])
    }
    assert changed == {name for name in before if ".lora_" in name}


def test_frozen_experts_beside_adapters_elsewhere_need_no_averaging(caplog):
    model = adapt(create(), target_parameters=[], target_modules=["qkv"]).train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1)
    create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=3)
    gradients(model, images_for("vit_tiny_ewa_moe"))
    with caplog.at_level(logging.WARNING, "timm_moe"):
        optimizer.step()
    assert caplog.text == ""


def test_averaging_goes_on_after_the_merge():
    merged = adapt(create()).merge_and_unload().requires_grad_(True)
    optimizer = torch.optim.SGD(merged.parameters(), lr=0.0)
    timm_moe.ExpertWeightAveraging(merged, optimizer, 0.75, "constant", total_updates=1)
    gradients(merged.train(), images_for("vit_tiny_ewa_moe"))
    optimizer.step()
    weight = merged.blocks[1].mlp.fc1.weight.detach()
    torch.testing.assert_close(weight, weight.mean(0, keepdim=True).expand_as(weight))


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["router"]}, {"target_parameters": ["router.weight"]}],
    ids=["saved", "adapted"],
)
def test_wrapped_routers_are_refused(options):
    """Their losses would be left out."""
    model = adapt(create("vit_tiny_moe"), **options)
    with pytest.raises(ValueError, match=r"router of blocks\.1\.mlp .*unwrapped"):
        model(images_for("vit_tiny_moe"))


def test_the_slots_of_soft_moe_are_no_target():
    model = timm_moe.convert_to_moe(
        timm.create_model("vit_tiny_patch16_224", **SMALL_VIT), router="soft"
    )
    model = peft.get_peft_model(model, peft.LoraConfig(target_parameters=["router.slots"], r=2))
    with pytest.raises(ValueError, match="leave routers unwrapped"):
        model(torch.randn(2, 3, 32, 32))


def test_modules_as_targets_are_refused_by_peft():
    with pytest.raises(ValueError, match=r"Stacked.* is not supported"):
        adapt(create(), target_parameters=[], target_modules=["blocks.1.mlp.fc1"])


@pytest.mark.parametrize("name", ["vit_tiny_ewa_moe", "vit_tiny_moe"])
def test_compiled(name):
    model, images = adapt(create(name)), images_for(name)
    expected = model.eval()(images)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(images), expected)
    model.train()
    assert_all_there(gradients(compiled, images))
