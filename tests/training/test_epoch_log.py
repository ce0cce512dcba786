"""The file beside train.py's summary.csv, in which each epoch tells of the experts."""

import json
import logging

import pytest
import timm
import torch
from common import SMALL_VIT
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from timm.utils import update_summary
from torch import nn

import timm_moe
from timm_moe import RoutingSummary
from timm_moe.training.epoch_log import FILE, read_epochs, relative_distance_to_mean


def run(name, folder, epochs, first=0, sched="cosine", lr=0.01):
    """As train.py does, with a batch for an epoch."""
    model = timm.create_model(name, **SMALL_VIT, num_experts=4)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=lr)
    scheduler, _ = create_scheduler_v2(optimizer, sched=sched, num_epochs=4, updates_per_epoch=1)
    task = ClassificationTask(model, criterion=nn.CrossEntropyLoss(), verbose=False)
    for epoch in range(first, epochs):
        task(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))["loss"].backward()
        optimizer.step()
        update_summary(epoch, {"loss": 1.0}, {"top1": 1.0}, filename=str(folder / "summary.csv"))
        if scheduler is not None:
            scheduler.step(epoch + 1)
    return model


def test_each_epoch_tells_of_the_routers(tmp_path):
    run("vit_tiny_moe", tmp_path, 3)
    epochs = read_epochs(tmp_path)
    assert [entry["epoch"] for entry in epochs] == [0, 1, 2]
    for entry in epochs:
        assert entry["share_rate"] is None
        for layer in entry["layers"].values():
            assert sum(layer["load"]) == pytest.approx(1)
            assert 0 <= layer["dropped"] < 1
            assert layer["losses"]["balance"] > 0.5
            assert 1 < layer["spread"] < 2  # independent experts: the root of 3
    assert epochs[0]["layers"] != epochs[1]["layers"]


def test_without_a_scheduler_an_epoch_is_one_too(tmp_path):
    for sched in ("cosine", "none"):
        torch.manual_seed(0)
        (tmp_path / sched).mkdir()
        run("vit_tiny_moe", tmp_path / sched, 3, sched=sched, lr=0.0)
    assert read_epochs(tmp_path / "cosine") == read_epochs(tmp_path / "none")


def test_a_resumed_run_goes_on_and_a_new_one_begins_anew(tmp_path):
    run("vit_tiny_ewa_moe", tmp_path, 3)
    before = read_epochs(tmp_path)
    run("vit_tiny_ewa_moe", tmp_path, 3, first=2)
    assert [entry["epoch"] for entry in read_epochs(tmp_path)] == [0, 1, 2]
    assert read_epochs(tmp_path)[:2] == before[:2]
    run("vit_tiny_ewa_moe", tmp_path, 1)
    assert [entry["epoch"] for entry in read_epochs(tmp_path)] == [0]


def test_runs_that_take_turns_have_their_own_experts(tmp_path):
    """Both models live in one process, such as a notebook."""
    runs = {}
    for name in ("vit_tiny_moe", "vit_tiny_ewa_moe"):
        (tmp_path / name).mkdir()
        model = timm.create_model(name, **SMALL_VIT, num_experts=4)
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01)
        scheduler, _ = create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=1)
        task = ClassificationTask(model, criterion=nn.CrossEntropyLoss(), verbose=False)
        runs[name] = (task, optimizer, scheduler)
    for epoch in range(2):
        for name, (task, optimizer, scheduler) in runs.items():
            task(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))["loss"].backward()
            optimizer.step()
            scheduler.step_update(epoch + 1)
            file = tmp_path / name / "summary.csv"
            update_summary(epoch, {"loss": 1.0}, {"top1": 1.0}, filename=str(file))
            scheduler.step(epoch + 1)
    for entry in read_epochs(tmp_path / "vit_tiny_moe"):
        assert entry["share_rate"] is None
        assert all("load" in layer for layer in entry["layers"].values())
    assert [entry["share_rate"] for entry in read_epochs(tmp_path / "vit_tiny_ewa_moe")] == [
        pytest.approx(0.15),
        pytest.approx(0.3),
    ]


