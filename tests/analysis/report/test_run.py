"""The section on the training run, from the files that training leaves."""

import json
import time

import pytest
from common import make_model

import timm_moe.analysis.report
from timm_moe.analysis.data import image_folder
from timm_moe.analysis.report import write_report
from timm_moe.analysis.report.sections.run import read_run, run_of_model, run_section
from timm_moe.checkpoints.model_spec import Origin
from timm_moe.checkpoints.summary_csv import read_summary
from timm_moe.training.epoch_log import FILE


def test_the_run_tells_whether_experts_came_together(tmp_path):
    assert run_section(read_run(None)) is None
    assert run_section(read_run(tmp_path)) is None
    (tmp_path / "summary.csv").write_text(
        "epoch,train_loss,eval_loss,eval_top1,lr\n0,2.0,1.5,40,0.1\n1,1.0,1.2,60,0.1\n1,1.0,1.3,58,0.1\n2,nan,1.4,,0\n"
    )
    epochs = [
        {
            "epoch": epoch,
            "share_rate": 0.1,
            "layers": {"a": {"spread": 0.4 / (1 + epoch)}, "b": {"spread": None}},
        }
        for epoch in range(3)
    ]
    (tmp_path / FILE).write_text(json.dumps({"epochs": epochs}))
    parts = parts_of(tmp_path)
    told = parts["Did the experts come together?"].text
    assert told.startswith(
        "They came closer to each other. Averaging was on. Their distance from their mean was 0.4 "
    )
    assert "0.4 after epoch 0 and 0.133 after epoch 2, on average over the layers" in told
    assert parts["Does the loss still fall?"].text == (
        "The evaluation loss was lowest in epoch 1: 1.3. In the last epoch, 2, it was 1.4. The "
        "training loss is that of augmented images, with any label smoothing and routers' losses "
        "in it. Left out: epoch 2, where it was not a finite number. The run may have diverged "
        "there."
    )
    assert parts["How accurate was it in each epoch?"].text.startswith(
        "Top-1 on the run's validation images ended at 58.00 %; the best was 58.00 %"
    )
    (tmp_path / FILE).write_text("[")
    with pytest.raises(ValueError, match="is damaged"):
        read_run(tmp_path)


def test_a_long_summary_takes_linear_time_and_a_damaged_one_is_named(tmp_path):
    rows = [f"{epoch},nan,1.0" for epoch in range(10_000)]
    file = tmp_path / "summary.csv"
    file.write_text("\n".join(["epoch,train_loss,eval_loss", *rows]))
    started = time.process_time()
    assert "epochs 0 to 9999" in parts_of(tmp_path)["Does the loss still fall?"].text
    assert time.process_time() - started < 5
    file.write_text("epoch,train_loss\n0,much\n")
    with pytest.raises(ValueError, match=r"summary\.csv is damaged: .*'much'"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        dict(epoch="0", share_rate=0.1, layers={}),
        dict(epoch=0, share_rate="0.1", layers={}),
        dict(epoch=0, share_rate=0.1, layers=[]),
        dict(epoch=0, share_rate=0.1, layers={"a": 1}),
        dict(epoch=0, share_rate=0.1, layers={"a": {"load": ["x"]}}),
        dict(epoch=0, share_rate=0.1, layers={"a": {"losses": {"z": []}}}),
    ],
)
def test_an_odd_log_of_epochs_is_named(tmp_path, entry):
    (tmp_path / FILE).write_text(json.dumps({"epochs": [entry]}))
    with pytest.raises(ValueError, match=r"experts\.json is damaged"):
        read_run(tmp_path)


def test_what_the_routers_did_in_training_is_told(tmp_path):
    loads = [[0.3, 0.3, 0.4], [0.02, 0.48, 0.5]]
    layers = [
        {"spread": 1.0, "losses": {"balance": 1.1}, "load": load, "dropped": 0.25} for load in loads
    ]
    epochs = [
        {"epoch": epoch, "share_rate": None, "layers": {"a": layer}}
        for epoch, layer in enumerate(layers)
    ]
    (tmp_path / FILE).write_text(json.dumps({"epochs": epochs}))
    parts = parts_of(tmp_path)
    told = parts["Is every expert used in training?"].text
    assert told.startswith(
        "In the last epoch, 1, these had less than a tenth of an even share: expert 0 of a."
    )
    assert (
        "up to 25.0% of a layer's choices were dropped"
        in parts["How many choices found no place?"].text
    )
    (tmp_path / FILE).write_text(json.dumps({"epochs": epochs[:1]}))
    told = parts_of(tmp_path)["Is every expert used in training?"].text
    assert told.startswith("In the last epoch, 0, none had less than a tenth of an even share.")


