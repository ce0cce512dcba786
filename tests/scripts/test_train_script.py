"""timm's own train.py and validate.py, unmodified, on a folder of images.

timm's wheel lacks them: set TIMM_SCRIPTS to a folder with copies of them. It must not be a clone of
timm, which Python would import instead of the installed one.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import timm
import torch
from common import ROOT, write_images
from processes import HUB_CACHE, run_script
from safetensors.torch import save_file
from timm.models import save_for_hf
from train_script import SCRIPTS, WORKERS, needs_scripts, script, summary, train, validate

import timm_moe
from timm_moe.analysis import data
from timm_moe.analysis.evaluation import evaluate
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.training.epoch_log import read_epochs
from timm_moe_cli import main

pytestmark = needs_scripts


#: A quarter of the registered model's width and of its patches: a step takes a tenth of the time.
SMALL = dict(patch_size=8, embed_dim=48, num_heads=3)


def small(name, *options):
    """Return train.py's arguments for such a model with further model options."""
    kwargs = [f"{option}={value}" for option, value in SMALL.items()]
    return ["--model", name, "--num-classes", 3, "--model-kwargs", *kwargs, *options]


XTINY, ROUTED = small("vit_xtiny_ewa_moe"), small("vit_xtiny_moe")


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    """Train for two epochs with one loader process; return the folder and the log."""
    folder = tmp_path_factory.mktemp("run")
    return folder, train(folder, images, *XTINY, "-j", 1, "--experiment", "a")


def test_trains_with_averaging_and_says_so_once(run):
    folder, log = run
    assert log.count("EWA") == 1
    assert (
        "EWA: averaging the 4 experts of 4 layers after every optimizer step, share rate 0.3, "
        "schedule linear" in log
    )
    checkpoint = torch.load(folder / "output/train/a/last.pth.tar", weights_only=False)
    assert checkpoint["optimizer"]["param_groups"][0]["ewa_updates"] == 12


@pytest.mark.ci
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet10t"])
def test_a_dense_model_trains_bit_for_bit_as_without_the_package(name, images, tmp_path):
    options = ["--model", name, "--num-classes", 3]
    if name.startswith("vit"):
        options = small(name, "depth=2", "img_size=32")
    options += [
        "--img-size",
        32,
        "--layer-decay",
        0.8,
        "--clip-grad",
        1.0,
        "--model-ema",
        "--mixup",
        0.5,
    ]
    for autoload in ("1", "0"):
        train(tmp_path, images, *options, "--experiment", autoload, autoload=autoload)
    with_package, without = (
        torch.load(tmp_path / f"output/train/{autoload}/last.pth.tar", weights_only=False)
        for autoload in ("1", "0")
    )
    for part in ("state_dict", "state_dict_ema"):
        for path, tensor in without[part].items():
            assert torch.equal(with_package[part][path], tensor), path
    assert str(with_package["optimizer"]) == str(without["optimizer"])


def test_a_file_beside_the_summary_tells_of_the_experts_in_each_epoch(run, images):
    folder, log = run
    epochs = read_epochs(folder / "output/train/a")
    assert [entry["epoch"] for entry in epochs] == [0, 1]
    assert epochs[0]["share_rate"] < epochs[1]["share_rate"] <= 0.3
    assert list(epochs[0]["layers"]) == [f"blocks.{block}.mlp" for block in (1, 3, 5, 7)]
    assert (
        0
        < epochs[1]["layers"]["blocks.1.mlp"]["spread"]
        < epochs[0]["layers"]["blocks.1.mlp"]["spread"]
        < 2
    )
    assert "is not in" not in log


def test_the_exported_model_scores_what_training_and_validation_measured(run, images, tmp_path):
    folder, _ = run
    checkpoint = folder / "output/train/a/last.pth.tar"
    export = timm_moe.export_dense(checkpoint, tmp_path / "vit")
    expert = validate(tmp_path, images, *XTINY, "--checkpoint", checkpoint)
    stock = validate(
        tmp_path, images, "--model", f"local-dir:{export.path}", "--pretrained", autoload="0"
    )
    last = summary(folder / "output/train/a")[-1]
    assert expert == stock == f"{float(last['eval_top1']):.3f}"
    assert float(last["eval_top1"]) > 60  # three colors are easily told apart


