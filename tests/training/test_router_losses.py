"""Router losses in the training loss.

They equal a loss written by hand, in every way that train.py takes.
"""

import copy
import pickle

import pytest
import timm
import torch
from common import SMALL_VIT
from routed_loop import CPU, assert_same, batch, gradients, losses_by_hand, routed_model
from timm.data import Mixup
from timm.loss import (
    BinaryCrossEntropy,
    JsdCrossEntropy,
    LabelSmoothingCrossEntropy,
    SoftTargetCrossEntropy,
)
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask, LogitDistillationTask
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn import functional as F

import timm_moe
from timm_moe.layers import TopKRouter
from timm_moe.layers.router_totals import Reader


def soft(targets):
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=5, label_smoothing=0.1)
    return mixup(torch.randn(8, 3, 32, 32), targets)[1]


CRITERIA = {
    "cross entropy": (nn.CrossEntropyLoss(), lambda targets: targets),
    "label smoothing": (LabelSmoothingCrossEntropy(0.1), lambda targets: targets),
    "mixup": (SoftTargetCrossEntropy(), soft),
    "BCE": (BinaryCrossEntropy(smoothing=0.1), lambda targets: targets),
    "BCE with mixup": (BinaryCrossEntropy(target_threshold=0.2), soft),
    "JSD": (JsdCrossEntropy(num_splits=2), lambda targets: targets[:4]),
}


@pytest.mark.parametrize("name", list(CRITERIA))
@pytest.mark.first_case
def test_loss_and_gradients_are_those_of_the_loss_by_hand(name):
    criterion, make_targets = CRITERIA[name]
    images, targets = batch()
    targets = make_targets(targets)
    by_hand, trained = routed_model(), routed_model()
    outputs, router_loss = losses_by_hand(by_hand, images)
    expected = criterion(outputs, targets) + router_loss
    expected.backward()
    task = ClassificationTask(trained, criterion, device=CPU, verbose=False)
    result = task(images, targets)
    result["loss"].backward()
    torch.testing.assert_close(result["loss"], expected)
    torch.testing.assert_close(result["auxiliary_loss"], router_loss.detach())
    assert_same(gradients(trained), gradients(by_hand))


def test_distillation():
    images, targets = batch()
    teacher = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).eval()
    by_hand, trained = routed_model(), routed_model()
    outputs, router_loss = losses_by_hand(by_hand, images)
    with torch.no_grad():
        teacher_outputs = teacher(images)
    divergence = F.kl_div(
        (outputs / 2).log_softmax(1),
        (teacher_outputs / 2).log_softmax(1),
        reduction="batchmean",
        log_target=True,
    )
    expected = 0.3 * F.cross_entropy(outputs, targets) + 0.7 * 4 * divergence + router_loss
    expected.backward()
    task = LogitDistillationTask(
        trained,
        teacher,
        nn.CrossEntropyLoss(),
        task_loss_weight=0.3,
        temperature=2.0,
        device=CPU,
        verbose=False,
    )
    result = task(images, targets)
    result["loss"].backward()
    torch.testing.assert_close(result["loss"], expected)
    assert_same(gradients(trained), gradients(by_hand))