@pytest.mark.parametrize("first", ["epoch,train_loss,eval_loss,lr", "epoch,train_loss,lr"])
def test_rows_are_read_by_the_head_above_them(tmp_path, first):
    """A run without validation has other columns than one with it in the same folder."""
    second = ({"epoch,train_loss,eval_loss,lr", "epoch,train_loss,lr"} - {first}).pop()
    rows = {"epoch,train_loss,eval_loss,lr": "2.0,1.5,0.1", "epoch,train_loss,lr": "2.0,0.1"}
    lines = [first, f"0,{rows[first]}", second, f"1,{rows[second]}"]
    (tmp_path / "summary.csv").write_text("\n".join(lines))
    read = read_summary(tmp_path, ["eval_loss", "lr"])
    assert [row["lr"] for row in read] == [0.1, 0.1]
    assert [row.get("eval_loss") for row in read] == (
        [1.5, None] if "eval" in first else [None, 1.5]
    )


def test_a_run_that_follows_another_in_its_folder_is_the_one_that_is_told(tmp_path):
    """train.py appends to the file when an experiment of the same name begins again."""
    rows = [(epoch, 80 + epoch) for epoch in range(10)] + [(epoch, epoch) for epoch in range(5)]
    lines = [f"{epoch},{accuracy}" for epoch, accuracy in rows]
    (tmp_path / "summary.csv").write_text("\n".join(["epoch,eval_top1", *lines]))
    told = parts_of(tmp_path)["How accurate was it in each epoch?"].text
    assert (
        told
        == "Top-1 on the run's validation images ended at 4.00 %; the best was 4.00 % in epoch 4."
    )


def test_experts_that_another_run_left_in_the_folder_are_not_the_models(tmp_path):
    layers = {"blocks.1.mlp": {"spread": 0.5}, "blocks.3.mlp": {"spread": 0.5}}
    epochs = [{"epoch": 0, "share_rate": 0.3, "layers": layers}]
    (tmp_path / FILE).write_text(json.dumps({"epochs": epochs}))
    run = read_run(tmp_path)
    assert run_of_model(run, make_model("vit_tiny_ewa_moe")).epochs == epochs
    for model in ("vit_tiny_patch16_224", "widenet_b"):
        assert run_of_model(run, make_model(model)).epochs == []


def parts_of(folder, origin=None):
    return {part.title: part for part in run_section(read_run(folder), origin=origin).parts}


@pytest.mark.parametrize(
    ("train_args", "title"),
    [
        ({}, "loss"),
        ({"model": "vit_tiny"}, "cross-entropy"),
        ({"bce_loss": True}, ["training: binary cross-entropy", "evaluation: cross-entropy"]),
        ({"loss": "bce"}, ["training: binary cross-entropy", "evaluation: cross-entropy"]),
        ({"model": "vit_tiny", "kd_model_name": "vit_small"}, "loss"),
    ],
)
def test_the_axis_names_the_loss(tmp_path, train_args, title):
    (tmp_path / "summary.csv").write_text("epoch,train_loss,eval_loss\n0,2.0,1.5\n")
    origin = Origin("last.pth.tar", train_args=train_args)
    chart = parts_of(tmp_path, origin)["Does the loss still fall?"].chart
    assert chart["encoding"]["y"]["title"] == title


@pytest.mark.parametrize("is_of_ema", [False, True])
def test_curves_of_ema_weights_are_named(tmp_path, is_of_ema):
    (tmp_path / "summary.csv").write_text(
        "epoch,train_loss,eval_loss,eval_top1\n0,2.0,1.5,40\n1,1.0,1.2,60\n"
    )

    def told(**train_args):
        parts = parts_of(tmp_path, Origin("last.pth.tar", train_args=train_args, ema=is_of_ema))
        losses, accuracies = list(parts.values())
        named = {row["images"] for row in losses.chart["data"]["values"]}
        named |= {row["accuracy"] for row in accuracies.chart["data"]["values"]}
        return named, accuracies.text

    plain = (
        "Top-1 on the run's validation images ended at 60.00 %; the best was 60.00 % in epoch 1."
    )
    named, text = told(model_ema=True, model_ema_force_cpu=True)  # measures the other weights
    assert named == {"training", "evaluation", "top-1"}
    assert text.startswith(plain)
    assert ("The other sections are of the EMA weights." in text) is is_of_ema
    named, text = told(model_ema=True)
    assert named == {"training", "evaluation, EMA weights", "top-1, EMA weights"}
    assert text.startswith(plain)
    assert ("--use-ema takes the EMA weights" in text) is not is_of_ema


