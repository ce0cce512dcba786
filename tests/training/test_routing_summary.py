"""Statistics of routers over a run: summaries, and logs of epochs."""

import copy
import logging

import pytest
import timm
import timm.scheduler
import torch
from common import OnDevice
from routed_loop import CPU, batch, routed_model
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch import nn
from torch.nn import functional as F

import timm_moe
from timm_moe.callbacks import add_router_losses, expert_statistics, start_averaging
from timm_moe.layers import RecordingRouter
from timm_moe.layers.router_totals import KEPT, Reader, RouterRecord, RouterTotals
from timm_moe.training import router_losses
from timm_moe.training.loop import start_or_resume


def test_summary_of_a_loop():
    images, targets = batch()
    model = routed_model(
        "vmoe_b32", moe_layers="1,3", num_experts=6, capacity_factor=0.5, capacity_multiple=1
    )
    dropped, load, losses = 0, torch.zeros(6), []
    for part in images.split(6):  # The last batch is smaller, and so are its capacities.
        F.cross_entropy(model(part), targets[: len(part)])
        record = model.blocks[3].mlp.router.records[0]
        timm_moe.auxiliary_loss(model)
        dropped += record.dropped
        load += record.load
        losses.append(record.losses)
    summaries = timm_moe.routing_summary(model)
    assert list(summaries) == ["blocks.1.mlp", "blocks.3.mlp"]
    assert timm_moe.routing_summary(copy.deepcopy(model)) == {}
    summary = summaries["blocks.3.mlp"]
    choices = 8 * 17 * 2
    assert summary.dropped == pytest.approx(dropped / choices)
    assert summary.dropped >= 0.5 - 1 / 6
    torch.testing.assert_close(torch.tensor(summary.load), load / choices)
    means = {
        name: float(sum(loss[name] for loss in losses)) / len(losses)
        for name in ("importance", "load")
    }
    assert summary.losses == pytest.approx(means)
    assert str(summary).startswith("importance ")
    shares = f"{min(summary.load):.1%} / 16.7% / {max(summary.load):.1%}"
    assert str(summary).endswith(
        f"dropped {summary.dropped:.1%}, share of an expert min/mean/max {shares}"
    )
    assert timm_moe.routing_summary(model, reset=True) == summaries
    model(images)
    record = model.blocks[3].mlp.router.records[0]
    timm_moe.auxiliary_loss(model)
    load = timm_moe.routing_summary(model)["blocks.3.mlp"].load
    torch.testing.assert_close(torch.tensor(load), record.load / choices)
    assert timm_moe.routing_summary(model) != summaries


def test_dropped_choices_are_counted_in_each_group():
    images, _ = batch()
    model = routed_model(capacity_factor=1.0, capacity_multiple=1, group_images=1)
    router = model.blocks[3].mlp.router
    dropped = 0
    for part in images.split(4):
        model(part)
        (record,) = router.records
        dropped += record.dropped.item()
        timm_moe.auxiliary_loss(model)
    summary = timm_moe.routing_summary(model)["blocks.3.mlp"]
    assert summary.dropped == pytest.approx(dropped / (8 * 17))


def test_statistics_keep_no_graph_alive():
    model = routed_model()
    model(batch()[0])
    (record,) = model.blocks[3].mlp.router.records
    assert record.weighted_loss.requires_grad
    assert not any(loss.requires_grad for loss in record.losses.values())


def test_statistics_of_many_forwards_and_of_a_layer_that_stops():
    images, _ = batch()
    model = routed_model()
    first, second = timm_moe.moe_layers(model).values()
    losses = []
    for _ in range(KEPT + 3):
        model(images[:2])
        losses.append(float(first.router.records[0].losses["balance"]))
        timm_moe.auxiliary_loss(model)
    statistics = expert_statistics(model)
    path = f"router/{first.path}/balance_loss"
    assert statistics[path] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert expert_statistics(model) == {}
    first.eval()
    model(images)
    timm_moe.auxiliary_loss(model)
    assert {name.split("/")[1] for name in expert_statistics(model)} == {second.path}