def test_the_model_card_says_what_train_py_measured(run):
    folder, _ = run
    card = timm_moe.push_dense(
        folder / "output/train/a/checkpoint-0.pth.tar", "user/vit", dry_run=True
    ).card
    assert (
        f"| top-1 accuracy (%) | {float(summary(folder / 'output/train/a')[0]['eval_top1']):.6g} |"
        in card
    )
    assert "| epochs | `2` |" in card


def test_resume_goes_on_where_it_stopped(run, images):
    folder, _ = run
    checkpoint = folder / "output/train/a/checkpoint-0.pth.tar"
    log = train(folder, images, *XTINY, "--experiment", "b", "--resume", checkpoint)
    assert "over 12 updates, continuing after update 6." in log
    assert [row["epoch"] for row in summary(folder / "output/train/b")] == ["1"]
    state = torch.load(folder / "output/train/b/last.pth.tar", weights_only=False)["optimizer"]
    assert state["param_groups"][0]["ewa_updates"] == 12
    log = train(
        folder, images, *XTINY, "--experiment", "c", "--resume", checkpoint, "--no-resume-opt"
    )
    assert "the share rate continues after update 6 of 12" in log
    state = torch.load(folder / "output/train/c/last.pth.tar", weights_only=False)["optimizer"]
    assert state["param_groups"][0]["ewa_updates"] == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sched", "step", "--decay-epochs", "100", "--sched-on-updates"], "over 6 updates."),
        (["--clip-grad", "0.01", "--clip-mode", "agc"], "over 6 updates."),
        (
            small("vit_xtiny_ewa_moe", "share_rate=0.5", "share_schedule=early", "num_experts=3"),
            "share rate 0.5, schedule early",
        ),
    ],
)
@pytest.mark.first_case
def test_options_that_the_pairs_lack(images, tmp_path, options, message):
    log = train(tmp_path, images, *XTINY, *options, epochs=1)
    assert log.count("EWA: averaging") == 1
    assert message in log


@pytest.mark.ci
def test_device_modules_says_it_explicitly(images, tmp_path):
    log = train(tmp_path, images, *XTINY, "--device-modules", "timm_moe", epochs=1, autoload="0")
    assert log.count("EWA: averaging") == 1


def test_upcycling_from_the_command_line(images, tmp_path):
    """Both options take a dense checkpoint of the stock model.

    They are --pretrained-path and --initial-checkpoint.
    """
    dense = timm.create_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=32, depth=9, mlp_ratio=2, **SMALL
    )
    torch.save({"state_dict": dense.state_dict()}, tmp_path / "dense.pth")
    roads = (["--pretrained", "--pretrained-path"], ["--initial-checkpoint"])
    for number, road in enumerate(roads):
        still = ["--lr", 1e-30, "--experiment", number]  # train.py takes 0 for no rate.
        log = train(tmp_path, images, *XTINY, *road, tmp_path / "dense.pth", *still, epochs=1)
        assert log.count("EWA: averaging") == 1
        file = tmp_path / f"output/train/{number}/last.pth.tar"
        weights = torch.load(file, weights_only=False)["state_dict"]
        for expert in weights["blocks.1.mlp.fc1.weight"]:
            torch.testing.assert_close(expert, dense.blocks[1].mlp.fc1.weight.detach())


