"""The routers' losses in the training loss: exact against a loss written by hand, on every road that train.py takes."""

import copy
import importlib
import logging
import pickle
import warnings

import pytest
import timm
import timm.scheduler
import torch
from common import SMALL_VIT, Teacher
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, JsdCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask, LogitDistillationTask, TrainingTask
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import timm_moe
from timm_moe.callbacks import start_averaging
from timm_moe.layers import TopKRouter

CPU = torch.device("cpu")
aux_loss_module = importlib.import_module("timm_moe.training.router_losses")


def make_model(name="vit_tiny_moe", **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL_VIT, **kwargs)
    for module in model.modules():  # routers that prefer some experts, so that their losses have a gradient to speak of
        if isinstance(module, TopKRouter):
            nn.init.normal_(module.weight, std=0.3)
    return model


def batch():
    torch.manual_seed(1)
    return torch.randn(8, 3, 32, 32), torch.randint(5, (8,))


def losses_by_hand(model, images):
    """The outputs of a forward, and 0.01 E sum f P of every router, computed anew from what the routers saw."""
    seen, handles = [], []
    for module in model.modules():
        if isinstance(module, TopKRouter):
            handles.append(module.register_forward_hook(lambda router, args, _: seen.append((router.weight, args[0]))))
    outputs = model(images)
    for handle in handles:
        handle.remove()
    total = 0
    for weight, x in seen:
        with torch.autocast("cpu", enabled=False):
            gates = (x.float().flatten(0, 1) @ weight.float().T).softmax(1)
        fraction = F.one_hot(gates.argmax(1), len(weight)).float().mean(0)
        total = total + 0.01 * len(weight) * (fraction * gates.mean(0)).sum()
    # What a training loop does with the package's own number, so that the optimizer does not complain:
    timm_moe.auxiliary_loss(model)
    return outputs, total


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(b.abs().max().item(), 1e-3))


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
def test_loss_and_gradients_are_those_of_the_loss_by_hand(name):
    criterion, make_targets = CRITERIA[name]
    images, targets = batch()
    targets = make_targets(targets)
    by_hand, trained = make_model(), make_model()
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
    by_hand, trained = make_model(), make_model()
    outputs, router_loss = losses_by_hand(by_hand, images)
    with torch.no_grad():
        teacher_outputs = teacher(images)
    divergence = F.kl_div(
        (outputs / 2).log_softmax(1), (teacher_outputs / 2).log_softmax(1), reduction="batchmean", log_target=True
    )
    expected = 0.3 * F.cross_entropy(outputs, targets) + 0.7 * 4 * divergence + router_loss
    expected.backward()
    task = LogitDistillationTask(
        trained,
        Teacher(teacher),
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
    teacher, student = make_model().eval(), timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    task = LogitDistillationTask(
        student, Teacher(teacher), criterion=nn.CrossEntropyLoss(), task_loss_weight=0.3, device=CPU, verbose=False
    )
    assert "auxiliary_loss" not in task(images, targets)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_scaled_float16_step_with_accumulation_equals_the_one_by_hand(clip):
    """The order of train.py: autocast, loss / accumulation steps, scaler, clipping, step."""
    images, targets = batch()
    states = []
    for by_hand in (True, False):
        model = make_model()
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
    images, targets = batch()
    by_hand, trained = make_model(), make_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, router_loss = losses_by_hand(by_hand, images)
        expected = F.cross_entropy(outputs, targets) + router_loss
        result = ClassificationTask(trained, nn.CrossEntropyLoss(), device=CPU, verbose=False)(images, targets)
    expected.backward()
    result["loss"].backward()
    assert_same(gradients(trained), gradients(by_hand))


@pytest.mark.parametrize("name", ["vit_tiny_moe", "vmoe_b32"])
def test_gradient_checkpointing_with_accumulation(name):
    """The recomputation in backward runs the routers again, which must not count."""
    images, targets = batch()
    outcomes = []
    for checkpointing in (False, True):
        model = make_model(name, **({"moe_layers": "1,3"} if name == "vmoe_b32" else {}))
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
            timm_moe.routing_summary(model).values(), timm_moe.moe_layers(model).values(), strict=True
        ):
            assert sum(summary.load) == pytest.approx(1)
            (record,) = layer.router.records  # of the last forward, and not of its repetition
            assert aux_loss_module._totals[layer.router].forwards == 4
            assert aux_loss_module._totals[layer.router].load.sum() == 4 * record.load.sum() > 0
        optimizer.step()
    assert_same(*outcomes)


