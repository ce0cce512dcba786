"""The averaging, its schedules and its place in a training step."""

import copy
import gc
import logging

import pytest
import timm
import torch
from conftest import SMALL_VIT
from hypothesis import given
from hypothesis import strategies as st
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

import timm_moe
from timm_moe import ExpertWeightAveraging
from timm_moe.callbacks.ewa import UPDATES, average_
from timm_moe.schedules import SCHEDULES


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


def spread(model):
    """Largest deviation of an expert from the mean."""
    weights = [layer.fc1.weight.detach() for layer in timm_moe.moe_layers(model).values()]
    return max((weight - weight.mean(0)).abs().max().item() for weight in weights)


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
    optimizer, _ = averaged(ewa_vit, rate=0.3, schedule="linear", total_updates=3)
    other = create_optimizer_v2(by_hand, opt="adamw", lr=1e-2, weight_decay=0.05)
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
    monkeypatch.setattr("timm_moe.callbacks.ewa._BLOCK", 7)
    stacked = torch.randn(num_experts, 5, 9)
    whole = torch.lerp(stacked, stacked.mean(0, keepdim=True), 0.1 * num_experts / (num_experts - 1))
    by_parts = average_(stacked.clone(), 0.1)
    torch.testing.assert_close(by_parts, whole, rtol=0, atol=1e-6)
    transposed = average_(stacked.mT.contiguous().mT, 0.1)  # not contiguous, so it is taken whole
    torch.testing.assert_close(transposed, whole, rtol=0, atol=1e-6)