@pytest.mark.parametrize("size", ["tiny", "small"])
@pytest.mark.first_case
def test_pretrained_from_the_hub_and_nothing_else_on_the_line(tmp_path, size):
    """Run the README's first command.

    Weights come from the Hub's cache, since tests have no network.
    """
    repo = HUB_CACHE / f"models--timm--vit_{size}_patch16_224.augreg_in21k_ft_in1k"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    save_file(
        timm.create_model(f"vit_{size}_patch16_224").state_dict(), snapshot / "model.safetensors"
    )
    images = write_images(tmp_path / "images", {"train": 1, "validation": 1})
    short = ("--epochs", 1, "-b", 3, "-j", WORKERS, "--device", "cpu")
    model = f"vit_{size}_ewa_moe"
    log = script(
        "train.py", tmp_path, "--model", model, "--data-dir", images, "--pretrained", *short
    )
    assert "Loading pretrained weights from Hugging Face hub" in log
    assert log.count("EWA: averaging the 4 experts of 6 layers") == 1


# --- routed experts: train.py's loss has the routers' losses, its log has statistics of the routing


def routing_lines(log):
    """Find the layer and the balance loss in each line on routing."""
    return re.findall(
        r"Routing in (blocks\.\d+\.mlp): balance loss ([\d.]+), dropped [\d.]+%, "
        "share of an expert min/mean/max",
        log,
    )


def test_routed_experts_train_and_validate_and_each_epoch_tells_of_the_routing(images, tmp_path):
    log = train(tmp_path, images, *ROUTED, "--experiment", "a", epochs=3)
    assert [layer for layer, _ in routing_lines(log)] == [
        f"blocks.{block}.mlp" for block in (1, 3, 5, 7)
    ] * 3
    assert "EWA" not in log
    last = summary(tmp_path / "output/train/a")[-1]
    assert float(last["eval_top1"]) > 60
    checkpoint = tmp_path / "output/train/a/last.pth.tar"
    validated = validate(tmp_path, images, *ROUTED, "--checkpoint", checkpoint)
    assert validated == f"{float(last['eval_top1']):.3f}"
    log = train(tmp_path, images, *ROUTED, "--experiment", "b", "--resume", checkpoint, epochs=4)
    assert len(routing_lines(log)) == 4


def test_the_routers_losses_are_in_the_loss_that_train_py_logs(images, tmp_path):
    first = {}
    for weight in (0, 10):
        log = train(
            tmp_path, images, *small("vit_xtiny_moe", f"aux_loss_weight={weight}"), epochs=1
        )
        first[weight] = float(re.search(r"Loss: ([\d.]+)", log)[1])
    assert first[10] - first[0] > 4 * 10 * 0.9  # four layers, each with a balance loss of about 1


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        ["--grad-accum-steps", "4", "--clip-grad", "1"],
        ["--aug-splits", "3", "--aa", "original", "--jsd-loss"],
        ["--amp", "--amp-dtype", "bfloat16", "--model-ema"],
        ["--mixup", "0.8", "--cutmix", "1", "--bce-loss"],
        ["--grad-checkpointing", "--smoothing", "0.1"],
        ["--torchcompile", "aot_eager"],
    ],
)
def test_options_of_train_py_with_routed_experts(images, tmp_path, options):
    log = train(tmp_path, images, *ROUTED, *options, epochs=1)
    assert len(routing_lines(log)) == 4


@pytest.fixture
def teacher(tmp_path):
    """Save a small teacher; return train.py's options for it."""
    arguments = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3)
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    save_for_hf(model, str(tmp_path / "teacher"), model_args=arguments, safe_serialization=True)
    return ["--kd-model-name", f"local-dir:{tmp_path / 'teacher'}"]


@pytest.mark.ci
def test_distillation_into_routed_experts(images, tmp_path, teacher):
    log = train(tmp_path, images, *ROUTED, *teacher, "--task-loss-weight", "0.5", epochs=1)
    assert len(routing_lines(log)) == 4


@pytest.mark.ci
def test_early_ewa(images, tmp_path):
    log = train(tmp_path, images, *small("vit_xtiny_moe", "share_schedule=early"))
    assert (
        "averaging the 4 experts of 4 layers after every optimizer step, share rate 0.3, schedule "
        "early" in log
    )
    assert len(routing_lines(log)) == 8