def test_each_reader_has_averages_of_its_own(caplog):
    images, _ = batch()
    model = routed_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    layer = model.blocks[1].mlp
    losses = []
    for part in images.split(2):
        model(part)
        losses.append(float(layer.router.records[0].losses["balance"]))
        timm_moe.auxiliary_loss(model)
        logged = expert_statistics(model)  # the user's log of each step
        assert logged[f"router/{layer.path}/balance_loss"] == pytest.approx(losses[-1])
    last = timm_moe.routing_summary(model, reset=True)[layer.path]
    assert last.losses["balance"] == pytest.approx(sum(losses) / len(losses))
    assert timm_moe.routing_summary(model) == {}
    with caplog.at_level(logging.INFO):
        router_losses.log_epoch(optimizer)
    assert caplog.messages[0] == f"Routing in {layer.path}: {last}."
    caplog.clear()
    router_losses.log_epoch(optimizer)
    assert caplog.messages == []


@pytest.mark.parametrize("options", [{"aux_loss_weight": 0.0}, {"balance": "bias"}])
def test_routers_without_losses_are_counted_where_nobody_adds_losses(options):
    images, targets = batch()
    model = routed_model("vit_tiny_ewa_moe", router="top_k", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer, *_ = timm_moe.moe_layers(model).values()
    for part, labels in zip(images.split(4), targets.split(4), strict=True):
        F.cross_entropy(model(part), labels).backward()
        (record,) = layer.router.records
        optimizer.step()
        optimizer.zero_grad()
        assert expert_statistics(model)[f"router/{layer.path}/load_max"] == pytest.approx(
            float(record.load.max() / record.load.sum())
        )


def test_all_calls_of_a_shared_layer_without_losses_count():
    model = routed_model("widenet_b", num_experts=4, aux_loss_weight=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer = model.blocks[0].mlp
    model(batch()[0]).sum().backward()
    load = sum(record.load for record in layer.router.records)
    optimizer.step()
    assert layer.router.totals.forwards == len(model.blocks) > 1
    summary = timm_moe.routing_summary(model)["blocks.0.mlp"]
    torch.testing.assert_close(torch.tensor(summary.load), load / load.sum())


@pytest.mark.parametrize("forwards", [KEPT // 2, KEPT])
def test_losses_that_come_and_go_are_means_over_the_forwards_that_had_them(forwards):
    model = routed_model()
    router = model.blocks[1].mlp.router
    expected = {}
    for change, calls in ((dict(balance=0.01), forwards), (dict(z=0.001), forwards - 1)):
        router.loss_weights.clear()
        router.loss_weights.update(change)
        for _ in range(calls):
            model(batch()[0])
            expected |= {name: loss.item() for name, loss in router.records[0].losses.items()}
            timm_moe.auxiliary_loss(model)
    summary = timm_moe.routing_summary(model)["blocks.1.mlp"]
    assert summary.losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("forwards", [1, KEPT + 1])
@pytest.mark.parametrize(
    ("load", "dropped", "shares"), [([3, 1], 0.25, [0.75, 0.25]), ([0, 0], 0, [0, 0])]
)
def test_dropped_choices_of_all_forwards_count_and_a_batch_may_be_empty(
    forwards, load, dropped, shares
):
    totals = RouterTotals()
    for _ in range(forwards):
        totals.add(RouterRecord({}, None, torch.tensor([load]), capacity=2))
    assert len(totals._kept) == 1  # so that memory does not grow
    summary = totals.summary(Reader.SUMMARY)
    assert summary.dropped == dropped
    assert summary.load == shares


def test_a_recorded_load_keeps_no_graph():
    router = RecordingRouter(4, {})
    load = torch.ones(1, 4, requires_grad=True) * 2
    router.record({}, load)
    (record,) = router.records
    assert not record.load_GE.requires_grad


def test_summary_of_a_device_without_float64():
    model = routed_model()
    model(batch()[0])
    timm_moe.auxiliary_loss(model)
    expected = timm_moe.routing_summary(model)
    for layer in timm_moe.moe_layers(model).values():
        sums = layer.router.totals._sums[Reader.SUMMARY]
        sums.load = sums.load.as_subclass(OnDevice)
    assert timm_moe.routing_summary(model) == expected


def test_summary_of_a_task_leaves_out_its_ema():
    task = ClassificationTask(routed_model(), nn.CrossEntropyLoss(), device=CPU)
    task.setup_ema()
    task.train()(*batch())
    summaries = timm_moe.routing_summary(task)
    assert [name.rpartition("module")[0] for name in summaries] == ["trainable_"] * 2
    assert all("dropped" in str(summary) for summary in summaries.values())


def test_each_epoch_of_timms_schedulers_ends_in_a_summary(caplog):
    images, targets = batch()
    model = routed_model()
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=3, updates_per_epoch=2)
    with caplog.at_level(logging.INFO):
        scheduler.step(0)
        assert "Routing" not in caplog.text
        for epoch in range(2):
            for _ in range(2):
                task(images, targets)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step(epoch + 1)
            last = timm_moe.routing_summary(model, reset=True)  # of the epoch that ended
    lines = [message for message in caplog.messages if message.startswith("Routing")]
    assert [line.split(":")[0] for line in lines] == [
        "Routing in blocks.1.mlp",
        "Routing in blocks.3.mlp",
    ] * 2
    assert lines[2] == f"Routing in blocks.1.mlp: {last['blocks.1.mlp']}."


def test_other_ranks_keep_silent(caplog, monkeypatch):
    model = routed_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    for is_primary, lines in ((True, 2), (False, 0)):
        monkeypatch.setattr(router_losses, "is_primary", lambda is_primary=is_primary: is_primary)
        model(batch()[0])
        timm_moe.auxiliary_loss(model)
        with caplog.at_level(logging.INFO):
            caplog.clear()
            router_losses.log_epoch(optimizer)
        assert (
            len([message for message in caplog.messages if message.startswith("Routing in")])
            == lines
        )
        assert len(caplog.messages) == lines


def test_calls_of_a_layer_that_blocks_share_are_summed():
    model = routed_model("widenet_b", num_experts=2)
    for _ in range(KEPT):
        model(batch()[0][:1])
        timm_moe.auxiliary_loss(model)
    assert model.blocks[0].mlp.router.totals.forwards == KEPT * len(model.blocks)
    assert timm_moe.routing_summary(model)["blocks.0.mlp"].load == pytest.approx([0.5] * 2, abs=0.4)


@pytest.mark.parametrize("way", ["own loop", "timm", "trainer", "trainer, own averaging"])
def test_a_run_that_begins_has_no_statistics_of_an_earlier_one(way):
    model = routed_model(share_rate=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "trainer, own averaging":
        timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=2)
    model(batch()[0])
    timm_moe.auxiliary_loss(model)
    model(batch()[0])
    if way == "timm":
        timm.scheduler.create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=2)
    elif way == "own loop":
        start_averaging(model, optimizer, total_updates=2)
    else:
        start_or_resume(model, optimizer, total_updates=2, steps=0)
    assert expert_statistics(model) == {}
    assert timm_moe.auxiliary_loss(model) == 0


def test_a_log_has_the_load_of_the_most_chosen_expert_and_the_dropped_share():
    model = routed_model(capacity_factor=0.5, capacity_multiple=1)
    model(batch()[0])
    timm_moe.auxiliary_loss(model)
    logged = expert_statistics(model)
    for path, summary in timm_moe.routing_summary(model).items():
        assert logged[f"router/{path}/load_max"] == max(summary.load) > 0.25
        assert logged[f"router/{path}/dropped"] == summary.dropped > 0


def test_router_losses_are_scaled_as_the_loss_is():
    losses = []
    for scale in (1.0, 0.25):
        model = routed_model()
        torch.manual_seed(0)
        model(batch()[0])
        losses.append(add_router_losses(model, torch.zeros(()), scale).item())
    assert 0 < losses[1] == pytest.approx(losses[0] / 4)
