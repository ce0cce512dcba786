"""The averaging, its schedules and its place in a training step."""

import copy
import gc
import logging
import sys
import threading
from operator import attrgetter

import pytest
import timm
import torch
from common import SMALL_VIT
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import Mlp
from timm.optim import create_optimizer_v2
from timm.optim.lookahead import Lookahead
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.utils import parametrize, prune

import timm_moe
from timm_moe import ExpertWeightAveraging
from timm_moe.layers import EwaMlp, WeakRegistry
from timm_moe.schedules import SCHEDULES
from timm_moe.training.averaging import UPDATES, average_


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.3, 0.5, 0.75, 1.0])
def test_one_step_equals_the_golden_file(golden, beta):
    ewa = golden("ewa")
    stacked = ewa["W"].clone()
    assert average_(stacked, beta) is stacked
    torch.testing.assert_close(stacked, ewa[f"W_beta{beta}"], rtol=0, atol=1e-15)
    torch.testing.assert_close(stacked.mean(0), ewa["mean"], rtol=0, atol=1e-15)


def test_a_trajectory_equals_the_golden_file(golden):
    ewa = golden("ewa")
    stacked = ewa["traj_W"][0].clone()
    for step, grad in enumerate(ewa["traj_grad"]):
        average_(stacked, float(ewa["traj_beta"]))
        torch.testing.assert_close(stacked, ewa["traj_Wbar"][step], rtol=0, atol=1e-14)
        stacked += ewa["traj_eta"] * grad
        torch.testing.assert_close(stacked, ewa["traj_W"][step + 1], rtol=0, atol=1e-14)


