"""The averaging after each step of an optimizer."""

import copy
import gc
import weakref

import numpy as np
import pytest
import timm
import torch
from averaging_loop import averaged, moved, spread, still_step, train_step, values
from common import SMALL_VIT, make_model
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import nn

import timm_moe
from timm_moe import ExpertWeightAveraging
from timm_moe.schedules import SCHEDULES
from timm_moe.training.averaging import UPDATES


@pytest.mark.parametrize(
    "opt", ["adamw", "sgd", "lamb", "lion", "muon", "lookahead_adamw", "lookahead_sgd", "adafactor"]
)
@pytest.mark.first_case
def test_follows_every_step_of_every_optimizer(ewa_vit, opt):
    optimizer, averaging = averaged(ewa_vit, opt)
    for step in range(7):  # Lookahead's slow update comes at the sixth
        train_step(ewa_vit, optimizer, step)
        assert averaging.updates == step + 1
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


@pytest.mark.ci
def test_a_compiled_step_is_compiled_once(ewa_vit):
    optimizer, averaging = averaged(ewa_vit, rate=0.3, schedule="linear", total_updates=6)
    for parameter in ewa_vit.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the state
    torch._dynamo.reset()
    graphs = []
    step = torch.compile(
        lambda: optimizer.step(), backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    step()
    first = len(graphs)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            step()
    assert len(graphs) == first > 0
    assert (averaging.updates, averaging.share_rate) == (6, 0.3)


@pytest.mark.parametrize("schedule", ["linear", "constant", "early", "late"])
@pytest.mark.first_case
def test_the_rate_is_a_tensor_where_a_step_can_be_captured(ewa_vit, schedule):
    """SGD has no such option, and works on CPUs.

    A CUDA graph repeats what it starts, so nothing may be a number.
    """
    outcomes, models = [], [ewa_vit, copy.deepcopy(ewa_vit)]
    for model, capturable in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["capturable"] = capturable
        averaging = ExpertWeightAveraging(model, optimizer, 0.3, schedule, total_updates=4)
        count = optimizer.param_groups[0][UPDATES]
        rates = []
        for step in range(5):
            train_step(model, optimizer, step)
            rates.append(averaging.share_rate)
        counted = optimizer.param_groups[0][UPDATES]
        assert (counted is count) == capturable
        assert (int(counted), averaging.updates) == (5, 5)
        outcomes.append(rates)
    assert outcomes[0] == pytest.approx(outcomes[1])
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_a_capture_that_would_repeat_its_rate_is_refused(ewa_vit, monkeypatch):
    optimizer, averaging = averaged(ewa_vit)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    before = values(ewa_vit)
    with pytest.raises(RuntimeError, match=r"share rate.*capturable=True"):
        averaging.begin_step(optimizer, set())
    assert moved(ewa_vit, before) == set()


def test_the_count_stays_on_the_host_under_a_default_device(ewa_vit):
    """To read it would make a GPU wait. The meta device stands for one."""
    optimizer, averaging = averaged(ewa_vit, "sgd")
    for parameter in ewa_vit.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.device("meta"):
        optimizer.step()
        optimizer.step()
    assert averaging.updates == 2


def test_the_rate_of_each_step_is_applied(ewa_vit):
    """Against averaging by hand, step by step, from the paper's formula."""
    by_hand = copy.deepcopy(ewa_vit)
    # The gradient of a key's bias is rounding error, of which AdamW with its usual eps makes whole
    # steps.
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
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)

    def square(progress, share_rate):
        return share_rate * progress**2

    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.4, square, total_updates=4)
    train_step(ewa_vit, optimizer, 0)
    assert averaging.share_rate == 0.4 * 0.25**2
    averaging.remove()


@pytest.mark.parametrize("too_much", [2.0, torch.tensor(2.0)])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_schedule_that_leaves_the_range_is_refused(ewa_vit, monkeypatch, is_named, too_much):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)

    def answer(progress, share_rate):
        return too_much if progress == at else share_rate

    monkeypatch.setitem(SCHEDULES, "odd", answer)
    schedule = "odd" if is_named else answer
    at = 1.0
    with pytest.raises(ValueError, match=r"share_rate.*2\.0"):
        ExpertWeightAveraging(ewa_vit, optimizer, 0.3, schedule, total_updates=4)
    at = 0.5
    ExpertWeightAveraging(ewa_vit, optimizer, 0.3, schedule, total_updates=4)
    train_step(ewa_vit, optimizer, 0)
    before = values(ewa_vit)
    with pytest.raises(ValueError, match=r"share_rate.*2\.0"):
        train_step(ewa_vit, optimizer, 1)
    assert moved(ewa_vit, before) == set()


