"""Optimizers that are not torch's.

Some hold copies of the weights, or keep a second sequence of them.
"""

import copy
import warnings
from functools import partial

import pytest
import timm
import torch
from averaging_loop import average_, spread, still_step
from common import SMALL_VIT
from routed_loop import routed_model
from timm.layers import Mlp
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn

import timm_moe
from timm_moe import ExpertWeightAveraging, start_averaging
from timm_moe.convert.hooks import add_hooks
from timm_moe.layers import EwaMlp, RandomPartition, RecordingRouter, routing_to


class Own:
    """An optimizer written by hand."""

    def __init__(self, model):
        self.parameters = list(model.parameters())

    def step(self):
        for parameter in self.parameters:
            parameter.data.sub_(parameter.grad, alpha=0.01)


class OfCopies:
    """A torch optimizer of float32 copies, and what a loop does around it."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.copies = [
            parameter.detach().clone().float().requires_grad_() for parameter in self.parameters
        ]
        self.optimizer = torch.optim.SGD(self.copies, lr=0.01)

    def step(self):
        for parameter, copied in zip(self.parameters, self.copies, strict=True):
            copied.grad = parameter.grad.float()
        self.optimizer.step()
        for parameter, copied in zip(self.parameters, self.copies, strict=True):
            parameter.data.copy_(copied)


def test_an_optimizer_of_copies_is_refused(ewa_vit):
    optimizer = OfCopies(ewa_vit).optimizer
    for start in (start_averaging, lambda *args: ExpertWeightAveraging(*args[:2], total_updates=3)):
        with pytest.raises(ValueError, match=r"no parameter.*timm_moe\.average_experts_"):
            start(ewa_vit, optimizer, 3)
    assert ExpertWeightAveraging.of(optimizer) is None


def test_what_is_no_torch_optimizer_is_refused(ewa_vit):
    with pytest.raises(TypeError, match=r"Own .*timm_moe\.average_experts_\(model, rate\)"):
        start_averaging(ewa_vit, Own(ewa_vit), 3)


def test_what_needs_no_averaging_is_not_refused(ewa_vit):
    assert start_averaging(ewa_vit, torch.optim.SGD(ewa_vit.head.parameters(), lr=0.1), 3) is None
    ewa_vit.requires_grad_(False)
    head = nn.Linear(5, 2)
    assert start_averaging(ewa_vit, torch.optim.SGD(head.parameters(), lr=0.1), 3) is None
    routed = routed_model()  # without a share rate
    assert start_averaging(routed, Own(routed), 3) is None


@pytest.fixture
def few_forwards(monkeypatch):
    """Let a model complain after three forwards."""
    monkeypatch.setattr("timm_moe.convert.unseen_optimizer.MOST_FORWARDS", 3)


def layers_alone(model):
    """A module of the expert layers, all of whose parameters get a gradient."""
    layers = nn.Sequential(*timm_moe.moe_layers(model).values())
    add_hooks(layers, layers)
    return layers


def warnings_of(layers, step, loss_of=torch.Tensor.mean):
    """The warnings of a loop of six steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            loss_of(layers(torch.randn(4, 2, 32).requires_grad_())).backward()
            step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", [Own, OfCopies])
def test_experts_that_an_unseen_optimizer_trains_are_told_of_once(ewa_vit, kind, few_forwards):
    layers = layers_alone(ewa_vit)
    told = warnings_of(layers, kind(layers).step)
    assert len(told) == 1
    assert "timm_moe.average_experts_(model, rate)" in told[0]
    assert "auxiliary_loss" not in told[0]


def test_a_layer_that_blocks_share_is_told_of_after_as_many_forwards(few_forwards):
    model = routed_model("widenet_b", share_rate=0.1, aux_loss_weight=0.0)
    told = []
    for _ in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.randn(1, 3, 32, 32)).sum().backward()
        told.append(len(caught))
    assert told == [0, 0, 1, 0]


def test_forwards_of_a_feature_extractor_count(few_forwards):
    model = timm.create_model("vit_tiny_ewa_moe", features_only=True, **SMALL_VIT)
    images = torch.randn(1, 3, 32, 32)
    model(images), model(images)
    with pytest.warns(UserWarning, match="Experts ran forward 3 times in training mode"):
        model(images)


def test_losses_that_nobody_adds_for_an_unseen_optimizer_are_told_of_once(few_forwards):
    layers = layers_alone(routed_model())
    told = warnings_of(layers, Own(layers).step)
    assert len(told) == 1
    assert "timm_moe.auxiliary_loss(model)" in told[0]
    assert "average_experts_" not in told[0]