def test_v_moe_from_the_command_line(images, tmp_path):
    size = ["img_size=32", "patch_size=8", "embed_dim=32", "depth=4", "num_heads=2"]
    options = [*size, "num_experts=6", "group_images=4"]
    arguments = [
        "--model",
        "vmoe_s32",
        "--img-size",
        32,
        "--num-classes",
        3,
        "--model-kwargs",
        *options,
    ]
    log = train(tmp_path, images, *arguments, "--opt", "sgd", epochs=1)
    assert (
        len(
            re.findall(
                r"Routing in blocks.[13].mlp: importance loss [\d.e-]+, load loss [\d.e-]+, "
                "dropped",
                log,
            )
        )
        == 2
    )


def test_groups_that_do_not_divide_the_batch_end_in_a_sentence(images, tmp_path):
    with pytest.raises(AssertionError, match=r"group_images=5 .*12 images; 1, 2, 3, 4, 6, 12 "):
        train(tmp_path, images, *small("vit_xtiny_moe", "group_images=5"), epochs=1)


# --- the families: each trains and validates by the unmodified scripts

SIZE = ["img_size=32", "patch_size=8", "embed_dim=32", "depth=4", "num_heads=2"]
FAMILIES = {
    "vmoe_pbe_s32": ["num_experts=4"],
    "vimoe_s14_shared": ["num_experts=3"],
    "vit_xtiny_moe": [
        "num_experts=8",
        "top_k=4",
        "expert_width=0.25",
        "shared_expert=True",
        "expert_init=drop",
    ],
    "soft_moe_s16": ["num_experts=3", "moe_layers=tail-2", "slots_per_expert=2"],
    "vit_tiny_moe": ["router=expert_choice", "num_experts=3"],
    "vmoe_s32": [
        "num_experts=4",
        "score=sigmoid",
        "gate_mode=renorm",
        "balance=bias",
        "z_loss_weight=0.001",
    ],
    "widenet_b": ["official_compat=True", "routing_groups=2"],
}


def family(name, *options):
    return [
        "--model",
        name,
        "--img-size",
        32,
        "--num-classes",
        3,
        "--model-kwargs",
        *SIZE,
        *FAMILIES[name],
        *options,
    ]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.first_case
def test_families_train_resume_and_validate(images, tmp_path, name):
    options = [*family(name), "--model-ema", "--layer-decay", "0.9"]
    log = train(tmp_path, images, *options, "--experiment", "a", epochs=3)
    has_losses = not name.startswith(("soft_moe", "vit_tiny_moe"))
    assert ("Routing in blocks." in log) == has_losses
    last = summary(tmp_path / "output/train/a")[-1]
    checkpoint = tmp_path / "output/train/a/last.pth.tar"
    validated = validate(tmp_path, images, *family(name), "--checkpoint", checkpoint, "--use-ema")
    assert validated == f"{float(last['eval_top1']):.3f}"
    train(tmp_path, images, *options, "--experiment", "b", "--resume", checkpoint, epochs=4)
    members = 2 if name == "vmoe_pbe_s32" else 1
    inference = data.Inference(batch_size=8, workers=1, device="cpu")
    result = evaluate(
        [checkpoint], data.image_folder(images, "test"), use_ema=True, inference=inference
    )
    assert (result["members"], round(100 - 100 * result["error"], 3)) == (members, float(validated))


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        ["--mixup", "0.8", "--cutmix", "1", "--smoothing", "0.1"],
        ["--aug-splits", "3", "--aa", "original", "--jsd-loss"],
        ["--mixup", "0.8", "--bce-loss", "--grad-accum-steps", "2"],
        ["--amp", "--amp-dtype", "bfloat16", "--grad-checkpointing"],
        ["--torchcompile", "aot_eager"],
    ],
)
def test_options_of_train_py_with_an_ensemble(images, tmp_path, options):
    log = train(tmp_path, images, *family("vmoe_pbe_s32"), *options, epochs=1)
    assert len(re.findall(r"Routing in blocks\.[13]\.mlp", log)) == 2