def test_a_routed_teacher_adds_nothing():
    images, targets = batch()
    teacher, student = routed_model().eval(), timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    task = LogitDistillationTask(
        student,
        teacher,
        criterion=nn.CrossEntropyLoss(),
        task_loss_weight=0.3,
        device=CPU,
        verbose=False,
    )
    assert "auxiliary_loss" not in task(images, targets)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_scaled_float16_step_with_accumulation_equals_the_one_by_hand(clip):
    """The order of train.py: autocast, loss / accumulation steps, scaler, clipping, step."""
    images, targets = batch()
    states = []
    for by_hand in (True, False):
        model = routed_model()
        task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for part, labels in zip(images.split(4), targets.split(4), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                if by_hand:
                    outputs, router_loss = losses_by_hand(model, part)
                    loss = F.cross_entropy(outputs, labels) + router_loss
                else:
                    loss = task(part, labels)["loss"]
            loss /= 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        states.append(gradients(model))
        scaler.step(optimizer)
        scaler.update()
    assert_same(*states)


def test_bfloat16():
    """The two add up in other orders, so that single numbers round to a neighbour.

    A loss that lacks errs more.
    """
    images, targets = batch()
    by_hand, trained, exact = routed_model(), routed_model(), routed_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, router_loss = losses_by_hand(by_hand, images)
        expected = F.cross_entropy(outputs, targets) + router_loss
        result = ClassificationTask(trained, nn.CrossEntropyLoss(), device=CPU, verbose=False)(
            images, targets
        )
    expected.backward()
    result["loss"].backward()
    outputs, router_loss = losses_by_hand(exact, images)
    (F.cross_entropy(outputs, targets) + router_loss).backward()
    for actual, rounded, true in zip(*map(gradients, (trained, by_hand, exact)), strict=True):
        assert (actual - rounded).norm() <= 0.5 * (rounded - true).norm()


@pytest.mark.parametrize("name", ["vit_tiny_moe", "vmoe_b32"])
@pytest.mark.first_case
def test_gradient_checkpointing_with_accumulation(name):
    """The recomputation in backward runs the routers again, which must not count."""
    images, targets = batch()
    outcomes = []
    for checkpointing in (False, True):
        model = routed_model(name, **({"moe_layers": "1,3"} if name == "vmoe_b32" else {}))
        model.set_grad_checkpointing(checkpointing)
        task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1)
        torch.manual_seed(5)
        losses = []
        for part, labels in zip(images.split(4), targets.split(4), strict=True):
            losses.append(task(part, labels)["auxiliary_loss"])
            (task(part, labels)["loss"] / 2).backward()
        outcomes.append([*gradients(model), *losses])
        for summary, layer in zip(
            timm_moe.routing_summary(model).values(),
            timm_moe.moe_layers(model).values(),
            strict=True,
        ):
            assert sum(summary.load) == pytest.approx(1)
            assert layer.router.records == []  # all were added, and the repetitions left none
            assert layer.router.totals.forwards == 4
            # Images, tokens, choices.
            sums = layer.router.totals._sums[Reader.SUMMARY]
            assert sums.load.sum() == 4 * 4 * 17 * layer.router.top_k
        optimizer.step()
    assert_same(*outcomes)


@pytest.mark.ci
def test_compiled_task_components():
    images, targets = batch()
    by_hand, trained = routed_model(), routed_model()
    outputs, router_loss = losses_by_hand(by_hand, images)
    (F.cross_entropy(outputs, targets) + router_loss).backward()
    task = ClassificationTask(trained, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    task.compile(backend="aot_eager")
    task(images, targets)["loss"].backward()
    assert_same(gradients(trained), gradients(by_hand), tolerance=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize("of_task", [False, True])
def test_a_compiled_loss_is_compiled_once(of_task):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    images, targets = batch()
    model = routed_model()
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    compiled_task = torch.compile(task, backend=count)

    @torch.compile(backend=count)
    def compiled_function():
        return F.cross_entropy(model(images), targets) + timm_moe.auxiliary_loss(model)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = []
    for _ in range(5):
        loss = compiled_task(images, targets)["loss"] if of_task else compiled_function()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(len(graphs))
    assert numbers[1] == numbers[-1]
    assert model.blocks[1].mlp.router.totals.forwards == 5


def test_ema_copies_the_model_in_the_middle_of_a_step():
    model = routed_model()
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    result = task(*batch())
    ema = ModelEmaV3(model, decay=0.9)
    result["loss"].backward()
    ema.update(model)
    assert all(not m.records for m in ema.module.modules() if isinstance(m, TopKRouter))
    assert ema.module(batch()[0]).shape == (8, 5)


def test_copies_and_pickles_of_a_task_add_the_losses_of_their_own_model():
    images, targets = batch()
    task = ClassificationTask(routed_model(), nn.CrossEntropyLoss(), device=CPU, verbose=False)
    expected = task(images, targets)
    for duplicate in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        torch.testing.assert_close(duplicate(images, targets), expected)
