"""Checks before a step: experts that nothing averages, and optimizers older than the experts."""

import copy
import gc
import pickle
from functools import partial

import pytest
import timm
import torch
from averaging_loop import apart, moved, spread, still_step, train_step, values
from common import SMALL_VIT
from timm.scheduler import create_scheduler_v2
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import timm_moe
from timm_moe import ExpertWeightAveraging
from timm_moe.training.step import before_step


def test_experts_that_nothing_averages_are_told_of_once(ewa_vit, caplog):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    for step in range(2):
        train_step(ewa_vit, optimizer, step)
    assert len(caplog.messages) == 1
    assert "nothing averages the experts" in caplog.text
    control = timm.create_model("vit_tiny_ewa_moe", share_rate=0, **SMALL_VIT)
    train_step(control, torch.optim.SGD(control.parameters(), lr=0.1), 0)
    assert len(caplog.messages) == 1


def test_experts_beside_the_averaged_ones_are_told_of(ewa_vit, caplog):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    ExpertWeightAveraging(ewa_vit.blocks[1], optimizer, total_updates=2)
    for step in range(2):
        train_step(ewa_vit, optimizer, step)
    assert len(caplog.messages) == 1
    assert "nothing averages the experts" in caplog.text
    assert "(in blocks.3.mlp)" in caplog.text


@pytest.mark.parametrize("router", ["random", "top_k"])
def test_experts_that_are_trained_in_eval_mode_are_told_of_once(dense_vit, caplog, router):
    """A model of transformers comes in eval mode, and neither Lightning nor a loop changes it."""
    model = timm_moe.convert_to_moe(dense_vit.eval(), num_experts=2, router=router)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if router == "random":
        ExpertWeightAveraging(model, optimizer, total_updates=5)
    for step in range(2):
        train_step(model, optimizer, step)
    (told,) = caplog.messages
    assert "blocks.1.mlp" in told
    assert "model.train()" in told
    model.train()
    optimizer = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
    model.eval()  # other parts are trained
    train_step(model, optimizer, 0)
    assert len(caplog.messages) == 1


def test_each_run_of_an_optimizer_is_told_anew(ewa_vit, caplog):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    ewa_vit.eval()
    for runs in (1, 2):
        timm_moe.start_averaging(ewa_vit, optimizer, 5)
        train_step(ewa_vit, optimizer, 0)
        train_step(ewa_vit, optimizer, 1)
        assert caplog.text.count("trained in eval mode") == runs


@pytest.mark.parametrize("made", ["before loading", "after loading", "and sought"])
@pytest.mark.first_case
def test_a_distributed_checkpoint_and_the_count_of_updates(ewa_vit, tmp_path, caplog, made):
    """Such a checkpoint loads what the optimizer has already.

    So it loads no count into an optimizer that has no averaging.
    """
    optimizer = torch.optim.AdamW(ewa_vit.parameters())
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, total_updates=10)
    for step in range(3):
        train_step(ewa_vit, optimizer, step)
    dcp.save({"optimizer": get_optimizer_state_dict(ewa_vit, optimizer)}, checkpoint_id=tmp_path)
    averaging.remove()
    ewa_vit.zero_grad()

    optimizer = torch.optim.AdamW(ewa_vit.parameters())
    if made == "before loading":
        averaging = ExpertWeightAveraging(ewa_vit, optimizer, total_updates=10)
    state = {"optimizer": get_optimizer_state_dict(ewa_vit, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(ewa_vit, optimizer, state["optimizer"])
    if made != "before loading":
        averaging = ExpertWeightAveraging(ewa_vit, optimizer, total_updates=10)
    if made == "and sought":
        averaging.seek(3)
    for step in range(2):
        train_step(ewa_vit, optimizer, step)
    assert averaging.updates == (2 if made == "after loading" else 5)
    assert caplog.text.count("averaging.seek(updates)") == (1 if made == "after loading" else 0)
    assert "nothing averages" not in caplog.text


@pytest.mark.parametrize("has_frozen", [False, True])
@pytest.mark.parametrize("opt", [torch.optim.AdamW, torch.optim.SGD])
def test_saving_and_loading_an_optimizers_state_changes_nothing(ewa_vit, opt, has_frozen):
    """torch makes a state by a step, and for SGD without momentum at each call."""
    ewa_vit.patch_embed.requires_grad_(not has_frozen)

    def begin(model):
        optimizer = opt(model.parameters(), lr=0.1)
        return optimizer, timm_moe.start_averaging(model, optimizer, total_updates=4)

    resumed = copy.deepcopy(apart(ewa_vit))
    optimizer, averaging = begin(ewa_vit)
    for done in range(3):
        before = values(ewa_vit)
        state = copy.deepcopy(get_optimizer_state_dict(ewa_vit, optimizer))
        set_optimizer_state_dict(ewa_vit, optimizer, copy.deepcopy(state))
        assert moved(ewa_vit, before) == set()
        assert averaging.updates == done
        train_step(ewa_vit, optimizer, done)
        optimizer.zero_grad()

    optimizer, averaging = begin(resumed)
    resumed.load_state_dict(ewa_vit.state_dict())
    set_optimizer_state_dict(resumed, optimizer, state)
    assert moved(resumed, values(ewa_vit)) == set()
    assert averaging.updates == 2


def test_saving_an_optimizers_state_between_forward_and_backward_takes_no_losses():
    model = timm.create_model("vit_tiny_moe", num_experts=2, **SMALL_VIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 32, 32))
    get_optimizer_state_dict(model, optimizer)
    assert timm_moe.auxiliary_loss(model) > 0


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_the_first_step_of_a_warm_up_from_0_counts(ewa_vit, rate, by_closure):
    optimizer = torch.optim.SGD(apart(ewa_vit).parameters(), lr=rate)
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=5)
    if by_closure:
        optimizer.step(lambda: ewa_vit(torch.randn(4, 3, 32, 32)).square().mean().backward())
    else:
        train_step(ewa_vit, optimizer, 0)
    assert averaging.updates == 1
    assert spread(ewa_vit) < 1e-6


