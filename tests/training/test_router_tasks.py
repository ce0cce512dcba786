"""Router losses in timm's training tasks, nested ones and those that fail."""

import copy

import pytest
import torch
from routed_loop import CPU, assert_same, batch, gradients, losses_by_hand, routed_model
from timm.task import ClassificationTask, TrainingTask
from torch import nn
from torch.nn import functional as F

import timm_moe
from timm_moe.training import router_losses


def test_a_task_begins_anew():
    images, targets = batch()
    model = routed_model()
    model(images[:2])  # and nobody wanted its losses
    result = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)(
        images, targets
    )
    model(images)
    torch.testing.assert_close(result["auxiliary_loss"], timm_moe.auxiliary_loss(model))


class TwoViews(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) + self.model(x.flip(3))


def test_a_task_adds_the_losses_of_every_call_of_the_model():
    images, targets = batch()
    by_hand, trained = TwoViews(routed_model()), TwoViews(routed_model())
    outputs, router_loss = losses_by_hand(by_hand, images)
    (F.cross_entropy(outputs, targets) + router_loss).backward()
    task = ClassificationTask(trained, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    for _ in range(2):  # a call before, whose losses are not used
        result = task(images, targets)
    result["loss"].backward()
    assert_same(gradients(trained), gradients(by_hand))


def test_a_task_may_add_the_losses_of_each_forward_by_itself():
    images, _ = batch()
    model = routed_model()
    views = (images, images.flip(3))
    expected = [losses_by_hand(copy.deepcopy(model), view)[1] for view in views]
    with router_losses.collecting_losses(model):
        added = []
        for view in views:
            model(view)
            added.append(timm_moe.auxiliary_loss(model))
    torch.testing.assert_close(added, expected)
    assert timm_moe.auxiliary_loss(model) == 0


@pytest.mark.ci
def test_a_task_of_compiled_blocks_may_train_each_forward_by_itself():
    images, _ = batch()
    model = routed_model()
    views = (images, images.flip(3))
    expected = [losses_by_hand(copy.deepcopy(model), view)[1] for view in views]
    for block in model.blocks:
        block.compile(backend="eager")
    with router_losses.collecting_losses(model):
        for view, loss in zip(views, expected, strict=True):
            model(view)
            added = timm_moe.auxiliary_loss(model)
            torch.testing.assert_close(added, loss)
            added.backward()


def test_a_task_in_a_task_adds_them_once():
    images, targets = batch()
    model = routed_model()
    expected = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)(
        images, targets
    )["loss"]
    outer = Outer(ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False))
    torch.testing.assert_close(outer(images, targets)["loss"], expected)


class Stumbling(nn.Module):
    """Fails after the forward of its model, when told to."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.error = None

    def forward(self, x):
        y = self.model(x)
        if self.error is not None:
            raise self.error
        return y


class Outer(TrainingTask):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        return self.inner(x, y)


@pytest.mark.parametrize(
    "error", [RuntimeError("bad image"), KeyboardInterrupt()], ids=["error", "interrupted"]
)
@pytest.mark.parametrize("road", ["eager", "nested", "compiled"])
@pytest.mark.first_case
def test_a_task_that_fails_leaves_nothing_behind(road, error):
    images, targets = batch()
    stumbling = Stumbling(routed_model())
    task = ClassificationTask(stumbling, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    task = {"eager": task, "nested": Outer(task), "compiled": torch.compile(task, backend="eager")}[
        road
    ]
    expected = task(images, targets)["loss"].detach()
    stumbling.error = error
    with pytest.raises(type(error)):
        task(images, targets)
    stumbling.error = None
    model = stumbling.model
    assert not any(layer.router.records for layer in timm_moe.moe_layers(model).values())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        loss = F.cross_entropy(model(images), targets) + timm_moe.auxiliary_loss(model)
        torch.testing.assert_close(loss.detach(), expected)
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(task(images, targets)["loss"].detach(), expected)


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_a_task_that_does_not_train_adds_nothing(mode):
    images, targets = batch()
    model = routed_model()
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    task(images, targets)["loss"].backward()
    task.train(mode != "eval")
    with torch.set_grad_enabled(mode == "eval"):
        result = task(images, targets)
        torch.testing.assert_close(result["loss"], F.cross_entropy(model(images), targets))
    task.train()(images, targets)["loss"].backward()