def test_an_ensemble_is_no_student(images, tmp_path, teacher):
    if (
        "DistillationTeacher(" in Path(SCRIPTS, "train.py").read_text()
        and timm.__version__ != "1.0.23"
    ):
        pytest.skip("this train.py makes a teacher as timm 1.0.23 does")
    with pytest.raises(AssertionError, match=r"LogitDistillationTask .*train an ensemble"):
        train(tmp_path, images, *family("vmoe_pbe_s32"), *teacher, epochs=1)


@pytest.mark.ci
@pytest.mark.parametrize("method", ["average", "svd"])
def test_a_student_is_refined_with_its_expert_model_as_teacher(images, tmp_path, method):
    """Run the README's commands."""
    train(tmp_path, images, *family("widenet_b"), "--experiment", "teacher", epochs=3)
    checkpoint = str(tmp_path / "output/train/teacher/last.pth.tar")
    assert main(["export", "--moe", checkpoint, str(tmp_path / "teacher-folder")]) == 0
    assert main(["export", checkpoint, str(tmp_path / "student-folder"), "--method", method]) == 0
    log = train(
        tmp_path,
        images,
        "--model",
        f"local-dir:{tmp_path / 'student-folder'}",
        "--pretrained",
        "--num-classes",
        3,
        *("--kd-model-name", f"local-dir:{tmp_path / 'teacher-folder'}", "--kd-temperature", 1),
        "--task-loss-weight",
        0.25,
        "--distill-loss-weight",
        0.75,
        "--experiment",
        "student",
        epochs=2,
    )
    assert "Routing in" not in log  # the teacher is not trained
    assert float(summary(tmp_path / "output/train/student")[-1]["eval_top1"]) > 50
    spec = ModelSpec(f"local-dir:{tmp_path / 'student-folder'}")
    export = timm_moe.export_dense(
        tmp_path / "output/train/student/last.pth.tar", tmp_path / "refined", spec=spec
    )
    assert export.exact
    assert export.architecture == "ones_b"


def test_validate_says_that_routers_are_untrained(images, tmp_path):
    """A dense file has the name of a routed model.

    Training from it is upcycling, validating it is a mistake.
    """
    torch.save(
        timm.create_model("vit_xtiny", num_classes=3, **SMALL).state_dict(), tmp_path / "dense.pth"
    )
    files = ("--data-dir", images, "--split", "test", "--checkpoint", tmp_path / "dense.pth")
    for options in (ROUTED, XTINY):
        log = script(
            "validate.py", tmp_path, *options, *files, "-b", 12, "-j", WORKERS, "--device", "cpu"
        )
        assert log.count("routers are untrained") == (options is ROUTED)


def test_evaluate_measures_what_validate_does(run, images, tmp_path):
    checkpoint = run[0] / "output/train/a/last.pth.tar"
    validated = validate(tmp_path, images, *XTINY, "--checkpoint", checkpoint, "-b", 8)
    inference = data.Inference(batch_size=8, workers=1, device="cpu")
    result = evaluate([checkpoint], data.image_folder(images, "test"), inference=inference)
    assert round(100 - 100 * result["error"], 3) == float(validated)