class OwnRouter(RecordingRouter):
    """A router of a user's, whose parameters have names of their own."""

    def __init__(self, dim, num_experts):
        super().__init__(num_experts, {}, bias_rate=0.1)
        self.gate = nn.Linear(dim, num_experts)

    def forward(self, x):
        gate_T1, expert_T1 = self.balancing_bias(self.gate(x.flatten(0, -2))).max(1, keepdim=True)
        return routing_to(expert_T1, gate_T1, self.num_experts)


def of_own_router():
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    return timm_moe.convert_to_moe(model, router=OwnRouter)


@pytest.mark.parametrize("make", [partial(routed_model, balance="bias"), of_own_router])
def test_a_bias_that_an_unseen_optimizer_leaves_at_zero_is_told_of_once(make, few_forwards):
    layers = layers_alone(make())
    own = Own(layers)
    told = warnings_of(layers, own.step)
    assert len(told) == 1
    assert "bias.update(bias.load)" in told[0]


def test_a_bias_that_is_updated_or_not_trained_is_not_told_of(few_forwards):
    def step():
        own.step()
        for bias in (layer.router.balancing_bias for layer in layers):
            bias.update(bias.load)

    layers = layers_alone(routed_model(balance="bias"))
    own = Own(layers)
    assert warnings_of(layers, step) == []
    layers = layers_alone(routed_model(balance="bias").requires_grad_(False))
    assert warnings_of(layers, lambda: None) == []


def test_accumulated_gradients_are_no_reason(ewa_vit):
    layers = layers_alone(ewa_vit)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Experts ran forward")
        for _ in range(255):
            layers(torch.randn(4, 2, 32)).mean().backward()


@pytest.mark.parametrize("case", ["by hand", "no rate", "frozen", "torch's", "losses added"])
def test_who_does_as_told_hears_nothing(ewa_vit, case, few_forwards):
    layers = layers_alone(routed_model() if case == "losses added" else ewa_vit)
    step, loss_of = Own(layers).step, torch.Tensor.mean
    if case == "by hand":
        step = lambda: timm_moe.average_experts_(layers, 0.3)  # noqa: E731
    if case == "no rate":
        for layer in layers:
            layer.share_rate = 0.0
    if case == "frozen":
        layers.requires_grad_(False)
        step = lambda: None  # noqa: E731
    if case == "torch's":
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
        averaging = ExpertWeightAveraging(layers, optimizer, total_updates=300)
        step = optimizer.step
    if case == "losses added":
        loss_of = lambda y: y.mean() + timm_moe.auxiliary_loss(layers)  # noqa: E731
    assert warnings_of(layers, step, loss_of) == []
    assert case != "torch's" or averaging.updates == 6


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682).

    Gradients are taken at y, steps are of z, and x is evaluated.
    """

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta, k=1))

    def _move(self, weight_of):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight_of(group["beta"]))

    def eval(self):
        self._move(lambda beta: 1 - 1 / beta)

    def train(self):
        self._move(lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).add_(
                    p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1)
                )
                z.sub_(p.grad, alpha=group["lr"])


def test_schedule_free_weights_are_averaged_in_every_sequence(ewa_vit):
    layers = layers_alone(ewa_vit)
    by_hand = copy.deepcopy(layers)
    optimizer, other = (ScheduleFree(each.parameters()) for each in (layers, by_hand))
    ExpertWeightAveraging(layers, optimizer, 0.3, "constant", total_updates=9)
    for layer in by_hand:
        layer.share_rate = 0.0
    for update in range(4):
        for model, each in ((layers, optimizer), (by_hand, other)):
            torch.manual_seed(update)
            model(torch.randn(8, 4, 32)).square().mean().backward()
            each.step()
            each.zero_grad()
        for parameter in by_hand.parameters():
            state = other.state[parameter]
            for weights in (parameter, state["z"]):
                average_(weights, 0.3)
    for mode in ("train", "eval"):
        for a, b in zip(layers.parameters(), by_hand.parameters(), strict=True):
            torch.testing.assert_close(a, b, msg=mode)
        for each in (optimizer, other):
            each.eval()


class ThreeSequences(torch.optim.Optimizer):
    """Keeps x, y and z beside a parameter, as schedule-free optimizers in their reference form."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {name: torch.randn_like(p) for name in "xyz"}


def test_every_sequence_of_a_reference_optimizer_is_averaged(ewa_vit):
    layers = layers_alone(ewa_vit)
    optimizer = ThreeSequences(layers.parameters())
    ExpertWeightAveraging(layers, optimizer, 0.75, "constant", total_updates=2)
    still_step(layers, optimizer)
    for parameter in layers.parameters():
        for name, weights in optimizer.state[parameter].items():
            mean = weights.mean(0).expand_as(weights)
            torch.testing.assert_close(weights, mean, rtol=0, atol=1e-6, msg=name)


