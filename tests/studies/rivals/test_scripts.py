"""Models of rivals in timm's own train.py and validate.py, and in the commands.

studies.script runs these.
"""

import json
import sys

import pytest
from common import ROOT, write_images
from processes import run_new
from train_script import needs_scripts, summary, train, validate

pytest.importorskip("scipy")


from studies import script

pytestmark = needs_scripts

SIZE = ["img_size=32", "patch_size=8", "embed_dim=32", "depth=4", "num_heads=2"]
MODELS = {
    "vmoe_mimo_s32": ["num_experts=4", "batch_repetitions=2"],
    "vit_mimo_s32": ["ensemble_size=3"],
    "vit_be_s32": ["factor_init=normal"],
}
BY_STUDIES = {"launcher": ("-m", "studies.script"), "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), {"train": 24, "test": 13})


@pytest.mark.ci
@pytest.mark.parametrize("name", MODELS)
def test_rivals_train_resume_validate_and_evaluate(images, tmp_path, name):
    model = [
        "--model",
        name,
        "--img-size",
        32,
        "--num-classes",
        3,
        "--model-kwargs",
        *SIZE,
        *MODELS[name],
    ]
    options = [*model, "--model-ema", "--layer-decay", "0.9"]
    train(tmp_path, images, *options, "--experiment", "a", epochs=2, **BY_STUDIES)
    top1 = float(summary(tmp_path / "output/train/a")[-1]["eval_top1"])
    checkpoint = tmp_path / "output/train/a/last.pth.tar"
    validated = validate(
        tmp_path, images, *model, "--checkpoint", checkpoint, "--use-ema", **BY_STUDIES
    )
    assert validated == f"{top1:.3f}"
    train(
        tmp_path,
        images,
        *options,
        "--experiment",
        "b",
        "--resume",
        checkpoint,
        epochs=3,
        **BY_STUDIES,
    )
    options = ["--json", tmp_path / "a.json", "--data-dir", images]
    command = [sys.executable, "-m", "studies.evaluation", str(checkpoint), *map(str, options)]
    done = run_new(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    members = {"vmoe_mimo_s32": 2, "vit_mimo_s32": 3, "vit_be_s32": 2}[name]
    assert json.loads((tmp_path / "a.json").read_text())["metrics"]["members"] == members
    assert (
        script.main(
            "timm-moe",
            "evaluate",
            str(checkpoint),
            "--data-dir",
            str(images),
            "--split",
            "test",
            "-j0",
        )
        == 0
    )
    if name == "vmoe_mimo_s32":
        folder = str(tmp_path / "dense")
        assert script.main("timm-moe", "export", str(checkpoint), folder) == 0
        assert (
            json.loads((tmp_path / "dense/config.json").read_text())["architecture"]
            == "vit_mimo_s32"
        )


def test_what_is_no_script_is_said():
    with pytest.raises(ValueError, match="Name a script"):
        script.main("annealed")
    with pytest.raises(ValueError, match="anneald is no callback"):
        script.main("anneald", "train.py")
