"""MC dropout: samples share what comes before the dropout, and are evaluated as members."""

import json
import sys

import pytest
import torch
from common import OPTIONS, make_model, save_as_train_py, write_images

pytest.importorskip("torchmetrics")

from studies import evaluation
from studies.rivals import with_samples
from timm_moe import moe_layers
from timm_moe.analysis.data import Inference, image_folder
from timm_moe.analysis.evaluation import evaluate

HERE = Inference(batch_size=7, workers=0, device="cpu")


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    classes = [f"class{label}" for label in range(5)]
    return write_images(tmp_path_factory.mktemp("data"), {"val": 6}, classes)


def with_dropout(name="vit_small_moe", **options):
    torch.manual_seed(3)
    return make_model(name, **{"expert_dropout": 0.5, **options})


@pytest.mark.parametrize(
    ("name", "first"), [("vit_small_moe", 1), ("widenet_b", 0), ("vit_tiny_ewa_moe", 1)]
)
def test_mc_dropout_samples_members_that_share_what_comes_before(name, first):
    model = with_dropout(name)
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        alone = model(x)
        rows = []
        handles = [
            block.register_forward_hook(lambda _, inputs, output: rows.append(len(output)))
            for block in model.blocks
        ]
        samples = with_samples(model, 3).forward_members(x)
        for handle in handles:
            handle.remove()
        assert rows == [4] * first + [12] * (4 - first)
        assert not torch.allclose(samples[:, 0], samples[:, 1])
        assert torch.equal(model(x), alone)
        for layer in moe_layers(model).values():
            for dropout in (layer.drop1, layer.drop2):
                dropout.p = 1e-9  # as good as none: every sample is the model
        torch.testing.assert_close(model.forward_members(x), alone[:, None].expand(-1, 3, -1))


def test_mc_dropout_is_evaluated_as_members(splits):
    result = evaluate(
        [with_samples(with_dropout(), 4)], image_folder(splits, "val"), inference=HERE
    )
    assert result["members"] == 4
    assert result["pairwise_kl"] > 0
    models = [with_samples(with_dropout(name), 2) for name in ("vit_small_moe", "vit_tiny_ewa_moe")]
    assert evaluate(models, image_folder(splits, "val"), inference=HERE)["members"] == 4


def test_mc_dropout_by_the_command(splits, tmp_path, monkeypatch):
    stated = {"model_kwargs": {**OPTIONS, "expert_dropout": 0.5}, "img_size": 32}
    checkpoint = save_as_train_py(tmp_path / "a.pth.tar", with_dropout(), "vit_small_moe", **stated)
    data = ["--data-dir", str(splits), "--split", "val", "--json", str(tmp_path / "a.json")]
    for options, members in (["--mc-dropout", "3"], 3), ([], 1):
        monkeypatch.setattr(sys, "argv", ["evaluation", str(checkpoint), *data, *options])
        evaluation.main()
        metrics = json.loads((tmp_path / "a.json").read_text())["metrics"]
        assert metrics["members"] == members
        assert metrics.get("pairwise_kl", 0) > 0 or members == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit_tiny_patch16_224", {}, "no experts with dropout"),
        ("vit_small_moe", {}, "no experts with dropout: .*--model-kwargs expert_dropout"),
        ("vmoe_pbe_s32", dict(num_experts=4), "members of its own"),
        ("eva02_tiny_patch14_224_ewa_moe", {}, "not .*Eva"),
    ],
)
def test_models_that_mc_dropout_cannot_sample_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        with_samples(make_model(name, **options), 2)
    with pytest.raises(ValueError, match="2 samples, got 1"):
        with_samples(with_dropout(), 1)