def test_a_rate_may_be_a_number_of_numpy(ewa_vit):
    _, averaging = averaged(ewa_vit, rate=np.float32(0.3))
    assert averaging.layers()


def test_weight_ema_sees_the_averaged_weights(ewa_vit):
    optimizer, _ = averaged(ewa_vit)
    ema = ModelEmaV3(ewa_vit, decay=0.0)
    train_step(ewa_vit, optimizer, 0)
    ema.update(ewa_vit)
    assert all(
        torch.equal(a, b)
        for a, b in zip(ema.module.parameters(), ewa_vit.parameters(), strict=True)
    )
    assert spread(ema.module) < 1e-6


def test_resuming_in_the_midst_of_lookahead_is_bit_identical(tmp_path):
    """tests/contract/test_resumed_equals_uninterrupted.py has AdamW."""

    def start():
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
        return model, *averaged(
            model, "lookahead_adamw", rate=0.3, schedule="linear", total_updates=6
        )

    model, optimizer, _ = start()
    for step in range(6):
        train_step(model, optimizer, step)
    first, optimizer, _ = start()
    for step in range(3):
        train_step(first, optimizer, step)
    torch.save(
        {"state_dict": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt"
    )
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
    assert other_averaging.share_rate == 0
    assert spread(other) > 1e-3


def test_is_dropped_with_its_optimizer(ewa_vit):
    optimizer, averaging = averaged(ewa_vit)
    dropped = weakref.ref(averaging)
    del optimizer, averaging
    gc.collect()
    assert dropped() is None
    optimizer, averaging = averaged(ewa_vit)  # a second phase of training
    train_step(ewa_vit, optimizer, 0)
    assert averaging.updates == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share_rate": 0.8}, r"share_rate.*0\.75.*0\.8"),
        ({"schedule": "cosine"}, "share_schedule.*'cosine'"),
        ({"schedule": 0.3}, r"share_schedule.*0\.3"),
        ({"total_updates": 0}, r"total_updates.*\b0\b"),
        ({"schedule": "early", "share_rate": 0.8}, r"share_rate.*0\.75.*0\.8"),
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
    with pytest.raises(ValueError, match="already has"):
        ExpertWeightAveraging(ewa_vit, optimizer, total_updates=5)


@pytest.mark.parametrize("answer", [RuntimeError("no rate"), 2.0])
def test_a_schedule_that_fails_leaves_all_as_it_was(ewa_vit, answer):
    is_mended = False

    def schedule(progress, share_rate):
        if is_mended or progress != 0.5:
            return share_rate
        if isinstance(answer, Exception):
            raise answer
        return answer

    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, schedule=schedule, total_updates=4)
    train_step(ewa_vit, optimizer, 0)
    before = values(ewa_vit)
    with pytest.raises((RuntimeError, ValueError)):
        train_step(ewa_vit, optimizer, 1)
    assert moved(ewa_vit, before) == set()
    assert averaging.updates == 1
    is_mended = True
    train_step(ewa_vit, optimizer, 1)
    assert averaging.updates == 2


def in_groups(model):
    """Return parameter groups as of a learning rate for each part.

    The first of them is for what is frozen first.
    """
    parts = [model.patch_embed, model.blocks[:2], model.blocks[2:], model.head]
    return torch.optim.SGD([{"params": list(part.parameters())} for part in parts], lr=1e-3)


def without_the_first(optimizer):
    optimizer.param_groups.pop(0)


def in_a_new_list(optimizer):
    optimizer.param_groups = optimizer.param_groups[1:]


def reversed_and_more(optimizer):
    optimizer.param_groups.reverse()
    optimizer.param_groups.insert(
        0, {**optimizer.param_groups[0], "params": [torch.nn.Parameter(torch.ones(2))]}
    )
    optimizer.param_groups[0].pop(UPDATES)


def with_one_of_another_run(optimizer):
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    optimizer.add_param_group({**other.param_groups[0], UPDATES: 1000})


def all_but_those_of_the_experts(optimizer):
    optimizer.param_groups = optimizer.param_groups[1:-1]
    for group in optimizer.param_groups:
        group.pop(UPDATES)