def test_an_optimizer_that_needs_no_gradients_is_told_of(ewa_vit, caplog):
    layers = layers_alone(ewa_vit)
    optimizer = ThreeSequences(layers.parameters())
    averaging = ExpertWeightAveraging(layers, optimizer, 0.75, "constant", total_updates=2)
    optimizer.step()
    optimizer.step()
    assert averaging.share_rate == 0
    assert caplog.text.count("have no gradients, so they are not averaged") == 1


def test_a_first_step_may_have_no_gradients(ewa_vit, caplog):
    layers = layers_alone(ewa_vit)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    averaging = ExpertWeightAveraging(layers, optimizer, 0.75, "constant", total_updates=2)
    optimizer.step()
    layers(torch.randn(4, 2, 32)).mean().backward()
    optimizer.step()
    assert averaging.share_rate == 0.75
    assert "no gradients" not in caplog.text


#: Optimizers whose steps follow weights, norms of whole tensors aside: averaging changes their
#: later steps.
BY_WEIGHTS = ("adamp", "sgdp", "lars", "lamb", "nvlamb", "adahessian", "kron", "novograd")
# The cautious ones are as the others.
NOT_RUN = ["bnb*", "fused*", "c*", *(f"*{name}*" for name in BY_WEIGHTS)]
OPTIMIZERS = list_optimizers(exclude_filters=NOT_RUN)


def means_of_experts(opt, is_averaged):
    """Return the mean of the experts after each of some steps.

    The gradients differ in size by powers of ten.
    """
    torch.manual_seed(0)
    layer = EwaMlp(Mlp(8, 16), RandomPartition(4), "independent").double()
    layer.share_rate = 0.0
    optimizer = create_optimizer_v2(layer, opt=opt, lr=1e-2, weight_decay=0.0)
    if is_averaged:
        averaging = ExpertWeightAveraging(layer, optimizer, 0.3, "constant", total_updates=100)
    means = []
    for _ in range(8):
        for parameter in layer.parameters():
            size_E = 10.0 ** torch.arange(-2, 2).reshape(-1, *[1] * (parameter.ndim - 1))
            parameter.grad = torch.randn_like(parameter) * size_E
        optimizer.step()
        means.append(
            torch.cat([parameter.detach().mean(0).flatten() for parameter in layer.parameters()])
        )
    if is_averaged:
        assert (averaging.updates, averaging.share_rate) == (8, 0.3)
    return torch.stack(means)


@pytest.mark.parametrize(
    "opt", ["madgrad", *(name for name in OPTIMIZERS if name != "madgrad"), "lookahead_madgrad"]
)
@pytest.mark.first_case
def test_averaging_moves_the_mean_of_no_optimizer(opt):
    # Steps are of 0.01 to 0.1; some optimizers compute in float32.
    torch.testing.assert_close(
        means_of_experts(opt, True), means_of_experts(opt, False), rtol=0, atol=1e-6
    )


def test_what_madgrad_pulls_to_is_averaged_by_the_eps_of_its_group(ewa_vit):
    layers = layers_alone(ewa_vit)
    groups = [{"params": ewa_vit.head.parameters(), "eps": 1.0}, {"params": layers.parameters()}]
    optimizer = create_optimizer_v2(groups, opt="madgrad", lr=1e-2, weight_decay=0.0, eps=0.1)
    ExpertWeightAveraging(layers, optimizer, 0.75, "constant", total_updates=2)
    for parameter in layers.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for parameter in layers.parameters():
        state = optimizer.state[parameter]
        size = state["grad_sum_sq"].pow(1 / 3) + 0.1
        target = state["x0"] - state["s"] / size
        torch.testing.assert_close(target, target.mean(0).expand_as(target), rtol=0, atol=1e-6)


def test_the_start_that_madgrad_pulls_to_is_averaged(ewa_vit):
    optimizer = create_optimizer_v2(ewa_vit, opt="madgrad", lr=1e-4)
    timm_moe.ExpertWeightAveraging(ewa_vit, optimizer, 0.3, "constant", total_updates=30)
    before = [spread(layer) for layer in timm_moe.moe_layers(ewa_vit).values()]
    for _ in range(30):
        ewa_vit(torch.randn(2, 3, 32, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for layer, first in zip(timm_moe.moe_layers(ewa_vit).values(), before, strict=True):
        assert spread(layer) < 0.02 * first


def test_at_the_full_rate_schedule_free_experts_are_equal_in_evaluation(ewa_vit):
    layers = layers_alone(ewa_vit)
    optimizer = ScheduleFree(layers.parameters())
    ExpertWeightAveraging(layers, optimizer, 0.75, "constant", total_updates=9)
    for _ in range(4):
        layers(torch.randn(8, 4, 32)).square().mean().backward()
        optimizer.step()
    assert spread(layers) < 1e-6
    optimizer.eval()
    assert spread(layers) < 1e-5