def test_a_dense_run_writes_nothing(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    create_scheduler_v2(create_optimizer_v2(model, opt="sgd"), num_epochs=1, updates_per_epoch=1)
    update_summary(0, {"loss": 1.0}, {"top1": 1.0}, filename=str(tmp_path / "summary.csv"))
    assert [path.name for path in tmp_path.iterdir()] == ["summary.csv"]


DAMAGED = (
    *(
        "{",
        "[]",
        '{"epochs": 3}',
        '{"epochs": [{}]}',
        '{"epochs": [{"epoch": null}]}',
        '{"epochs": [{"epoch": 0}]}',
        '{"epochs": [{"epoch": "0", "share_rate": null, "layers": {}}]}',
        '{"epochs": [{"epoch": 0, "share_rate": "0", "layers": {}}]}',
    ),
)


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_told_and_ends_no_run(text, tmp_path, caplog):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{FILE} is damaged"):
        read_epochs(tmp_path)
    with caplog.at_level(logging.WARNING):
        run("vit_tiny_ewa_moe", tmp_path, 3, first=1)
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert all("is damaged" in record.message for record in told)
    assert len(told) == 2  # one for each epoch
    assert (tmp_path / FILE).read_text() == text


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / FILE).mkdir()
    run("vit_tiny_ewa_moe", tmp_path, 1)
    assert f"statistics of epoch 0 are not in {tmp_path / FILE}" in caplog.text


def test_an_entry_is_of_its_epoch_alone_as_the_log_is(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        run("vit_tiny_moe", tmp_path, 2)
    written = []
    for entry in read_epochs(tmp_path):
        for path, layer in entry["layers"].items():
            layer.pop("spread")
            written.append(f"Routing in {path}: {RoutingSummary(**layer)}.")
    assert written == [line for line in caplog.messages if line.startswith("Routing in")]
    assert len(set(written)) == 4


def test_the_spread_is_the_relative_distance_from_the_mean(ewa_vit):
    layer = timm_moe.moe_layers(ewa_vit)["blocks.1.mlp"]
    rows = torch.cat(
        [stacked.detach().flatten(1) for _, stacked in layer.named_expert_parameters()], 1
    ).double()
    expected = (rows - rows.mean(0)).square().sum(1).mean().sqrt() / rows.mean(0).norm()
    assert relative_distance_to_mean(layer) == pytest.approx(expected.item(), rel=1e-5)
    for _, stacked in layer.named_expert_parameters():
        stacked.data[:] = stacked.data[:1].clone()
    assert relative_distance_to_mean(layer) == pytest.approx(0, abs=1e-6)
    for _, stacked in layer.named_expert_parameters():
        stacked.data.zero_()
    assert relative_distance_to_mean(layer) is None


def test_the_file_is_json_with_versions(tmp_path):
    run("vit_tiny_ewa_moe", tmp_path, 1)
    assert json.loads((tmp_path / FILE).read_text())["versions"]["timm"] == timm.__version__


def test_of_two_runs_in_a_process_the_later_one_is_told(tmp_path):
    """The optimizer of the first, an EWA run, is alive still."""
    first = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
    optimizer = create_optimizer_v2(first, opt="sgd", lr=0.01)
    create_scheduler_v2(optimizer, num_epochs=4, updates_per_epoch=1)
    run("vit_tiny_moe", tmp_path, 1)
    (entry,) = read_epochs(tmp_path)
    assert entry["share_rate"] is None
    assert all("load" in layer for layer in entry["layers"].values())


def test_the_share_rate_of_an_epoch_is_that_of_its_last_averaging(tmp_path):
    run("vit_tiny_ewa_moe", tmp_path, 2)
    rates = [entry["share_rate"] for entry in read_epochs(tmp_path)]
    assert rates == pytest.approx([0.3 / 4, 0.3 / 2])