@given(num_experts=st.integers(1, 9), size=st.integers(1, 30), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_the_mean_stays_and_deviations_shrink(num_experts, size, share, seed):
    beta = share * (num_experts - 1) / num_experts
    before = torch.randn(num_experts, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    after = average_(before.clone(), beta)
    mean = before.mean(0)
    torch.testing.assert_close(after.mean(0), mean, rtol=0, atol=1e-14)
    rho = 1 - beta * num_experts / (num_experts - 1) if num_experts > 1 else 1
    torch.testing.assert_close(after - mean, rho * (before - mean), rtol=0, atol=1e-14)


@pytest.mark.parametrize("num_experts", [2, 3, 4, 8])
def test_bfloat16_keeps_the_mean_within_one_rounding(num_experts):
    stacked = torch.randn(num_experts, 1000).bfloat16()
    expected = stacked.double().mean(0)
    one_rounding = 2.0**-9 * stacked.double().abs().amax(0)  # half a unit in the last place of the largest expert
    for step in range(1000):
        average_(stacked, 0.3 * (step + 1) / 1000)
        assert ((stacked.double().mean(0) - expected).abs() <= one_rounding).all()
    assert ((stacked - stacked[0]).double().abs().amax(0) <= 8 * one_rounding).all()
    met = stacked[:1].expand(num_experts, -1).clone()
    assert torch.equal(average_(met.clone(), 0.3), met)  # experts that have met stay where they are


def test_schedules():
    assert [SCHEDULES["linear"](progress, 0.4) for progress in (0.25, 0.5, 1)] == [0.1, 0.2, 0.4]
    assert [SCHEDULES["constant"](progress, 0.4) for progress in (0.25, 1)] == [0.4, 0.4]
    assert [SCHEDULES["early"](progress, 0.4) for progress in (0.49, 0.5, 1)] == [0.4, 0, 0]
    assert [SCHEDULES["late"](progress, 0.4) for progress in (0.1, 0.69, 0.7, 1)] == [0.002, 0.002, 0.4, 0.4]
    assert SCHEDULES["late"](0.1, 0.001) == 0.001


@given(name=st.sampled_from(list(SCHEDULES)), progress=st.floats(0, 1), share_rate=st.floats(0, 1))
def test_no_schedule_leaves_the_range_up_to_the_share_rate(name, progress, share_rate):
    assert 0 <= SCHEDULES[name](progress, share_rate) <= share_rate


def test_average_experts_is_a_plain_function(ewa_vit):
    mean = ewa_vit.blocks[3].mlp.fc2.bias.mean(0)
    other = copy.deepcopy(ewa_vit)
    timm_moe.average_experts_(ewa_vit, 0.75)
    for name, parameter in ewa_vit.named_parameters():
        if ".1.mlp." in name or ".3.mlp." in name:
            assert (parameter - parameter[0]).abs().max() < 1e-7
        else:
            assert torch.equal(parameter, other.get_parameter(name))
    torch.testing.assert_close(ewa_vit.blocks[3].mlp.fc2.bias[0], mean)
    with pytest.raises(ValueError, match="beta must lie between"):
        timm_moe.average_experts_(other, 0.8)
    with pytest.raises(ValueError, match="has no expert layers to average"):
        timm_moe.average_experts_(timm_moe.to_dense(other), 0.1)


# --- in a training step


def train_step(model, optimizer, seed, scaler=None):
    torch.manual_seed(seed)
    loss = model(torch.randn(4, 3, 32, 32)).square().mean()
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def spreads(model):
    """Of every stacked parameter, the largest deviation of an expert from the mean."""
    stacked = {
        f"{path}.{name}": parameter.detach()
        for path, layer in timm_moe.moe_layers(model).items()
        for name, parameter in layer.named_expert_parameters()
    }
    return {name: (weight - weight.mean(0)).abs().max().item() for name, weight in stacked.items()}


def spread(model):
    return max(spreads(model).values())


def averaged(model, opt="adamw", rate=0.75, schedule="constant", total_updates=10, **opt_kwargs):
    optimizer = create_optimizer_v2(model, opt=opt, lr=1e-2, weight_decay=0.05, **opt_kwargs)
    return optimizer, ExpertWeightAveraging(model, optimizer, rate, schedule, total_updates=total_updates)


@pytest.mark.parametrize(
    "opt", ["adamw", "sgd", "lamb", "lion", "muon", "lookahead_adamw", "lookahead_sgd", "adafactor"]
)
def test_follows_every_step_of_every_optimizer(ewa_vit, opt):
    optimizer, averaging = averaged(ewa_vit, opt)
    for step in range(7):  # Lookahead's slow update comes at the sixth
        train_step(ewa_vit, optimizer, step)
        assert averaging.updates == step + 1
        assert spread(ewa_vit) < 1e-6


def test_fused_optimizer(ewa_vit):
    optimizer, averaging = averaged(ewa_vit, fused=True)
    train_step(ewa_vit, optimizer, 0)
    assert averaging.updates == 1
    assert spread(ewa_vit) < 1e-6


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_not_averaged(ewa_vit, fused):
    optimizer, averaging = averaged(ewa_vit, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    before = copy.deepcopy(ewa_vit.state_dict())
    train_step(ewa_vit, optimizer, 0, scaler)  # overflows
    assert averaging.updates == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in ewa_vit.state_dict().items())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    train_step(ewa_vit, optimizer, 0, scaler)
    assert averaging.updates == 1
    assert spread(ewa_vit) < 1e-6


def test_accumulated_gradients_are_one_update(ewa_vit):
    optimizer, averaging = averaged(ewa_vit, rate=0.4, schedule="linear", total_updates=2)
    for _ in range(2):
        for _ in range(3):
            ewa_vit(torch.randn(2, 3, 32, 32)).mean().backward()
        optimizer.step()
    assert averaging.updates == 2
    assert averaging.share_rate == 0.4


@pytest.mark.ci
def test_a_compiled_step_is_followed_by_averaging(ewa_vit):
    optimizer, averaging = averaged(ewa_vit, rate=0.75, schedule="constant", total_updates=2)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        ewa_vit(torch.randn(2, 3, 32, 32)).mean().backward()
        step()
        assert spread(ewa_vit) < 1e-6
    assert averaging.updates == 2


def test_the_rate_of_each_step_is_applied(ewa_vit):
    """Against averaging by hand, step by step, from the paper's formula."""
    by_hand = copy.deepcopy(ewa_vit)
    # The gradient of a key's bias is rounding error, of which AdamW with its usual eps makes whole steps.
    optimizer, _ = averaged(ewa_vit, rate=0.3, schedule="linear", total_updates=3, eps=1e-6)
    other = create_optimizer_v2(by_hand, opt="adamw", lr=1e-2, weight_decay=0.05, eps=1e-6)
    for layer in timm_moe.moe_layers(by_hand).values():
        layer.share_rate = 0.0  # tells the guard that nobody is meant to average these
    for step in range(3):
        train_step(ewa_vit, optimizer, step)
        train_step(by_hand, other, step)
        beta = 0.3 * (step + 1) / 3
        for layer in timm_moe.moe_layers(by_hand).values():
            for parameter in layer.parameters():
                total = parameter.data.sum(0, keepdim=True)
                parameter.data = (1 - beta) * parameter.data + beta / 3 * (total - parameter.data)
    for (name, a), b in zip(ewa_vit.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_a_function_as_schedule(ewa_vit):
    seen = []
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    averaging = ExpertWeightAveraging(
        ewa_vit, optimizer, schedule=lambda progress: seen.append(progress) or 0.5 * progress, total_updates=4
    )
    train_step(ewa_vit, optimizer, 0)
    assert seen == [0.25]  # once for a step, however many layers there are
    assert averaging.share_rate == 0.125
    averaging.remove()
    ExpertWeightAveraging(ewa_vit, optimizer, schedule=lambda progress: 2.0, total_updates=4)
    with pytest.raises(ValueError, match=r"share_rate must lie between .* got 2.0"):
        train_step(ewa_vit, optimizer, 1)


def test_weight_ema_sees_the_averaged_weights(ewa_vit):
    optimizer, _ = averaged(ewa_vit)
    ema = ModelEmaV3(ewa_vit, decay=0.0)
    train_step(ewa_vit, optimizer, 0)
    ema.update(ewa_vit)
    assert all(torch.equal(a, b) for a, b in zip(ema.module.parameters(), ewa_vit.parameters(), strict=True))
    assert spread(ema.module) < 1e-6


@pytest.mark.parametrize("opt", ["adamw", "lookahead_adamw"])
def test_resuming_after_three_of_six_steps_is_bit_identical(opt, tmp_path):
    def start():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
        return model, *averaged(model, opt, rate=0.3, schedule="linear", total_updates=6)

    model, optimizer, _ = start()
    for step in range(6):
        train_step(model, optimizer, step)
    first, optimizer, _ = start()
    for step in range(3):
        train_step(first, optimizer, step)
    torch.save({"state_dict": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    second, optimizer, averaging = start()
    checkpoint = torch.load(tmp_path / "c.pt")
    second.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert averaging.updates == 3
    for step in range(3, 6):
        train_step(second, optimizer, step)
    assert averaging.updates == 6
    for (name, a), b in zip(model.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_several_models_in_one_process_do_not_touch_each_other(ewa_vit):
    other = copy.deepcopy(ewa_vit)
    optimizer, averaging = averaged(ewa_vit)
    other_optimizer, other_averaging = averaged(other, rate=0.0)
    before = copy.deepcopy(other.state_dict())
    train_step(ewa_vit, optimizer, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    train_step(other, other_optimizer, 0)
    assert (averaging.updates, other_averaging.updates) == (1, 1)
    assert spread(other) > 1e-3


def test_is_dropped_with_its_optimizer(ewa_vit):
    optimizer, averaging = averaged(ewa_vit)
    del optimizer, averaging
    gc.collect()
    optimizer, averaging = averaged(ewa_vit)  # a second phase of training
    train_step(ewa_vit, optimizer, 0)
    assert averaging.updates == 1


def test_experts_that_nothing_averages_are_told_of_once(ewa_vit, caplog):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    for step in range(2):
        train_step(ewa_vit, optimizer, step)
    assert len(caplog.messages) == 1
    assert "nothing averages the experts that this optimizer trains" in caplog.text
    control = timm.create_model("vit_tiny_ewa_moe", share_rate=0, **SMALL_VIT)
    train_step(control, torch.optim.SGD(control.parameters(), lr=0.1), 0)
    assert len(caplog.messages) == 1


def test_two_optimizers_on_one_layer_average_each_parameter_once(ewa_vit):
    weights = [parameter for name, parameter in ewa_vit.named_parameters() if name.endswith("weight")]
    biases = [parameter for name, parameter in ewa_vit.named_parameters() if not name.endswith("weight")]
    before = copy.deepcopy(ewa_vit)
    for parameters in (weights, biases):
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        ExpertWeightAveraging(ewa_vit, optimizer, 0.3, "constant", total_updates=5)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name in ("blocks.1.mlp.fc1.weight", "blocks.1.mlp.fc2.bias"):
        old, new = before.get_parameter(name), ewa_vit.get_parameter(name)
        torch.testing.assert_close(new - new.mean(0), 0.6 * (old - old.mean(0)))


def test_the_log_says_once_what_will_happen(ewa_vit, caplog):
    with caplog.at_level(logging.INFO):
        optimizer, _ = averaged(ewa_vit, rate=0.3, schedule="linear", total_updates=30)
        for step in range(3):
            train_step(ewa_vit, optimizer, step)
    assert [record.message for record in caplog.records if "EWA" in record.message] == [
        "EWA: averaging the 4 experts of 2 layers after every optimizer step, share rate 0.3, schedule linear, "
        "over 30 updates."
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share_rate": 0.8}, "share_rate must lie between 0 and"),
        ({"schedule": "cosine"}, "share_schedule must be one of"),
        ({"total_updates": 0}, "total_updates must be at least 1, got 0"),
        ({"schedule": lambda progress: 0.1, "share_rate": 0.1}, "leave share_rate out"),
    ],
)
def test_bad_arguments_leave_the_optimizer_alone(ewa_vit, arguments, message):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        ExpertWeightAveraging(ewa_vit, optimizer, **{"total_updates": 5, **arguments})
    assert UPDATES not in optimizer.param_groups[0]
    assert ExpertWeightAveraging.of(optimizer) is None


def test_needs_an_optimizer_that_trains_the_experts_and_has_no_averaging(ewa_vit, dense_vit):
    with pytest.raises(ValueError, match="trains no expert layer"):
        averaged(dense_vit)
    optimizer, _ = averaged(ewa_vit)
    with pytest.raises(ValueError, match="already has its expert weight averaging"):
        ExpertWeightAveraging(ewa_vit, optimizer, total_updates=5)


@pytest.mark.parametrize("num_experts", [2, 3, 8])
def test_averaging_by_blocks_is_averaging(monkeypatch, num_experts):
    monkeypatch.setattr("timm_moe.training.averaging._BLOCK", 7)
    stacked = torch.randn(num_experts, 5, 9)
    whole = torch.lerp(stacked, stacked.mean(0, keepdim=True), 0.1 * num_experts / (num_experts - 1))
    by_parts = average_(stacked.clone(), 0.1)
    torch.testing.assert_close(by_parts, whole, rtol=0, atol=1e-6)
    transposed = average_(stacked.mT.contiguous().mT, 0.1)  # not contiguous, so it is taken whole
    torch.testing.assert_close(transposed, whole, rtol=0, atol=1e-6)


# --- what is averaged: asked anew at each step


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def still_step(model, optimizer):
    """A step that moves nothing by itself, so that all that moves was averaged."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def apart(model):
    """The model with experts that differ in every parameter; its biases begin equal."""
    for layer in timm_moe.moe_layers(model).values():
        for _, stacked in layer.named_expert_parameters():
            nn.init.normal_(stacked)
    return model


def moved(model, before):
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


EXPERTS = {
    f"blocks.{block}.mlp.{name}.{kind}" for block in (1, 3) for name in ("fc1", "fc2") for kind in ("weight", "bias")
}


@pytest.mark.parametrize("left_out", [None, *sorted(EXPERTS)])
def test_every_parameter_of_the_experts_is_averaged_and_no_other(ewa_vit, left_out):
    parameters = [parameter for name, parameter in ewa_vit.named_parameters() if name != left_out]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=3)
    before = values(apart(ewa_vit))
    still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == EXPERTS - {left_out}
    assert {name for name, spread in spreads(ewa_vit).items() if spread > 1e-6} == {left_out} - {None}


def test_frozen_experts_stay_where_they_are(ewa_vit, caplog):
    frozen = {"blocks.1.mlp.fc2.weight", "blocks.3.mlp.fc1.bias"}
    ewa_vit.get_parameter("blocks.1.mlp.fc2.weight").requires_grad_(False)
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.0)
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.3, "constant", total_updates=3)
    ewa_vit.get_parameter("blocks.3.mlp.fc1.bias").requires_grad_(False)  # since then
    before = values(apart(ewa_vit))
    still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == EXPERTS - frozen
    for name in frozen:
        ewa_vit.get_parameter(name).requires_grad_()
    still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == EXPERTS
    for parameter in ewa_vit.blocks.parameters():
        parameter.requires_grad_(False)
    before = values(ewa_vit)
    still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == set()
    assert averaging.updates == 3
    assert not caplog.messages


def test_the_plain_function_averages_frozen_experts_as_it_is_told(ewa_vit):
    before = values(apart(ewa_vit).requires_grad_(False))
    timm_moe.average_experts_(ewa_vit, 0.3)
    assert moved(ewa_vit, before) == EXPERTS


@pytest.mark.parametrize("by_timm", [False, True])
def test_experts_that_come_later_are_averaged_from_then_on(ewa_vit, caplog, by_timm):
    first, later = ewa_vit.blocks[1].mlp, ewa_vit.blocks[3].mlp
    optimizer = torch.optim.SGD(first.parameters(), lr=0.0)
    if by_timm:
        create_scheduler_v2(optimizer, sched="none", num_epochs=1, updates_per_epoch=2)
    else:
        ExpertWeightAveraging(ewa_vit, optimizer, total_updates=2)
    before = values(apart(ewa_vit))
    still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == {name for name in EXPERTS if "blocks.1" in name}
    optimizer.add_param_group({"params": later.parameters()})
    still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == EXPERTS
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_experts_beside_the_averaged_ones_are_told_of(ewa_vit, caplog):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.0)
    ExpertWeightAveraging(ewa_vit.blocks[1], optimizer, total_updates=2)
    for _ in range(2):
        still_step(ewa_vit, optimizer)
    assert len(caplog.messages) == 1
    assert "nothing averages the experts" in caplog.text
    assert "(those in blocks.3.mlp)" in caplog.text


def test_routers_alone_need_no_averaging(caplog):
    model = timm.create_model("vit_tiny_moe", num_experts=2, share_rate=0.3, **SMALL_VIT)
    optimizer = torch.optim.SGD([model.blocks[1].mlp.router.weight, *model.head.parameters()], lr=0.1)
    create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=2)
    assert ExpertWeightAveraging.of(optimizer) is None
    with pytest.raises(ValueError, match="trains no expert layer"):
        ExpertWeightAveraging(model, optimizer, total_updates=2)
    still_step(model, optimizer)
    assert not caplog.messages


@pytest.mark.parametrize("rates", [(0.3, 0.3), (0.15, 0.6), (0.0, 0.6)])
def test_what_two_layers_share_is_averaged_once_at_the_rate_of_the_first(ewa_vit, rates):
    first, second = ewa_vit.blocks[1].mlp, ewa_vit.blocks[3].mlp
    for layer, rate in zip((first, second), rates, strict=True):
        layer.share_rate, layer.share_schedule = rate, "constant"
    second.fc1.weight = first.fc1.weight
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.0)
    ExpertWeightAveraging(ewa_vit, optimizer, total_updates=2)
    old = first.fc1.weight.detach().clone()
    still_step(ewa_vit, optimizer)
    new = first.fc1.weight.detach()
    torch.testing.assert_close(new - new.mean(0), (1 - 4 / 3 * rates[0]) * (old - old.mean(0)))
    timm_moe.average_experts_(ewa_vit, 0.3)
    newest = first.fc1.weight.detach()
    torch.testing.assert_close(newest - newest.mean(0), 0.6 * (1 - 4 / 3 * rates[0]) * (old - old.mean(0)))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


COMPUTED = {
    "pruned": lambda module: prune.random_unstructured(module, "weight", 0.5),
    "weight norm": lambda module: nn.utils.parametrizations.weight_norm(module),
    "parametrized": lambda module: parametrize.register_parametrization(module, "weight", Doubled()),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_experts_computed_from_other_parameters_are_refused(ewa_vit, how):
    for asked_before in (True, False):
        model = copy.deepcopy(ewa_vit)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if asked_before:
            averaging = ExpertWeightAveraging(model, optimizer, total_updates=2)
        COMPUTED[how](model.blocks[3].mlp.fc2)
        before = values(model)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        message = r"fc2.weight of the experts in blocks.3.mlp is computed from other parameters.*cannot be averaged"
        with pytest.raises(ValueError, match=message):
            optimizer.step() if asked_before else ExpertWeightAveraging(model, optimizer, total_updates=2)
        with pytest.raises(ValueError, match=message):
            timm_moe.average_experts_(model, 0.3)
        assert moved(model, before) == set()
        if asked_before:
            assert averaging.updates == 0


def test_experts_cannot_be_replaced_by_another_shape(ewa_vit):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    ExpertWeightAveraging(ewa_vit, optimizer, total_updates=2)
    weight = ewa_vit.blocks[1].mlp.fc1.weight
    weight.data = weight.data.flatten()
    before = values(ewa_vit)
    with pytest.raises(ValueError, match=r"blocks.1.mlp are not there as a whole.*fc1.weight .*\(4, 128, 32\)"):
        still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == set()


@pytest.mark.parametrize("answer", [RuntimeError("no rate"), 2.0])
def test_a_schedule_that_fails_leaves_all_as_it_was(ewa_vit, answer):
    answers = [0.3, answer, 0.3]

    def schedule(progress):
        asked.append(progress)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    asked = []
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, schedule=schedule, total_updates=4)
    train_step(ewa_vit, optimizer, 0)
    before = values(ewa_vit)
    with pytest.raises((RuntimeError, ValueError)):
        train_step(ewa_vit, optimizer, 1)
    assert moved(ewa_vit, before) == set()
    assert averaging.updates == 1
    train_step(ewa_vit, optimizer, 1)
    assert averaging.updates == 2
    assert asked == [0.25, 0.5, 0.5]


# --- optimizers that work by another one


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation in its usual shape."""

    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter]["old"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.01)

    @torch.no_grad()
    def second_step(self):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.copy_(self.state[parameter]["old"])
        self.base_optimizer.step()

    def step(self, closure=None):
        assert closure is not None, "SAM needs a closure"
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


def backward(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 3, 32, 32)).square().mean().backward()


def by_closure(model, optimizer, seed):
    backward(model, optimizer, seed)
    optimizer.step(lambda: backward(model, optimizer, seed))


def by_hand(model, optimizer, seed):
    backward(model, optimizer, seed)
    optimizer.first_step()
    backward(model, optimizer, seed)
    optimizer.second_step()


@pytest.mark.parametrize("step", [by_closure, by_hand])
@pytest.mark.parametrize("given", ["", "base_optimizer"])
@pytest.mark.parametrize(
    "base",
    [
        pytest.param(torch.optim.SGD, marks=pytest.mark.ci),
        lambda groups, lr: Lookahead(torch.optim.SGD(groups, lr=lr), k=2),
    ],
)
def test_sam_is_averaged_once_an_update(ewa_vit, caplog, step, given, base):
    reference = copy.deepcopy(ewa_vit)
    for layer in timm_moe.moe_layers(reference).values():
        layer.share_rate = 0.0
    optimizer = SAM(ewa_vit.parameters(), base, lr=0.05)
    averaging = ExpertWeightAveraging(
        ewa_vit, attrgetter(given)(optimizer) if given else optimizer, 0.3, "linear", total_updates=5
    )
    by_itself = SAM(reference.parameters(), base, lr=0.05)
    for update in range(5):  # the slow update of Lookahead moves from the fourth on
        step(ewa_vit, optimizer, update)
        step(reference, by_itself, update)
        timm_moe.average_experts_(reference, 0.3 * (update + 1) / 5)
        assert averaging.updates == update + 1
        for a, b in zip(ewa_vit.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    assert not caplog.messages
    assert ExpertWeightAveraging.of(optimizer) is ExpertWeightAveraging.of(optimizer.base_optimizer) is averaging


def test_a_step_that_raised_does_not_stop_the_averaging(ewa_vit):
    optimizer = SAM(ewa_vit.parameters(), torch.optim.SGD, lr=0.05)
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=9)
    backward(ewa_vit, optimizer, 0)
    with pytest.raises(AssertionError, match="needs a closure"):
        optimizer.step()
    by_hand(ewa_vit, optimizer, 0)  # cannot be told from a part of the step that raised
    for update in range(1, 3):
        by_hand(ewa_vit, optimizer, update)
        assert averaging.updates == update
        assert spread(ewa_vit) < 1e-6
    with pytest.raises(AssertionError, match="needs a closure"):
        optimizer.step()
    by_closure(ewa_vit, optimizer, 3)
    assert averaging.updates == 3
    assert spread(ewa_vit) < 1e-6


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("when", ["prepared", "before", "by timm"])
def test_an_optimizer_prepared_by_accelerate(ewa_vit, caplog, scaled, when):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.05)
    if when == "before":
        averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=5)
    model, optimizer = accelerator.prepare(ewa_vit, optimizer)
    if scaled:  # as with mixed_precision="fp16", which Accelerate has on GPUs only
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        optimizer = accelerate.optimizer.AcceleratedOptimizer(optimizer.optimizer, scaler=scaler)
    if when == "prepared":
        averaging = ExpertWeightAveraging(model, optimizer, 0.75, "constant", total_updates=5)
    if when == "by timm":
        for layer in timm_moe.moe_layers(ewa_vit).values():
            layer.share_rate, layer.share_schedule = 0.75, "constant"
        create_scheduler_v2(optimizer, sched="none", num_epochs=5, updates_per_epoch=1)
    averaging = ExpertWeightAveraging.of(optimizer)
    counts = []
    for batch in range(6):
        skipped = scaled and batch == 3
        with accelerator.accumulate(model):
            loss = model(torch.randn(4, 3, 32, 32)).square().mean() * (float("nan") if skipped else 1)
            (scaler.scale(loss) if scaled else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(averaging.updates)
        assert (spread(ewa_vit) < 1e-6) == (averaging.updates > 0)
    assert counts == [0, 1, 1, 1, 1, 2] if scaled else [0, 1, 1, 2, 2, 3]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_optimizer_without_torchs_hooks(ewa_vit):
    """torch's PostLocalSGDOptimizer has neither hooks nor defaults of its own."""

    from torch.distributed.optim import PostLocalSGDOptimizer

    class Averager:
        def average_parameters(self, params):
            ewa_vit.blocks[1].mlp.fc1.weight.data[0] += 1  # after the inner step

    inner = torch.optim.SGD(ewa_vit.parameters(), lr=0.05)
    optimizer = PostLocalSGDOptimizer(inner, Averager())
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=5)
    for update in range(2):
        backward(ewa_vit, inner, update)
        optimizer.step()
        assert averaging.updates == update + 1
        assert spread(ewa_vit) < 1e-6


def test_what_is_no_optimizer_is_refused_in_a_sentence(ewa_vit):
    class Engine:
        param_groups = ()

    with pytest.raises(TypeError, match=r"A Engine is no torch.optim.Optimizer, so its steps cannot be followed."):
        ExpertWeightAveraging(ewa_vit, Engine(), total_updates=5)


def test_a_step_replaced_beforehand_is_refused(ewa_vit):
    class Unhooked(Lookahead):
        def step(self, closure=None):
            return super().step(closure)

    optimizer = Unhooked(torch.optim.SGD(ewa_vit.parameters(), lr=0.05))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own in the place of the one without hooks
    with pytest.raises(
        ValueError, match="The steps of this Unhooked cannot be followed, as its step was replaced before"
    ):
        ExpertWeightAveraging(ewa_vit, optimizer, total_updates=5)


# --- optimizers older than the experts


@pytest.mark.parametrize("router", ["random", "top_k"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_optimizer_older_than_the_experts_is_told_at_its_first_step(dense_vit, router, steps_before):
    optimizer = torch.optim.AdamW(dense_vit.parameters(), lr=1e-3)
    for update in range(steps_before):
        train_step(dense_vit, optimizer, update)
    timm_moe.convert_to_moe(dense_vit, num_experts=2, router=router)
    before = values(dense_vit)
    with pytest.raises(ValueError, match=r"older than the experts in blocks.1.mlp.*after convert_to_moe"):
        train_step(dense_vit, optimizer, 0)
    assert moved(dense_vit, before) == set()


def test_experts_added_to_an_older_optimizer_are_trained(dense_vit, caplog):
    optimizer = torch.optim.SGD(dense_vit.parameters(), lr=0.1)
    timm_moe.convert_to_moe(dense_vit, num_experts=2, share_rate=0)
    for layer in timm_moe.moe_layers(dense_vit).values():
        optimizer.add_param_group({"params": layer.parameters()})
    train_step(dense_vit, optimizer, 0)
    other = torch.optim.SGD(copy.deepcopy(dense_vit).parameters(), lr=0.1)
    other.step()
    assert not caplog.messages


def test_frozen_experts_need_not_be_trained(dense_vit):
    optimizer = torch.optim.SGD(dense_vit.parameters(), lr=0.1)
    timm_moe.convert_to_moe(dense_vit, num_experts=2)
    for layer in timm_moe.moe_layers(dense_vit).values():
        layer.requires_grad_(False)
    train_step(dense_vit, optimizer, 0)


def test_what_was_replaced_is_not_kept_alive(dense_vit):
    weights = [layer.mlp.fc1.weight for layer in dense_vit.blocks]
    timm_moe.convert_to_moe(dense_vit, num_experts=2)
    layer = dense_vit.blocks[1].mlp
    assert [parameter is weights[1] for parameter in layer.replaced] == [True]
    assert not list(copy.deepcopy(layer).replaced)
    del weights
    gc.collect()
    assert not list(layer.replaced)


# --- several threads


def test_the_registry_bears_threads():
    class Item:
        pass

    registry = WeakRegistry()
    kept = [Item() for _ in range(3)]
    for item in kept:
        registry.add(item)
    registry.add(kept[0])
    iterator = iter(registry)
    late = Item()
    registry.add(late)
    assert list(iterator) == kept
    assert list(registry) == [*kept, late]
    registry.discard(kept[1])
    del late
    assert list(registry) == [kept[0], kept[2]]
    assert kept[0] in registry
    assert kept[1] not in registry
    assert not list(copy.deepcopy(registry))
    added = [[Item() for _ in range(300)] for _ in range(4)]
    threads = [threading.Thread(target=lambda items=items: [registry.add(item) for item in items]) for items in added]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen = list(registry)
        assert len(set(map(id, seen))) == len(seen)
    assert {id(item) for items in added for item in items} <= {id(item) for item in registry}


def test_models_may_be_copied_while_another_thread_trains():
    layer = EwaMlp(Mlp(2, 2), num_experts=2)
    copies = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    thread = threading.Thread(target=lambda: copies.extend(copy.deepcopy(layer) for _ in range(300)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        while thread.is_alive():
            optimizer.step()
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    assert len(copies) == 300
