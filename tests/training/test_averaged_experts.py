"""Experts that are averaged: those that the optimizer trains at each step."""

import copy
import logging

import pytest
import torch
from averaging_loop import EXPERTS, apart, moved, spreads, still_step, values
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.nn.utils import parametrize, prune

import timm_moe
from timm_moe import ExpertWeightAveraging
from timm_moe.training.optimizers import layers_of_trained_experts, parameter_ids


@pytest.mark.parametrize("left_out", [None, *sorted(EXPERTS)])
def test_every_parameter_of_the_experts_is_averaged_and_no_other(ewa_vit, left_out):
    parameters = [parameter for name, parameter in ewa_vit.named_parameters() if name != left_out]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=3)
    before = values(apart(ewa_vit))
    still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == EXPERTS - {left_out}
    assert {name for name, spread in spreads(ewa_vit).items() if spread > 1e-6} == {left_out} - {
        None
    }


def test_frozen_experts_stay_where_they_are(ewa_vit, caplog):
    frozen = {"blocks.1.mlp.fc2.weight", "blocks.3.mlp.fc1.bias"}
    ewa_vit.get_parameter("blocks.1.mlp.fc2.weight").requires_grad_(False)
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
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
    assert (averaging.updates, averaging.share_rate) == (3, 0)
    assert not caplog.messages


@pytest.mark.parametrize("by_timm", [False, True])
def test_experts_that_come_later_are_averaged_from_then_on(ewa_vit, caplog, by_timm):
    first, later = ewa_vit.blocks[1].mlp, ewa_vit.blocks[3].mlp
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
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


def begin(way, model, optimizer):
    """Start the averaging of a run of four updates; its class, a loop of one's own, timm's."""
    if way == "class":
        ExpertWeightAveraging(model, optimizer, total_updates=4)
    elif way == "function":
        timm_moe.training.start_averaging(model, optimizer, 4)
    else:
        create_scheduler_v2(optimizer, sched="none", num_epochs=2, updates_per_epoch=2)


@pytest.mark.parametrize("way", ["class", "function", "timm"])
def test_experts_that_are_all_frozen_first_are_averaged_once_they_come(ewa_vit, caplog, way):
    caplog.set_level(logging.INFO)
    ewa_vit.blocks.requires_grad_(False)
    optimizer = torch.optim.SGD(ewa_vit.head.parameters(), lr=0.1)
    begin(way, ewa_vit, optimizer)
    assert not caplog.messages
    before = values(apart(ewa_vit))
    still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == set()
    ewa_vit.blocks.requires_grad_(True)
    optimizer.add_param_group({"params": ewa_vit.blocks.parameters()})
    still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == EXPERTS
    averaging = ExpertWeightAveraging.of(optimizer)
    assert averaging.updates == 2
    assert averaging.share_rate == pytest.approx(0.3 * 2 / 4)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "averaging the" in caplog.text
    state = optimizer.state_dict()
    assert [int(group["ewa_updates"]) for group in state["param_groups"]] == [2, 2]


def test_who_trains_no_experts_beyond_the_end_hears_nothing(ewa_vit, caplog):
    ewa_vit.blocks.requires_grad_(False)
    optimizer = torch.optim.SGD(ewa_vit.head.parameters(), lr=0.1)
    ExpertWeightAveraging(ewa_vit, optimizer, total_updates=1)
    for _ in range(3):
        still_step(ewa_vit.head, optimizer)
    assert not caplog.messages


@pytest.mark.parametrize("way", ["class", "function"])
def test_experts_that_are_not_frozen_and_left_out_are_refused(ewa_vit, way):
    optimizer = torch.optim.SGD(ewa_vit.head.parameters(), lr=0.1)
    if way == "class":
        with pytest.raises(ValueError, match="trains no expert layer"):
            begin(way, ewa_vit, optimizer)
    else:
        begin(way, ewa_vit, optimizer)
    assert ExpertWeightAveraging.of(optimizer) is None


def test_shared_experts_are_none_of_those_that_are_averaged(dense_vit):
    model = timm_moe.convert_to_moe(dense_vit, router="top_k", shared_expert=True, share_rate=0.2)
    shared = [layer.shared for layer in timm_moe.moe_layers(model).values()]
    optimizer = torch.optim.SGD(nn.ModuleList(shared).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="trains no expert layer"):
        ExpertWeightAveraging(model, optimizer, total_updates=2)


def test_a_student_of_a_frozen_teacher_with_experts_is_left_alone(ewa_vit, caplog):
    caplog.set_level(logging.INFO)
    ewa_vit.requires_grad_(False)  # This is the teacher.
    student = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    before = optimizer.state_dict()
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=2, updates_per_epoch=200
    )
    scheduler.step_update(400)
    for epoch in range(2):
        optimizer.step()
        scheduler.step(epoch + 1)
    assert optimizer.state_dict()["param_groups"][0].keys() == {
        *before["param_groups"][0],
        "initial_lr",
    }
    assert not caplog.messages