@pytest.mark.parametrize(
    "change",
    [
        without_the_first,
        in_a_new_list,
        reversed_and_more,
        with_one_of_another_run,
        all_but_those_of_the_experts,
    ],
)
def test_the_schedule_goes_on_when_groups_change(ewa_vit, change):
    optimizer = in_groups(ewa_vit)
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "linear", total_updates=10)
    for step in range(3):
        train_step(ewa_vit, optimizer, step)
    change(optimizer)
    assert averaging.updates == 3
    train_step(ewa_vit, optimizer, 3)
    assert averaging.updates == 4
    assert averaging.share_rate == pytest.approx(0.3)
    assert ExpertWeightAveraging.of(optimizer) is averaging
    with pytest.raises(ValueError, match="already has"):
        ExpertWeightAveraging(ewa_vit, optimizer, total_updates=10)
    # The count is in a checkpoint, from which another optimizer of such groups resumes, whatever
    # was frozen.
    state = copy.deepcopy(optimizer.state_dict())
    averaging.remove()
    assert [group[UPDATES] for group in state["param_groups"]] == [4] * len(optimizer.param_groups)
    optimizer.param_groups[0].pop(UPDATES)
    optimizer.load_state_dict(state)
    optimizer.param_groups.pop()
    assert ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "linear", total_updates=10).updates == 4


def test_a_state_without_a_count_is_told_of_once(ewa_vit, caplog):
    """It was saved before the averaging began, as for the folds of a cross-validation."""
    optimizer = torch.optim.AdamW(ewa_vit.parameters(), lr=1e-3)
    state = copy.deepcopy(optimizer.state_dict())
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, total_updates=4)
    for step in range(2):
        train_step(ewa_vit, optimizer, step)
    optimizer.load_state_dict(state)
    train_step(ewa_vit, optimizer, 2)
    assert averaging.updates == 3
    optimizer.load_state_dict(state)
    averaging.seek(0)
    train_step(ewa_vit, optimizer, 0)
    assert averaging.updates == 1
    assert caplog.text.count("no count of updates") == 1


def test_a_state_that_was_taken_keeps_its_count(ewa_vit):
    """Such a state is loaded before each of several folds."""
    optimizer, averaging = averaged(ewa_vit, schedule="linear", total_updates=4)
    taken = optimizer.state_dict()
    for step in range(4):
        train_step(ewa_vit, optimizer, step)
    assert averaging.updates == 4
    optimizer.load_state_dict(taken)
    assert averaging.updates == 0
    train_step(ewa_vit, optimizer, 4)
    assert averaging.share_rate == pytest.approx(0.75 / 4)


@pytest.mark.parametrize("capturable", [False, True])
def test_the_count_of_a_loaded_state_goes_on(ewa_vit, capturable):
    """The count is another tensor than the loaded one where a step can be captured.

    The first group alone says that it can.
    """
    optimizer = in_groups(ewa_vit)
    optimizer.param_groups[0]["capturable"] = capturable
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "linear", total_updates=10)
    count = optimizer.param_groups[0][UPDATES]
    train_step(ewa_vit, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    for step in range(1, 4):
        train_step(ewa_vit, optimizer, step)
        assert averaging.updates == step + 1
    assert averaging.share_rate == pytest.approx(0.3)
    assert [int(group[UPDATES]) for group in optimizer.param_groups] == [4] * 4
    assert (optimizer.param_groups[0][UPDATES] is count) == capturable


@pytest.mark.parametrize("counting", [0, -1])
@pytest.mark.parametrize("loaded_first", [False, True])
def test_a_state_with_another_count_is_resumed(ewa_vit, loaded_first, counting):
    """It is also one in which a single group counts, as earlier versions wrote.

    It may be one in the middle of a run.
    """
    optimizer = in_groups(ewa_vit)
    train_step(ewa_vit, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][counting][UPDATES] = 2
    if loaded_first:
        optimizer.load_state_dict(state)
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, total_updates=10)
    if not loaded_first:
        for step in range(5):
            train_step(ewa_vit, optimizer, step)
        assert averaging.updates == 5
        optimizer.load_state_dict(state)
    assert averaging.updates == 2
    optimizer.param_groups.append(optimizer.param_groups.pop(0))
    train_step(ewa_vit, optimizer, 2)
    assert averaging.updates == 3
    assert [int(group[UPDATES]) for group in optimizer.param_groups] == [3] * len(
        optimizer.param_groups
    )