@pytest.mark.parametrize("class_map", ["classes.txt", ""])
@pytest.mark.first_case
def test_evaluate_sees_the_images_and_classes_that_validate_does(images, tmp_path, class_map):
    """A hidden folder is a class for timm.

    Other endings are no images, and a class map renumbers.
    """
    shutil.copytree(images / "test", tmp_path / "data/test")
    shutil.copytree(images / "test/class0", tmp_path / "data/test/.ipynb_checkpoints")
    shutil.copy(images / "test/class0/0.png", tmp_path / "data/test/class1/0.webp")
    shutil.copy(images / "test/class0/0.png", tmp_path / "data/test/class1/1.PNG")
    names = ["class2", ".ipynb_checkpoints", "class0", "class1"]
    (tmp_path / "data/test/classes.txt").write_text("\n".join(names))
    model = timm.create_model("vit_xtiny", num_classes=4, **SMALL)
    torch.nn.init.normal_(model.head.weight)
    torch.save(model.state_dict(), tmp_path / "vit.pth")
    options = ["--model", "vit_xtiny", "--num-classes", 4, "--checkpoint", tmp_path / "vit.pth"]
    kwargs = [f"{option}={value}" for option, value in SMALL.items()]
    mapped = ["--class-map", class_map] if class_map else []
    validated = validate(tmp_path, tmp_path / "data", *options, "--model-kwargs", *kwargs, *mapped)
    inference = data.Inference(batch_size=8, workers=0, device="cpu")
    found = data.image_folder(tmp_path / "data", "test", class_map)
    result = evaluate(
        [tmp_path / "vit.pth"], found, spec=ModelSpec("vit_xtiny", 4, SMALL), inference=inference
    )
    assert result["images"] == 4 * 13 + 1
    assert round(100 * result["accuracy"], 3) == float(validated)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", ["vit_xtiny", "swin_tiny_patch2_window4_32", "pit_xs_32", "t2t_i2_32"]
)
def test_small_data_models_with_shifted_patches_and_locality_attention(images, tmp_path, name):
    size = ["embed_dim=48", "depth=3"] if name == "vit_xtiny" else []
    options = [
        "--num-classes",
        3,
        "--model-kwargs",
        "shifted_patches=True",
        "locality_attention=True",
        *size,
    ]
    log = train(
        tmp_path, images, "--model", f"{name}_ewa_moe", *options, "--experiment", "a", epochs=1
    )
    assert log.count("EWA: averaging") == 1
    checkpoint = tmp_path / "output/train/a/last.pth.tar"
    assert timm_moe.export_dense(checkpoint, tmp_path / "dense").architecture == name
    dense = validate(tmp_path, images, "--model", f"local-dir:{tmp_path}/dense", "--pretrained")
    assert dense == f"{float(summary(tmp_path / 'output/train/a')[-1]['eval_top1']):.3f}"


@pytest.mark.ci
def test_a_router_of_ones_own_trains_exports_and_is_shown(images, tmp_path):
    """Run train.py and timm-moe as they are with examples/own_router.py."""
    example = ROOT / "examples/own_router.py"
    options = ("--model-kwargs", "router=sparse_gate", "top_k=2", "embed_dim=48", "depth=4")
    data = ("--data-dir", images, "-b", 12, "-j", WORKERS, "--device", "cpu")
    done = run_script(
        *(
            example,
            Path(SCRIPTS, "train.py"),
            "--model",
            "vit_xtiny_ewa_moe",
            "--num-classes",
            3,
            *data,
        ),
        *(
            "--val-split",
            "test",
            "--epochs",
            1,
            "--warmup-epochs",
            0,
            "--opt",
            "adamw",
            "--lr",
            "2e-3",
        ),
        *("--experiment", "a", *options),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    checkpoint = tmp_path / "output/train/a/last.pth.tar"
    weights = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert sum("router.weight" in name for name in weights) == 2
    with pytest.raises(ValueError, match=r"router .*register_router"):
        timm_moe.export_dense(checkpoint, tmp_path / "student")
    command = Path(sys.executable).with_name("timm-moe")
    done = run_script(
        example, command, "export", checkpoint, "student", "--method", "sum", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (
        type(timm.create_model(f"local-dir:{tmp_path}/student", pretrained=True)).__name__
        == "VisionTransformer"
    )
    shown = (example, command, "routes", checkpoint, "routes", *data, "--split", "test")
    done = run_script(*shown, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "routes/routes.json").read_text())
    for layer in summary["layers"]:
        assert sum(layer["load"]) == pytest.approx(1)