def test_a_teacher_under_no_grad_keeps_its_experts(ewa_vit):
    """In a module of teacher and student, with one optimizer for all parameters."""
    teacher, student = apart(ewa_vit).eval(), apart(copy.deepcopy(ewa_vit)).train()
    both = nn.ModuleList([teacher, student])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    ExpertWeightAveraging(both, optimizer, 0.75, "constant", total_updates=3)
    before = values(teacher)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        target = teacher(images)
    (student(images) - target).square().mean().backward()
    optimizer.step()
    assert max(spreads(student).values()) < 1e-5
    # What was trained before is averaged without gradients, too.
    optimizer.zero_grad()
    apart(student)
    optimizer.step()
    assert max(spreads(student).values()) < 1e-5
    assert moved(teacher, before) == set()


def test_a_step_that_frees_its_gradients_is_averaged(ewa_vit):
    class Freeing(torch.optim.Optimizer):
        def step(self, closure=None):
            self.zero_grad()

    optimizer = Freeing(apart(ewa_vit).parameters(), {"lr": 0.1})
    ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=3)
    still_step(ewa_vit, optimizer)
    assert max(spreads(ewa_vit).values()) < 1e-5


def test_gradients_that_a_closure_computes_count(ewa_vit, caplog):
    """No gradient is there as the first step begins, as with LBFGS."""
    optimizer = torch.optim.SGD(apart(ewa_vit).parameters(), lr=1e-3)
    ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=3)
    optimizer.step(lambda: ewa_vit(torch.randn(2, 3, 32, 32)).mean().backward())
    assert max(spreads(ewa_vit).values()) < 1e-5
    assert not caplog.messages


def test_a_run_without_an_end_that_trains_no_experts_is_no_error(ewa_vit):
    ewa_vit.blocks.requires_grad_(False)
    optimizer = torch.optim.SGD(ewa_vit.head.parameters(), lr=0.1)
    assert timm_moe.training.start_averaging(ewa_vit, optimizer, float("inf")) is None


@pytest.mark.parametrize("rates", [(0.3, 0.3), (0.15, 0.6), (0.0, 0.6)])
def test_what_two_layers_share_is_averaged_once_at_the_rate_of_the_first(ewa_vit, rates):
    first, second = ewa_vit.blocks[1].mlp, ewa_vit.blocks[3].mlp
    for layer, rate in zip((first, second), rates, strict=True):
        layer.share_rate, layer.share_schedule = rate, "constant"
    second.fc1.weight = first.fc1.weight
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.1)
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, total_updates=2)
    old = first.fc1.weight.detach().clone()
    still_step(ewa_vit, optimizer)
    assert averaging.share_rate == rates[0]
    new = first.fc1.weight.detach()
    torch.testing.assert_close(new - new.mean(0), (1 - 4 / 3 * rates[0]) * (old - old.mean(0)))
    timm_moe.average_experts_(ewa_vit, 0.3)
    newest = first.fc1.weight.detach()
    torch.testing.assert_close(
        newest - newest.mean(0), 0.6 * (1 - 4 / 3 * rates[0]) * (old - old.mean(0))
    )


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


COMPUTED = {
    "pruned": lambda module: prune.random_unstructured(module, "weight", 0.5),
    "weight norm by a hook": lambda module: nn.utils.weight_norm(module),
    "spectral norm by a hook": lambda module: nn.utils.spectral_norm(module),
    "weight norm": lambda module: nn.utils.parametrizations.weight_norm(module),
    "parametrized": lambda module: parametrize.register_parametrization(
        module, "weight", Doubled()
    ),
}


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_optimizer_of_computed_experts_trains_their_layer(ewa_vit, how):
    layers = [block.mlp for block in ewa_vit.blocks if hasattr(block.mlp, "router")]
    for part in (layers[0].fc1, layers[0].fc2):
        COMPUTED[how](part)
    optimizer = torch.optim.SGD(
        [parameter for parameter in layers[0].parameters() if parameter.ndim == 3], lr=0.1
    )
    assert layers_of_trained_experts(parameter_ids(optimizer), layers) == layers[:1]


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
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
        message = r"fc2\.weight .*blocks\.3\.mlp.*cannot be averaged"
        with pytest.raises(ValueError, match=message):
            optimizer.step() if asked_before else ExpertWeightAveraging(
                model, optimizer, total_updates=2
            )
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
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp.*fc1\.weight.*\(4, 128, 32\)"):
        still_step(ewa_vit, optimizer)
    assert moved(ewa_vit, before) == set()


def test_two_optimizers_on_one_layer_average_each_parameter_once(ewa_vit):
    weights = [
        parameter for name, parameter in ewa_vit.named_parameters() if name.endswith("weight")
    ]
    biases = [
        parameter for name, parameter in ewa_vit.named_parameters() if not name.endswith("weight")
    ]
    before = copy.deepcopy(ewa_vit)
    for parameters in (weights, biases):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        ExpertWeightAveraging(ewa_vit, optimizer, 0.3, "constant", total_updates=5)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name in ("blocks.1.mlp.fc1.weight", "blocks.1.mlp.fc2.bias"):
        old, new = before.get_parameter(name), ewa_vit.get_parameter(name)
        torch.testing.assert_close(new - new.mean(0), 0.6 * (old - old.mean(0)))