def test_gradient_checkpointing_in_a_loop_of_ones_own():
    images, targets = batch()

    def around(part_of_model):
        return lambda model, x: checkpoint(part_of_model(model), x, use_reentrant=False)

    roads = {
        "none": lambda model, x: model(x),
        "inside": lambda model, x: (model.set_grad_checkpointing(), model(x))[1],
        "around the model": around(lambda model: model),
        "around its features": lambda model, x: model.forward_head(around(lambda m: m.forward_features)(model, x)),
    }
    outcomes = []
    for call in roads.values():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for part, labels in zip(images.split(4), targets.split(4), strict=True):
            loss = F.cross_entropy(call(model, part), labels) + timm_moe.auxiliary_loss(model)
            loss.backward()
        optimizer.step()
        outcomes.append(gradients(model))
    expected, *others = outcomes
    for gradients_of_road in others:
        assert_same(gradients_of_road, expected)


def test_what_is_repeated_before_the_losses_were_asked_for_does_not_count():
    images, _ = batch()
    model = make_model()
    model.set_grad_checkpointing(True)
    model(images).sum().backward(retain_graph=True)
    torch.testing.assert_close(timm_moe.auxiliary_loss(model), losses_by_hand(copy.deepcopy(model), images)[1])


@pytest.mark.ci
def test_compiled_task_components():
    images, targets = batch()
    by_hand, trained = make_model(), make_model()
    outputs, router_loss = losses_by_hand(by_hand, images)
    (F.cross_entropy(outputs, targets) + router_loss).backward()
    task = ClassificationTask(trained, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    if hasattr(task, "get_trainable_module"):
        task.compile(backend="aot_eager")
    else:  # timm 1.0.23 compiles the task itself
        task = torch.compile(task, backend="aot_eager")
    task(images, targets)["loss"].backward()
    assert_same(gradients(trained), gradients(by_hand), tolerance=1e-4)


def test_ema_copies_the_model_in_the_middle_of_a_step():
    model = make_model()
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    result = task(*batch())
    ema = ModelEmaV3(model, decay=0.9)
    result["loss"].backward()
    ema.update(model)
    assert all(not m.records for m in ema.module.modules() if isinstance(m, TopKRouter))
    assert ema.module(batch()[0]).shape == (8, 5)


def test_copies_and_pickles_of_a_task_add_the_losses_of_their_own_model():
    images, targets = batch()
    task = ClassificationTask(make_model(), nn.CrossEntropyLoss(), device=CPU, verbose=False)
    expected = task(images, targets)
    for duplicate in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        torch.testing.assert_close(duplicate(images, targets), expected)


def test_a_step_without_the_losses_is_refused():
    images, targets = batch()
    model, other = make_model(), nn.Linear(2, 2)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    before = copy.deepcopy(model.state_dict())
    F.cross_entropy(model(images), targets).backward()
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # another model's optimizer is none of this
    with pytest.raises(RuntimeError, match=r"add timm_moe.auxiliary_loss\(model\) to the loss"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    (F.cross_entropy(model(images), targets) + timm_moe.auxiliary_loss(model)).backward()
    optimizer.step()


def test_a_linear_probe_and_a_weight_of_zero_need_no_losses(caplog):
    images, targets = batch()
    for weight, of_model in ((0, lambda model: model), (0.01, lambda model: model.head)):
        model = make_model(aux_loss_weight=weight)
        trained, before = of_model(model), model.head.weight.detach().clone()
        assert bool(model.blocks[1].mlp.router.loss_weights) == bool(weight)
        F.cross_entropy(model(images), targets).backward()
        assert all(layer.router.has_pending_losses() == bool(weight) for layer in timm_moe.moe_layers(model).values())
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
        assert not torch.equal(model.head.weight, before)
        assert caplog.messages == []


def test_no_losses_in_eval_mode_nor_without_gradients():
    images, _ = batch()
    model = make_model()
    with torch.no_grad():
        model(images)
    assert timm_moe.auxiliary_loss(model) == 0
    model.eval()(images)
    assert timm_moe.auxiliary_loss(model) == 0
    assert timm_moe.routing_summary(model) == {}


def test_losses_are_those_of_the_last_training_forward():
    images, _ = batch()
    model = make_model()
    model(images[:2])
    model(images)
    first = timm_moe.auxiliary_loss(model)
    model.eval()(images[:2])  # a validation in between
    model.train()
    with torch.no_grad():
        model(images[:2])
    assert timm_moe.auxiliary_loss(model) == first
    model(images)
    torch.testing.assert_close(timm_moe.auxiliary_loss(model), first)


def test_two_forwards_and_one_loss_are_warned_of_once(caplog):
    images, _ = batch()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (model(images).mean() + model(images.flip(3)).mean() + timm_moe.auxiliary_loss(model)).backward()
        optimizer.step()
    assert len(caplog.messages) == 1
    assert "call it after each one that is trained on" in caplog.messages[0]


def test_losses_that_are_not_wanted():
    """A discriminator that judges without being trained, and a cell of a notebook that is run again."""
    images, _ = batch()
    generator, discriminator = make_model(), make_model()
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator))
    generator.set_grad_checkpointing(True)
    for _ in range(2):
        fake, (_, ours_by_hand) = generator(images), losses_by_hand(copy.deepcopy(generator), images)
        _, theirs_by_hand = losses_by_hand(copy.deepcopy(discriminator), images)
        judged, router_loss = discriminator(images), timm_moe.auxiliary_loss(discriminator)
        torch.testing.assert_close(router_loss, theirs_by_hand)
        (judged.mean() + router_loss).backward()
        theirs.step()  # says nothing of the generator, whose blocks are still to be repeated
        discriminator(images + fake.mean()).mean().backward(retain_graph=True)
        router_loss = timm_moe.auxiliary_loss(generator)
        torch.testing.assert_close(router_loss, ours_by_hand)
        (fake.mean() + router_loss).backward()
        ours.step()
        theirs.zero_grad()
    discriminator(images).sum().backward()
    theirs.zero_grad()
    judged, router_loss = discriminator(images), timm_moe.auxiliary_loss(discriminator)
    torch.testing.assert_close(router_loss, losses_by_hand(copy.deepcopy(discriminator), images)[1])
    (judged.sum() + router_loss).backward()
    routers = [layer.router.weight for layer in timm_moe.moe_layers(discriminator).values()]
    before = [weight.detach().clone() for weight in routers]
    theirs.step()
    assert not any(torch.equal(weight, old) for weight, old in zip(routers, before, strict=True))


