"""Other libraries in brief.

Their own files, such as test_trainer.py and test_foreign_export.py, have more, for CI.
"""

import pytest
import timm
import torch
import torchvision
from averaging_loop import spread
from common import SMALL_VIT, SMALL_VIT_KWARGS
from foreign_loop import Classifier, Images, lightning_classifier
from safetensors.torch import load_file

import timm_moe
from timm_moe_cli import main


def classifier(router):
    torch.manual_seed(0)
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    options = dict(expert_init="independent", share_rate=0.75, share_schedule="linear")
    return timm_moe.convert_to_moe(dense, router=router, **options)


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_callback_needs_no_import_of_its_module(library):
    pytest.importorskip(library)
    vars(timm_moe.integrations).pop(library, None)
    assert getattr(timm_moe.integrations, library).ExpertCallback()


def test_other_libraries_have_no_module():
    assert not hasattr(timm_moe.integrations, "keras")


@pytest.mark.parametrize("router", ["random", "top_k"])
@pytest.mark.first_case
def test_trainer(router, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from timm_moe.integrations.transformers import ExpertCallback

    args = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-2,
    )
    model = Classifier(classifier(router))
    trainer = transformers.Trainer(
        model, args, train_dataset=Images(16), callbacks=[ExpertCallback()]
    )
    trainer.train()
    assert spread(model) < 1e-6
    assert trainer.state.log_history[0]["ewa/share_rate"] == 0.375
    assert ("router/model.blocks.1.mlp/load_max" in trainer.state.log_history[1]) == (
        router == "top_k"
    )


@pytest.mark.parametrize("router", ["random", "top_k"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.first_case
def test_lightning(router, tmp_path, images):
    """Its checkpoint is a source of the commands, too."""
    lightning = pytest.importorskip("lightning")
    from timm_moe.integrations.lightning import ExpertCallback

    module = lightning_classifier(classifier(router))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ExpertCallback()],
    )
    trainer.fit(module, torch.utils.data.DataLoader(Images(16), 8))
    assert spread(module) < 1e-6
    assert trainer.callback_metrics["ewa/share_rate"] == 0.75
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    name = "vit_tiny_ewa_moe" if router == "random" else "vit_tiny_moe"
    spec = ["--model", name, "--num-classes", "5", "--model-kwargs", *SMALL_VIT_KWARGS]
    assert main(["export", "--moe", str(tmp_path / "last.ckpt"), str(tmp_path / "moe"), *spec]) == 0
    loaded = timm.create_model(f"local-dir:{tmp_path / 'moe'}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images), module.model.eval()(images))


@pytest.mark.parametrize("kind", ["transformers", "torchvision"])
def test_export(kind, tmp_path, images):
    if kind == "torchvision":
        dense = torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5)
    else:
        transformers = pytest.importorskip("transformers")
        sizes = dict(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
        )
        dense = transformers.Dinov2ForImageClassification(
            transformers.Dinov2Config(**sizes, mlp_ratio=2)
        )
    model = timm_moe.convert_to_moe(dense, expert_init="independent").eval()
    folder = timm_moe.export_dense(model, tmp_path / "dense").path
    if kind == "torchvision":
        loaded = torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5)
        loaded.load_state_dict(load_file(folder / "model.safetensors"))
        assert torch.equal(loaded.eval()(images), model(images))
    else:
        loaded = type(dense).from_pretrained(folder)
        assert torch.equal(loaded(images).logits, model(images).logits)


def test_peft(images):
    peft = pytest.importorskip("peft", minversion="0.17")
    base = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
    config = peft.LoraConfig(
        r=2, target_parameters=["fc1.weight", "fc2.weight"], init_lora_weights=False
    )
    model = peft.get_peft_model(base, config)
    model(images).sum().backward()
    adapters = {name: p.grad for name, p in model.named_parameters() if "lora" in name}
    assert adapters
    assert all(gradient is not None for gradient in adapters.values())
    with pytest.raises(ValueError, match="merge"):
        timm_moe.to_dense(model)
    expected = model.eval()(images)
    dense = timm_moe.to_dense(model.merge_and_unload())
    torch.testing.assert_close(dense(images), expected, rtol=1e-4, atol=1e-5)