def write_epochs(folder, spreads, share_rate=0.1, first=0):
    epochs = [
        {"epoch": epoch, "share_rate": share_rate, "layers": {"a": {"spread": value}}}
        for epoch, value in enumerate(spreads, first)
    ]
    (folder / FILE).write_text(json.dumps({"epochs": epochs}))


@pytest.mark.parametrize(
    ("spreads", "verdict"),
    [
        ([0.02, 0.02], "They were together from epoch 3 on."),
        ([1.5, 0.01], "They came together."),
        ([1.5, 1.5], "Their distance hardly changed."),
        ([1.0, 1.5], "They moved apart."),
        ([1.0], "They are not together."),
    ],
)
def test_whether_experts_are_together_is_judged_by_where_they_end(spreads, verdict, tmp_path):
    write_epochs(tmp_path, spreads, first=3)
    told = parts_of(tmp_path)["Did the experts come together?"].text
    assert told.startswith(f"{verdict} Averaging was on.")
    assert f"{spreads[0]:.3g} after epoch 3" in told


def test_without_averaging_there_is_no_verdict(tmp_path):
    for rate, told in (
        (None, "Nothing averaged the experts. "),
        (0.0, "experts (the share rate was 0 at the end of each epoch). "),
    ):
        write_epochs(tmp_path, [1.5, 1.4], rate)
        parts = parts_of(tmp_path)
        assert "Did the experts come together?" not in parts
        assert told in parts["How far apart are the experts in training?"].text
        assert parts["How far apart are the experts in training?"].text.startswith(
            "Their distance hardly changed."
        )


def test_a_run_that_diverged_has_a_report(tmp_path):
    (tmp_path / "summary.csv").write_text(
        "epoch,train_loss,eval_loss,eval_top1,eval_top5\n5,2,1.5,nan,90\n6,nan,nan,nan,80\n7,nan,nan,nan,80\n9,inf,,,\n"
    )
    layers = [{"spread": 1.0, "losses": {"balance": 1.0}, "load": [0.5, 0.5], "dropped": 0.1}]
    layers += [{"spread": None, "losses": {"balance": None}, "load": [0.0, None], "dropped": None}]
    epochs = [
        {"epoch": epoch, "share_rate": None, "layers": {"a": layer}}
        for epoch, layer in enumerate(layers)
    ]
    (tmp_path / FILE).write_text(json.dumps({"epochs": epochs}))
    parts = parts_of(tmp_path)
    lost = "where it was not a finite number. The run may have diverged there."
    told = parts["Does the loss still fall?"].text
    assert told.startswith(
        "The evaluation loss was lowest in the last epoch, 5: 1.5. The training loss is that of "
    )
    assert told.endswith(f"in it. Left out: epochs 6 to 7 and 9, {lost}")
    assert parts["How accurate was it in each epoch?"].text == f"Left out: epochs 5 to 7, {lost}"
    assert parts["What did the routers' losses do?"].text.endswith(
        f"1 for balance. Left out: epoch 1, {lost}"
    )
    (tmp_path / "summary.csv").write_text("epoch,train_loss\n0,nan\n")
    assert parts_of(tmp_path)["Does the loss still fall?"].chart is None


def test_top_5_of_five_classes_is_left_out(tmp_path):
    (tmp_path / "summary.csv").write_text("epoch,eval_top1,eval_top5\n0,40,100\n")
    for classes, series in ((5, {"top-1"}), (6, {"top-1", "top-5"})):
        (part,) = run_section(read_run(tmp_path), classes).parts
        assert {row["accuracy"] for row in part.chart["data"]["values"]} == series


def test_a_damaged_run_is_told_before_the_images_are_seen(splits, tmp_path, monkeypatch):
    (tmp_path / FILE).write_text('{"epochs": [{"epoch": 0}]}')
    (tmp_path / "last.pth.tar").touch()
    monkeypatch.setattr(
        timm_moe.analysis.report,
        "load_classifiers",
        lambda *_: pytest.fail("The model was loaded."),
    )
    with pytest.raises(ValueError, match=f"{FILE} is damaged"):
        write_report([tmp_path / "last.pth.tar"], image_folder(splits), tmp_path / "out")


def test_charts_start_before_the_images_are_run_on(splits, tmp_path, monkeypatch):
    """Starting it ends the process where memory is short."""

    def start():
        raise MemoryError("V8")

    monkeypatch.setattr(timm_moe.analysis.report, "chart_library", start)
    monkeypatch.setattr(timm_moe.analysis.report, "observe", None)
    with pytest.raises(MemoryError, match="V8"):
        write_report([tmp_path / "none.pth.tar"], image_folder(splits), tmp_path / "out")