def test_a_task_begins_anew():
    images, targets = batch()
    model = make_model()
    model(images[:2])  # and nobody wanted its losses
    result = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)(images, targets)
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
    by_hand, trained = TwoViews(make_model()), TwoViews(make_model())
    outputs, router_loss = losses_by_hand(by_hand, images)
    (F.cross_entropy(outputs, targets) + router_loss).backward()
    task = ClassificationTask(trained, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    for _ in range(2):  # a call before, whose losses are not used
        result = task(images, targets)
    result["loss"].backward()
    assert_same(gradients(trained), gradients(by_hand))


def test_a_task_in_a_task_adds_them_once():
    images, targets = batch()
    model = make_model()
    expected = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)(images, targets)["loss"]
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


@pytest.mark.parametrize("error", [RuntimeError("bad image"), KeyboardInterrupt()], ids=["error", "interrupted"])
@pytest.mark.parametrize("road", ["eager", "nested", pytest.param("compiled", marks=pytest.mark.ci)])
def test_a_task_that_fails_leaves_nothing_behind(road, error):
    images, targets = batch()
    stumbling = Stumbling(make_model())
    task = ClassificationTask(stumbling, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    task = {"eager": task, "nested": Outer(task), "compiled": torch.compile(task, backend="eager")}[road]
    expected = task(images, targets)["loss"].detach()
    stumbling.error = error
    with pytest.raises(type(error)):
        task(images, targets)
    stumbling.error = None
    model = stumbling.model
    assert not any(
        layer.router.phase != "anew" or layer.router.records for layer in timm_moe.moe_layers(model).values()
    )
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
    model = make_model()
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    task(images, targets)["loss"].backward()
    task.train(mode != "eval")
    with torch.no_grad():
        result = task(images, targets)
        torch.testing.assert_close(result["loss"], F.cross_entropy(model(images), targets))
    task.train()(images, targets)["loss"].backward()


@pytest.mark.parametrize("road", ["features_only", "forward_features"])
def test_roads_that_do_not_call_the_model(road):
    images, _ = batch()
    if road == "features_only":
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_moe", features_only=True, **SMALL_VIT)
        call = model
    else:
        model = make_model()
        call = model.forward_features
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        features = call(images)
        loss = timm_moe.auxiliary_loss(model)
        losses.append(loss.item())
        ((features[-1] if road == "features_only" else features).square().mean() + loss).backward()
        optimizer.step()
    assert losses[2] == pytest.approx(losses[0], rel=0.1)
    call(images)[-1].mean().backward()
    with pytest.raises(RuntimeError, match="were not added"):
        optimizer.step()


def test_recomputation_in_backward_leaves_no_record():
    images, targets = batch()
    model = make_model()
    model.set_grad_checkpointing(True)
    loss = F.cross_entropy(model(images), targets) + timm_moe.auxiliary_loss(model)
    before = timm_moe.auxiliary_loss(model)
    loss.backward()
    assert [len(layer.router.records) for layer in timm_moe.moe_layers(model).values()] == [1, 1]
    assert timm_moe.auxiliary_loss(model) == before


def test_reentrant_checkpointing_would_lose_the_losses():
    images, _ = batch()
    model = make_model()
    x = model.patch_embed(images)
    y = checkpoint(model.blocks, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"Reentrant gradient checkpointing loses the routers' losses"):
        (y.mean() + timm_moe.auxiliary_loss(model)).backward()


def test_a_loss_that_is_forgotten_later_is_noticed_too():
    images, targets = batch()
    model = make_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    for step in range(3):
        loss = F.cross_entropy(model(images), targets)
        if step < 2:
            loss = loss + timm_moe.auxiliary_loss(model)
        loss.backward()
        if step < 2:
            optimizer.step()
    with pytest.raises(RuntimeError, match="were not added"):
        optimizer.step()


def test_a_frozen_backbone_under_an_optimizer_of_all_parameters():
    images, targets = batch()
    model = make_model()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    F.cross_entropy(model(images), targets).backward()
    assert all(layer.router.is_pending() for layer in timm_moe.moe_layers(model).values())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize("case", ["no weight", "frozen", "forgotten"])
@pytest.mark.parametrize("road", ["__call__", "forward_features"])
def test_nothing_piles_up(case, road):
    images, _ = batch()
    model = make_model(**({"aux_loss_weight": 0} if case == "no weight" else {}))
    model.requires_grad_(case != "frozen")
    for _ in range(3):
        getattr(model, road)(images)
    records = model.blocks[1].mlp.router.records
    # Where only a part of the model is called, losses wait until someone asks for them.
    assert len(records) == (3 if (case, road) == ("forgotten", "forward_features") else 1)


def test_a_trained_head_on_a_backbone_that_is_only_called_in_part():
    """Its records do not pile up, and it is said once what to do about it."""
    images, targets = batch()
    model = make_model()
    head = nn.Linear(32, 5)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    routers = [layer.router for layer in timm_moe.moe_layers(model).values()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(6):
            for part, labels in zip(images.split(4), targets.split(4), strict=True):
                F.cross_entropy(head(model.forward_features(part)[:, 0]), labels).backward()
            optimizer.step()
            assert all(len(router.records) <= 4 for router in routers)
    told = [str(warning.message) for warning in caught if "Nobody adds the losses of routers" in str(warning.message)]
    assert len(told) == 1
    assert "call eval() on them or freeze them" in told[0]


def test_a_loop_that_never_steps_does_not_pile_up(monkeypatch):
    monkeypatch.setattr("timm_moe.layers.records.MOST_WAITING", 3)
    model, images = make_model(), batch()[0][:1]
    for _ in range(3):
        model.forward_features(images)
    for _ in range(3):
        with pytest.warns(UserWarning, match="Nobody adds the losses of routers in a model that is in training mode"):
            model.forward_features(images)
    records = model.blocks[1].mlp.router.records
    assert len(records) == 3
    layers = timm_moe.moe_layers(model).values()
    total = sum(record.weighted_loss for layer in layers for record in layer.router.records)
    torch.testing.assert_close(timm_moe.auxiliary_loss(model), total)
    assert len(records) == 3


@pytest.mark.filterwarnings("error")
def test_losses_that_are_added_in_time_are_kept_over_another_optimizers_steps():
    images, _ = batch()
    model, other = make_model(), nn.Linear(2, 2)
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        features = [model.forward_features(part) for part in images.split(4)]
        records = len(model.blocks[1].mlp.router.records)
        theirs.step()
        loss = timm_moe.auxiliary_loss(model)
        assert records == len(model.blocks[1].mlp.router.records) == 2
        (sum(feature.mean() for feature in features) + loss).backward()
        theirs.step()
        ours.step()
    outputs = model(images)
    for _ in range(5):  # of a critic
        theirs.step()
    loss = timm_moe.auxiliary_loss(model)
    torch.testing.assert_close(loss, losses_by_hand(copy.deepcopy(model), images)[1])
    (outputs.mean() + loss).backward()


def test_roads_that_would_lose_the_losses_are_refused():
    images, _ = batch()
    model = make_model()
    replica = copy.copy(model.blocks[1].mlp.router)
    replica._is_replica = True  # what nn.DataParallel does on several devices
    with pytest.raises(RuntimeError, match=r"nn.DataParallel would lose the routers' losses"):
        replica(torch.randn(2, 3, 32))
    if hasattr(torch.compiler, "is_exporting"):
        with pytest.raises(Exception, match=r"torch.export would lose the routers' losses"):
            torch.export.export(model, (images,), strict=False)


def test_a_converted_model_in_memory_has_them_too_and_its_dense_copy_no_trace():
    images, _ = batch()
    model = timm_moe.convert_to_moe(
        timm.create_model("vit_tiny_patch16_224", **SMALL_VIT), router="top_k", top_k=2, noise_std=1.0,
        aux_loss="importance+load",
    )  # fmt: skip
    model(images)
    assert timm_moe.auxiliary_loss(model).requires_grad
    dense = timm_moe.to_dense(model)
    assert "timm_moe" not in str([hook for m in dense.modules() for hook in m._forward_pre_hooks.values()])
    assert {type(m).__module__.split(".")[0] for m in dense.modules()} <= {"timm", "torch"}


def test_summary_of_a_loop():
    images, targets = batch()
    model = make_model("vmoe_b32", moe_layers="1,3", num_experts=6, capacity_factor=0.5, capacity_multiple=1)
    dropped, load, losses = 0, torch.zeros(6), []
    for part in images.split(4):
        F.cross_entropy(model(part), targets[:4])
        timm_moe.auxiliary_loss(model)
        record = model.blocks[3].mlp.router.records[0]
        dropped += record.dropped
        load += record.load
        losses.append(record.losses)
    summaries = timm_moe.routing_summary(model)
    assert list(summaries) == ["blocks.1.mlp", "blocks.3.mlp"]
    summary = summaries["blocks.3.mlp"]
    choices = 8 * 17 * 2
    assert summary.dropped == pytest.approx(dropped / choices)
    assert summary.dropped >= 0.5 - 1 / 6
    torch.testing.assert_close(torch.tensor(summary.load), load / choices)
    means = {name: float(sum(loss[name] for loss in losses)) / len(losses) for name in ("importance", "load")}
    assert summary.losses == pytest.approx(means)
    assert str(summary).startswith("importance ")
    shares = f"{min(summary.load):.1%} / 16.7% / {max(summary.load):.1%}"
    assert str(summary).endswith(f"dropped {summary.dropped:.1%}, share of an expert min/mean/max {shares}")
    assert timm_moe.routing_summary(model, reset=True) == summaries
    model(images)
    timm_moe.auxiliary_loss(model)
    record = model.blocks[3].mlp.router.records[0]
    load = timm_moe.routing_summary(model)["blocks.3.mlp"].load
    torch.testing.assert_close(torch.tensor(load), record.load / choices)
    assert timm_moe.routing_summary(model) != summaries


@pytest.mark.skipif(not hasattr(TrainingTask, "setup_ema"), reason="this version of timm has its EMA elsewhere")
def test_summary_of_a_task_leaves_out_its_ema():
    task = ClassificationTask(make_model(), nn.CrossEntropyLoss(), device=CPU)
    task.setup_ema()
    task.train()(*batch())
    summaries = timm_moe.routing_summary(task)
    assert [name.rpartition("module")[0] for name in summaries] == ["trainable_"] * 2
    assert all("dropped" in str(summary) for summary in summaries.values())


def test_each_epoch_of_timms_schedulers_ends_in_a_summary(caplog):
    images, targets = batch()
    model = make_model()
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
            last = timm_moe.routing_summary(model)  # of the epoch that ended
    lines = [message for message in caplog.messages if message.startswith("Routing")]
    assert [line.split(":")[0] for line in lines] == ["Routing in blocks.1.mlp", "Routing in blocks.3.mlp"] * 2
    assert lines[2] == f"Routing in blocks.1.mlp: {last['blocks.1.mlp']}."


def test_other_ranks_keep_silent(caplog, monkeypatch):
    model = make_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    for is_primary, lines in ((True, 2), (False, 0)):
        monkeypatch.setattr(aux_loss_module, "is_primary", lambda is_primary=is_primary: is_primary)
        model(batch()[0])
        timm_moe.auxiliary_loss(model)
        with caplog.at_level(logging.INFO):
            caplog.clear()
            aux_loss_module.log_epoch(optimizer)
        assert len([message for message in caplog.messages if message.startswith("Routing in")]) == lines
        assert len(caplog.messages) == lines


def test_the_end_of_an_epoch_looks_for_not_a_number_too(caplog):
    model = make_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=3, updates_per_epoch=2)
    images = batch()[0]
    images[0, 0, 0, 0] = float("nan")
    model(images)
    timm_moe.auxiliary_loss(model)
    scheduler.step(1)
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    expected = "The router of {} had NaN or Inf in its logits in 1 of the last 1 training forwards."
    assert warned == [expected.format(f"blocks.{block}.mlp") for block in (1, 3)]


def test_not_a_number_in_the_logits_is_noticed_within_a_logging_interval_and_names_the_layer(caplog):
    images, targets = batch()
    model = make_model()
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    task(images, targets)
    with torch.no_grad():
        model.blocks[3].mlp.router.weight[1, 2] = float("inf")
    for forward in range(2, 51):
        assert caplog.messages == [], forward
        task(images[:2], targets[:2])
    assert caplog.messages == [
        "The router of blocks.3.mlp had NaN or Inf in its logits in 49 of the last 50 training forwards."
    ]


def test_early_ewa_averages_routed_experts_in_the_first_half(caplog):
    images, targets = batch()
    spreads = []
    model = make_model(share_schedule="early")
    task = ClassificationTask(model, nn.CrossEntropyLoss(), device=CPU, verbose=False)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    router = model.blocks[1].mlp.router.weight
    with caplog.at_level(logging.INFO):
        timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=4)
    assert "share rate 0.3, schedule early, over 8 updates" in caplog.text
    rates = []
    for _ in range(8):
        task(images, targets)["loss"].backward()
        before = router.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(timm_moe.ExpertWeightAveraging.of(optimizer).share_rate)
        weight = model.blocks[1].mlp.fc1.weight
        spreads.append((weight - weight.mean(0)).std().item())
        assert (router - before).abs().max() < 0.01  # moved by the optimizer, not averaged
    assert rates == [0.3, 0.3, 0.3, 0, 0, 0, 0, 0]
    assert spreads[2] < 0.5 * spreads[0]
    assert spreads[7] > spreads[2]