def test_a_stated_position_holds_whatever_the_state_counts(ewa_vit, caplog):
    """A run on fewer processes goes on in the midst of its schedule, which has more steps now."""
    optimizer = torch.optim.AdamW(ewa_vit.parameters())
    timm_moe.start_averaging(ewa_vit, optimizer, total_updates=4)
    for step in range(2):
        train_step(ewa_vit, optimizer, step)
    resumed = torch.optim.AdamW(ewa_vit.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    averaging = timm_moe.start_averaging(ewa_vit, resumed, total_updates=40, updates=20)
    assert averaging.updates == 20
    train_step(ewa_vit, resumed, 2)
    assert averaging.share_rate == pytest.approx(0.3 * 21 / 40)
    assert not caplog.messages


def test_a_run_that_begins_at_each_epoch_is_told_of(ewa_vit, caplog):
    """Its schedule begins at each epoch, too."""
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    for epoch in range(2):
        averaging = timm_moe.start_averaging(ewa_vit, optimizer, total_updates=4)
        assert ("Call start_averaging once" in caplog.text) == (epoch > 0)
        train_step(ewa_vit, optimizer, epoch)
        assert averaging.updates == 1


@pytest.mark.parametrize("updates", [0, 6])
def test_a_state_of_uncounted_steps_is_told_of(ewa_vit, updates, caplog):
    """Load the state of a first part without averaging, after the start."""
    first = torch.optim.AdamW(ewa_vit.parameters())
    for _ in range(6):
        still_step(ewa_vit, first)
    optimizer = torch.optim.AdamW(ewa_vit.parameters())
    averaging = timm_moe.start_averaging(ewa_vit, optimizer, total_updates=10, updates=updates)
    optimizer.load_state_dict(first.state_dict())
    still_step(ewa_vit, optimizer)
    assert averaging.updates == updates + 1
    assert ("took steps that nobody counted" in caplog.text) == (updates == 0)
    assert "no count of updates" not in caplog.text


def test_a_run_may_begin_with_an_optimizer_that_has_stepped(ewa_vit, caplog):
    """Its first steps trained the model without averaging."""
    optimizer = torch.optim.AdamW(ewa_vit.parameters())
    for _ in range(2):
        still_step(ewa_vit, optimizer)
    averaging = timm_moe.start_averaging(ewa_vit, optimizer, total_updates=10)
    still_step(ewa_vit, optimizer)
    assert averaging.updates == 1
    assert "took steps that nobody counted" not in caplog.text


def test_a_state_with_a_count_is_not_told_of(ewa_vit, caplog):
    first, optimizer = (torch.optim.AdamW(ewa_vit.parameters()) for _ in range(2))
    for each in (first, optimizer):
        averaging = ExpertWeightAveraging(ewa_vit, each, total_updates=10)
    for _ in range(2):
        still_step(ewa_vit, first)
    optimizer.load_state_dict(first.state_dict())
    still_step(ewa_vit, optimizer)
    assert averaging.updates == 3
    assert not caplog.messages


def test_two_models_of_an_optimizer_are_started_at_once(ewa_vit):
    models = nn.ModuleList([ewa_vit, copy.deepcopy(ewa_vit)])
    optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
    before = spread(ewa_vit)
    timm_moe.start_averaging(models[0], optimizer, total_updates=1)
    with pytest.raises(ValueError, match=r"averages the experts of another model: .*ModuleList"):
        timm_moe.start_averaging(models[1], optimizer, total_updates=1)
    timm_moe.start_averaging(models, optimizer, total_updates=1)
    still_step(models, optimizer)
    assert [spread(model) for model in models] == pytest.approx([0.6 * before] * 2)


def test_a_run_may_leave_out_a_model_that_the_optimizer_does_not_train(ewa_vit):
    models = nn.ModuleList([ewa_vit, copy.deepcopy(ewa_vit)])
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    timm_moe.start_averaging(models, optimizer, total_updates=1)
    averaging = timm_moe.start_averaging(ewa_vit, optimizer, total_updates=1)
    assert ExpertWeightAveraging.of(optimizer) is averaging


def test_steps_add_no_hooks(ewa_vit):
    """Each would make all later steps slower."""
    optimizer, averaging = averaged(ewa_vit)
    hooks = optimizer._optimizer_step_post_hooks
    before = len(hooks)
    for _ in range(3):
        still_step(ewa_vit, optimizer)
    assert len(hooks) == before
    averaging.remove()
    assert len(hooks) == before - 1


def test_steps_far_beyond_the_end_are_told_of_once(ewa_vit, caplog):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    ExpertWeightAveraging(ewa_vit, optimizer, total_updates=10)
    for _ in range(11):
        still_step(ewa_vit, optimizer)
    assert not caplog.messages
    for _ in range(3):
        still_step(ewa_vit, optimizer)
    assert len(caplog.messages) == 1
    assert "total_updates=10" in caplog.text


@pytest.mark.parametrize("total_updates", [float("inf"), float("nan")])
def test_a_run_without_an_end_has_no_schedule(total_updates):
    """A progress of NaN would make all experts NaN, and one of 0 would never average."""
    model = make_model("vit_tiny_ewa_moe")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="total_updates must be at least 1"):
        ExpertWeightAveraging(model, optimizer, total_updates=total_updates)
