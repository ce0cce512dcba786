"""Averaging of optimizers that work by another one, and of those whose steps cannot be followed."""

import copy
import logging
from operator import attrgetter

import pytest
import torch
from averaging_loop import average_, spread
from timm.optim.lookahead import Lookahead
from timm.scheduler import create_scheduler_v2

import timm_moe
from timm_moe import ExpertWeightAveraging


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


class Kept(torch.optim.Optimizer):
    """SGD that keeps weights beside the parameters and returns to them, as Lookahead does."""

    def __init__(self, params, entry):
        super().__init__(params, {})
        self.entry = entry

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault(self.entry, parameter.clone())
            parameter.sub_(parameter.grad, alpha=0.01).lerp_(kept, 0.5)


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
    [lambda groups, lr: Lookahead(torch.optim.SGD(groups, lr=lr), k=2), torch.optim.SGD],
)
@pytest.mark.first_case
def test_sam_is_averaged_once_an_update(ewa_vit, caplog, step, given, base):
    reference = copy.deepcopy(ewa_vit)
    for layer in timm_moe.moe_layers(reference).values():
        layer.share_rate = 0.0
    optimizer = SAM(ewa_vit.parameters(), base, lr=0.05)
    averaging = ExpertWeightAveraging(
        ewa_vit,
        attrgetter(given)(optimizer) if given else optimizer,
        0.3,
        "linear",
        total_updates=5,
    )
    by_itself = SAM(reference.parameters(), base, lr=0.05)
    for update in range(5):  # the slow update of Lookahead moves from the fourth on
        step(ewa_vit, optimizer, update)
        step(reference, by_itself, update)
        timm_moe.average_experts_(reference, 0.3 * (update + 1) / 5)
        states = getattr(
            by_itself.base_optimizer, "_base_optimizer", by_itself.base_optimizer
        ).state
        for stacked in timm_moe.expert_parameters(reference).values():
            if "lookahead_slow_buff" in states[stacked]:
                average_(states[stacked]["lookahead_slow_buff"], 0.3 * (update + 1) / 5)
        assert averaging.updates == update + 1
        for a, b in zip(ewa_vit.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    assert not caplog.messages
    assert (
        ExpertWeightAveraging.of(optimizer)
        is ExpertWeightAveraging.of(optimizer.base_optimizer)
        is averaging
    )


@pytest.mark.parametrize("entry", ["slow_params", "slow_buffer", "lookahead_params"])
def test_weights_that_optimizers_return_to_are_averaged(ewa_vit, entry):
    """Their names in pytorch_optimizer's Lookahead, Ranger and Ranger21."""
    for stacked in timm_moe.expert_parameters(ewa_vit).values():
        stacked.data += torch.randn_like(stacked)
    optimizer = Kept(ewa_vit.parameters(), entry)
    ExpertWeightAveraging(ewa_vit, optimizer, 0.3, "constant", total_updates=10)
    before = spread(ewa_vit)
    for update in range(10):
        backward(ewa_vit, optimizer, update)
        optimizer.step()
    assert spread(ewa_vit) < 0.05 * before


def test_an_optimizer_that_computes_experts_from_their_first_values_is_refused(ewa_vit):
    """D-Adaptation's SGD and AdaGrad."""
    optimizer = Kept(ewa_vit.parameters(), "x0")
    ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=3)
    with pytest.raises(ValueError, match=r"Kept .*x0.*share_rate=0"):
        by_closure(ewa_vit, optimizer, 0)


class Several(torch.optim.Optimizer):
    """Steps by optimizers of parts of its parameters, and has their groups or groups of its own."""

    def __init__(self, parts, are_own=True):
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {"lr": 0.05})
        self.parts = parts
        if not are_own:
            self.param_groups = groups

    def step(self, closure=None):
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("way", ["own groups", "the same groups", "nested"])
def test_steps_of_the_optimizers_in_a_list_are_parts_of_one_step(ewa_vit, caplog, way):
    parts = [
        torch.optim.SGD([p for p in ewa_vit.parameters() if (p.ndim > 2) == is_large], lr=0.05)
        for is_large in (False, True)
    ]
    optimizer = Several([Several(parts)] if way == "nested" else parts, way != "the same groups")
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=3)
    for update in range(2):
        backward(ewa_vit, optimizer, update)
        optimizer.step()
        assert averaging.updates == update + 1
        assert spread(ewa_vit) < 1e-6
    assert not caplog.messages


class Hidden(SAM):
    """Has its base where nobody looks for it."""

    @property
    def base_optimizer(self):
        return self.held["base"]

    @base_optimizer.setter
    def base_optimizer(self, base):
        self.held = {"base": base}


def test_a_step_of_an_optimizer_with_the_same_groups_is_a_part_of_the_outer_step(ewa_vit):
    optimizer = Hidden(ewa_vit.parameters(), torch.optim.SGD, lr=0.05)
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "constant", total_updates=3)
    for update in range(2):
        by_closure(ewa_vit, optimizer, update)
        assert averaging.updates == update + 1


@pytest.mark.parametrize(
    "outer", [Lookahead, lambda inner: SAM(inner.param_groups, torch.optim.SGD, lr=0.05)]
)
def test_a_group_that_is_taken_out_does_not_start_the_schedule_over(ewa_vit, outer):
    parts = (ewa_vit.patch_embed, ewa_vit.blocks)
    optimizer = outer(
        torch.optim.SGD([{"params": list(part.parameters())} for part in parts], lr=0.05)
    )
    averaging = ExpertWeightAveraging(ewa_vit, optimizer, 0.75, "linear", total_updates=10)
    for update in range(4):
        by_closure(ewa_vit, optimizer, update)
        if update == 1:
            optimizer.param_groups.pop(0)
        assert averaging.updates == update + 1
        assert averaging.share_rate == pytest.approx(0.075 * (update + 1))
        assert ExpertWeightAveraging.of(optimizer) is averaging


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
            loss = model(torch.randn(4, 3, 32, 32)).square().mean() * (
                float("nan") if skipped else 1
            )
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

    with pytest.raises(TypeError, match=r"Engine.*torch\.optim\.Optimizer"):
        ExpertWeightAveraging(ewa_vit, Engine(), total_updates=5)


def test_a_step_replaced_beforehand_is_refused(ewa_vit):
    class Unhooked(Lookahead):
        def step(self, closure=None):
            return super().step(closure)

    optimizer = Unhooked(torch.optim.SGD(ewa_vit.parameters(), lr=0.05))
    # Puts a step of its own in the place of the one without hooks.
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match=r"Unhooked.*step was replaced"):
        ExpertWeightAveraging(ewa_vit, optimizer, total_updates=5)