@pytest.mark.parametrize("share_rate", [0.1, 0.2, 0.3, 0.4, 0.5])
def test_early_ewa_at_the_share_rates_that_the_paper_searches(share_rate):
    """Table 5: in each step before the middle of the run, experts come nearer by the constant rate, then not at all."""
    model = make_model(share_schedule="early", share_rate=share_rate, num_experts=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # only averaging moves them
    averaging = start_averaging(model, optimizer, total_updates=10)
    stacked = model.blocks[1].mlp.fc1.weight
    stacked.data = torch.randn_like(stacked)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for step in range(1, 11):
        before, mean = stacked.detach() - stacked.detach().mean(0), stacked.detach().mean(0)
        optimizer.step()
        rate = share_rate if step < 5 else 0
        assert averaging.share_rate == rate
        torch.testing.assert_close(stacked.detach(), mean + (1 - rate * 4 / 3) * before)


def test_routed_experts_are_not_averaged_unasked(caplog):
    model = make_model()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    with caplog.at_level(logging.INFO):
        timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=4)
    assert timm_moe.ExpertWeightAveraging.of(optimizer) is None
    assert caplog.messages == []


def test_torchscript_is_refused_where_it_would_lose_the_losses():
    model = make_model()
    with pytest.raises(RuntimeError, match="TorchScript would lose the routers' losses: trace the model in eval mode"):
        torch.jit.trace(model, batch()[0])
    traced = torch.jit.trace(model.eval(), batch()[0])
    torch.testing.assert_close(traced(batch()[0]), model(batch()[0]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_moe", dict(num_experts=8, eval_capacity_factor=0.5, top_k=2)),
        ("vmoe_b32", dict(num_experts=6, eval_capacity_factor=1.1, capacity_rounding="floor", batch_priority=True)),
        pytest.param(
            "vimoe_s14",
            dict(num_experts=4, eval_capacity_factor=2.5, capacity_rounding="round"),
            marks=pytest.mark.ci,
        ),
        pytest.param("widenet_b", dict(eval_capacity_factor=1.2), marks=pytest.mark.ci),
    ],
)
def test_a_trace_has_the_capacities_of_each_batch(name, options):
    model = make_model(name, **options).eval()
    images = torch.randn(7, 3, 32, 32)
    traced = torch.jit.trace(model, images[:2])
    for part in (images, images[:3], images[:1]):
        torch.testing.assert_close(traced(part), model(part))