def test_an_interrupted_step_does_not_hide_that_nothing_averages(ewa_vit, caplog):
    interrupted = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    ExpertWeightAveraging(ewa_vit, interrupted, total_updates=5)

    def closure():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted.step(closure)
    train_step(ewa_vit, torch.optim.SGD(ewa_vit.parameters(), lr=0.1), 0)
    assert "nothing averages the experts" in caplog.text


@pytest.mark.parametrize("step", [None, torch.zeros(2), torch.zeros(0), "3", 1, torch.tensor(1.0)])
def test_states_of_other_optimizers_end_no_step(ewa_vit, caplog, step):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    optimizer.state["k"] = torch.zeros(3)
    optimizer.state[ewa_vit.head.weight] = {"step": step}
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, total_updates=10)
    train_step(ewa_vit, optimizer, 0)
    assert (averaging.updates, caplog.messages) == (1, [])


def test_a_rate_that_the_optimizer_finds_by_itself_moves_experts(ewa_vit, caplog):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    before_step(optimizer, (), {})
    assert "nothing averages" in caplog.text


def test_a_rate_on_a_device_is_not_read_at_each_step(ewa_vit):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    ExpertWeightAveraging(ewa_vit, optimizer, total_updates=2)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")  # reading it is an error
    before_step(optimizer, (), {})


def test_routers_alone_need_no_averaging(caplog):
    model = timm.create_model("vit_tiny_moe", num_experts=2, share_rate=0.3, **SMALL_VIT)
    optimizer = torch.optim.SGD(
        [model.blocks[1].mlp.router.weight, *model.head.parameters()], lr=0.1
    )
    create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=2)
    assert ExpertWeightAveraging.of(optimizer) is None
    with pytest.raises(ValueError, match="trains no expert layer"):
        ExpertWeightAveraging(model, optimizer, total_updates=2)
    still_step(model, optimizer)
    assert not caplog.messages


@pytest.mark.parametrize("router", ["random", "top_k"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_optimizer_older_than_the_experts_is_told_at_its_first_step(
    dense_vit, router, steps_before
):
    optimizer = torch.optim.AdamW(dense_vit.parameters(), lr=1e-3)
    for update in range(steps_before):
        train_step(dense_vit, optimizer, update)
    timm_moe.convert_to_moe(dense_vit, num_experts=2, router=router)
    before = values(dense_vit)
    with pytest.raises(ValueError, match=r"older.*blocks\.1\.mlp.*convert_to_moe"):
        train_step(dense_vit, optimizer, 0)
    assert moved(dense_vit, before) == set()


def test_experts_added_to_an_older_optimizer_are_trained(dense_vit, caplog):
    optimizer = torch.optim.SGD(dense_vit.parameters(), lr=0.1)
    timm_moe.convert_to_moe(dense_vit.train(), num_experts=2, share_rate=0)
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
    replaced = [parameter for reference in layer.replaced if (parameter := reference()) is not None]
    assert [parameter is weights[1] for parameter in replaced] == [True]
    assert not copy.deepcopy(layer).replaced
    assert not pickle.loads(pickle.dumps(layer)).replaced
    del weights, replaced
    gc.collect()
    assert [reference() for reference in layer.replaced] == [None] * 4


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
@pytest.mark.parametrize(("before", "now"), [(2, 4), (4, 2)])
def test_the_state_of_another_number_of_experts_is_refused(before, now, make, fused):
    """A fused step would read or write beyond the end of its tensors."""
    optimizers = []
    for num_experts in (before, now):
        model = timm.create_model("vit_tiny_ewa_moe", num_experts=num_experts, **SMALL_VIT)
        optimizers.append(make(model.parameters(), lr=0.1, fused=fused))
        ExpertWeightAveraging(model, optimizers[-1], total_updates=2)
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    first, second = optimizers
    first.step()
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=rf"of {before}, not of {now} experts.*--no-resume-opt"):
        second.step()
