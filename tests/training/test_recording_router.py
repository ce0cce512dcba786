"""Records of routers: when one is taken, added, dropped, and missed by an optimizer step."""

import copy
import warnings

import pytest
import timm
import torch
from common import SMALL_VIT
from routed_loop import batch, losses_by_hand, routed_model
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn import functional as F

import timm_moe
from timm_moe.layers import RecordingRouter
from timm_moe.layers.router_totals import KEPT


def test_a_step_without_the_losses_is_refused():
    images, targets = batch()
    model, other = routed_model(), nn.Linear(2, 2)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
    before = copy.deepcopy(model.state_dict())
    F.cross_entropy(model(images), targets).backward()
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # another model's optimizer is none of this
    with pytest.raises(RuntimeError, match=r"timm_moe\.auxiliary_loss\(model\)"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    (F.cross_entropy(model(images), targets) + timm_moe.auxiliary_loss(model)).backward()
    optimizer.step()


def test_a_linear_probe_and_a_weight_of_zero_need_no_losses(caplog):
    images, targets = batch()
    for weight, of_model in ((0, lambda model: model), (0.01, lambda model: model.head)):
        model = routed_model(aux_loss_weight=weight)
        trained, before = of_model(model), model.head.weight.detach().clone()
        assert bool(model.blocks[1].mlp.router.loss_weights) == bool(weight)
        F.cross_entropy(model(images), targets).backward()
        assert all(
            layer.router.has_pending_losses() == bool(weight)
            for layer in timm_moe.moe_layers(model).values()
        )
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
        assert not torch.equal(model.head.weight, before)
        assert caplog.messages == []


def test_no_losses_in_eval_mode_nor_without_gradients():
    images, _ = batch()
    model = routed_model()
    with torch.no_grad():
        model(images)
    assert timm_moe.auxiliary_loss(model) == 0
    model.eval()(images)
    assert timm_moe.auxiliary_loss(model) == 0
    assert timm_moe.routing_summary(model) == {}


def test_losses_are_those_of_the_last_training_forward():
    images, _ = batch()
    model = routed_model()
    model(images[:2])
    model(images)
    first = timm_moe.auxiliary_loss(model)
    assert first > 0
    assert timm_moe.auxiliary_loss(model) == 0  # they were added
    model(images)
    model.eval()(images[:2])  # a validation in between
    model.train()
    with torch.no_grad():
        model(images[:2])
    torch.testing.assert_close(timm_moe.auxiliary_loss(model), first)


def test_two_forwards_and_one_loss_are_warned_of_once(caplog):
    images, _ = batch()
    model = routed_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (
            model(images).mean() + model(images.flip(3)).mean() + timm_moe.auxiliary_loss(model)
        ).backward()
        optimizer.step()
    assert len(caplog.messages) == 1
    assert "some forwards were not added" in caplog.messages[0]


def test_losses_that_are_not_wanted():
    """A discriminator judges without being trained.

    The same happens if a cell of a notebook is run again.
    """
    images, _ = batch()
    generator, discriminator = routed_model(), routed_model()
    ours, theirs = (
        torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)
    )
    generator.set_grad_checkpointing(True)
    for _ in range(2):
        fake, (_, ours_by_hand) = (
            generator(images),
            losses_by_hand(copy.deepcopy(generator), images),
        )
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


@pytest.mark.parametrize("road", ["features_only", "forward_features"])
def test_roads_that_do_not_call_the_model(road):
    images, _ = batch()
    if road == "features_only":
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_moe", features_only=True, **SMALL_VIT)
        call = model
    else:
        model = routed_model()
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


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_part_that_is_called_after_the_losses_of_a_forward_were_added_counts_by_itself(
    is_compiled,
):
    images, _ = batch()
    model = routed_model()
    if is_compiled:
        for block in model.blocks:
            block.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = losses_by_hand(copy.deepcopy(model), images[:4])[1]
    loss = model(images).mean() + timm_moe.auxiliary_loss(model)
    features = model.forward_features(images[:4])
    router_loss = timm_moe.auxiliary_loss(model)
    torch.testing.assert_close(router_loss, expected)
    (loss + features.mean() + router_loss).backward()
    optimizer.step()
    model(images)
    timm_moe.auxiliary_loss(model)
    model.forward_features(images[:4])
    with pytest.raises(RuntimeError, match="were not added"):
        optimizer.step()


def test_a_layer_that_changes_places_takes_its_losses_along():
    """Nothing remembers where the layers of a model are."""
    images, _ = batch()
    model, other = routed_model(), routed_model(aux_loss_weight=0.5)
    expected = [losses_by_hand(copy.deepcopy(each), images)[1] for each in (model, other)]
    for each in (model, other):
        each(images)
        timm_moe.auxiliary_loss(each)
    model.blocks[1], other.blocks[1] = other.blocks[1], model.blocks[1]
    for each in (model, other):
        each(images)
    mixed = [timm_moe.auxiliary_loss(each) for each in (model, other)]
    assert not any(torch.isclose(loss, old) for loss, old in zip(mixed, expected, strict=True))
    for each in (model, other):
        assert timm_moe.auxiliary_loss(each) == 0
    model.blocks[1] = nn.Identity()
    model(images)
    assert 0 < timm_moe.auxiliary_loss(model) < mixed[0]


def test_a_loss_that_is_forgotten_later_is_noticed_too():
    images, targets = batch()
    model = routed_model()
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
    model = routed_model()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    F.cross_entropy(model(images), targets).backward()
    assert all(layer.router.records for layer in timm_moe.moe_layers(model).values())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize("case", ["no weight", "frozen", "forgotten"])
@pytest.mark.parametrize("road", ["__call__", "forward_features"])
def test_nothing_piles_up(case, road):
    images, _ = batch()
    model = routed_model(**({"aux_loss_weight": 0} if case == "no weight" else {}))
    model.requires_grad_(case != "frozen")
    for _ in range(3):
        getattr(model, road)(images)
    router = model.blocks[1].mlp.router
    # Where only a part of the model is called, nobody says where a forward begins.
    assert len(router.records) == (3 if road == "forward_features" else 1)
    if case != "forgotten":
        for _ in range(2 * KEPT):
            losses = dict.fromkeys(router.loss_weights, torch.zeros(()))
            router.record(losses, torch.ones(1, router.num_experts))
        assert len(router.records) == KEPT


def test_a_trained_head_on_a_backbone_that_is_only_called_in_part():
    """Its records do not pile up, and it is said once what to do about it."""
    images, targets = batch()
    model = routed_model()
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
    told = [
        str(warning.message)
        for warning in caught
        if "Nobody adds the losses" in str(warning.message)
    ]
    assert len(told) == 1
    assert "eval()" in told[0]
    assert "requires_grad_(False)" in told[0]


def test_losses_of_features_wait_while_optimizers_of_other_modules_step():
    """Probes on features that are trained on, and models that learn from each other."""
    images, _ = batch()
    model = routed_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    probes = [nn.Linear(32, 5) for _ in range(3)]
    for part in images.split(4):
        expected = losses_by_hand(copy.deepcopy(model), part)[1]
        features = model.forward_features(part)
        for probe in probes:
            probe(features.detach()).mean().backward()
            torch.optim.SGD(probe.parameters(), lr=0.1).step()
        router_loss = timm_moe.auxiliary_loss(model)
        torch.testing.assert_close(router_loss, expected)
        (features.mean() + router_loss).backward()
        optimizer.step()


def test_features_of_a_model_in_training_mode_keep_graphs_and_say_so(monkeypatch):
    monkeypatch.setattr("timm_moe.layers.recording_router.MANY_WAITING", 3)
    images, _ = batch()
    model = routed_model()
    model.forward_features(images)
    model.forward_features(images)
    with pytest.warns(UserWarning, match=r"3 calls of a router .*memory.*no_grad"):
        model.forward_features(images)


def test_a_forward_in_another_optimizers_step_is_not_lost(caplog):
    """A critic whose generator is trained through it, or a head that was trained first."""
    images, targets = batch()
    critic, generator = routed_model(), nn.Linear(32, 32)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    for _ in range(2):
        critic(generator(images)).mean().backward()
        of_generator.step()
        of_critic.zero_grad()
        loss = F.cross_entropy(critic(generator(images).detach()), targets)
        (loss + timm_moe.auxiliary_loss(critic)).backward()
        of_critic.step()
    assert caplog.text == ""
    critic(images)  # Still nobody may forget them before the critic's own step.
    of_generator.step()
    with pytest.raises(RuntimeError, match="were not added"):
        of_critic.step()


def test_a_run_forgets_what_an_earlier_one_lost(caplog):
    images, targets = batch()
    model = routed_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(images)
    model(images)
    timm_moe.callbacks.start_averaging(model, optimizer, total_updates=1)
    loss = F.cross_entropy(model(images), targets)
    timm_moe.callbacks.add_router_losses(model, loss).backward()
    optimizer.step()
    assert "were not added" not in caplog.text


def test_a_frozen_router_trains_no_layer_before_it():
    images, targets = batch()
    model = routed_model()
    for layer in timm_moe.moe_layers(model).values():
        layer.router.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(images), targets).backward()
    optimizer.step()
    model(images)
    assert not timm_moe.auxiliary_loss(model).requires_grad


def record_a_loss(router):
    router.record({"size": torch.ones(3, requires_grad=True).sum()}, torch.ones(1, 2))


@pytest.mark.parametrize("trained", [(), (True, False)])
def test_losses_are_due_unless_a_router_has_parameters_and_all_are_frozen(trained):
    router = RecordingRouter(2, {"size": 0.5})
    for number, is_trained in enumerate(trained):
        router.register_parameter(f"weight{number}", nn.Parameter(torch.ones(1), is_trained))
    record_a_loss(router)
    (record,) = router.records
    assert record.weighted_loss == 1.5
    assert router.has_pending_losses()


def test_losses_that_were_passed_by_and_then_added_are_no_sign_that_nobody_adds_them():
    router = RecordingRouter(2, {"size": 0.5})
    record_a_loss(router)
    router.end_other_step()
    assert len(router.take()) == 1
    record_a_loss(router)
    record_a_loss(router)
    router.end_other_step()
    assert len(router.take()) == 2


@pytest.mark.filterwarnings("error")
def test_losses_that_are_added_in_time_are_kept_over_another_optimizers_steps():
    images, _ = batch()
    model, other = routed_model(), nn.Linear(2, 2)
    ours, theirs = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD(other.parameters(), lr=0.1),
    )
    for _ in range(3):
        features = [model.forward_features(part) for part in images.split(4)]
        records = len(model.blocks[1].mlp.router.records)
        theirs.step()
        assert records == len(model.blocks[1].mlp.router.records) == 2
        loss = timm_moe.auxiliary_loss(model)
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
    model = routed_model()
    replica = copy.copy(model.blocks[1].mlp.router)
    replica._is_replica = True  # what nn.DataParallel does on several devices
    with pytest.raises(RuntimeError, match=r"nn\.DataParallel .*DistributedDataParallel"):
        replica(torch.randn(2, 3, 32))
    for strict in (False, True):
        with pytest.raises(Exception, match=r"torch\.export .*routers' losses"):
            torch.export.export(model, (images,), strict=strict)


def test_a_converted_model_in_memory_has_them_too_and_its_dense_copy_no_trace():
    images, _ = batch()
    model = timm_moe.convert_to_moe(
        timm.create_model("vit_tiny_patch16_224", **SMALL_VIT),
        router="top_k",
        top_k=2,
        noise_std=1.0,
        aux_loss="importance+load",
    )
    model(images)
    assert timm_moe.auxiliary_loss(model).requires_grad
    dense = timm_moe.to_dense(model)
    assert "timm_moe" not in str(
        [hook for m in dense.modules() for hook in m._forward_pre_hooks.values()]
    )
    assert {type(m).__module__.split(".")[0] for m in dense.modules()} <= {"timm", "torch"}


def test_torchscript_is_refused_where_it_would_lose_the_losses():
    model = routed_model()
    with pytest.raises(RuntimeError, match=r"TorchScript.*eval mode"):
        torch.jit.trace(model, batch()[0])
    traced = torch.jit.trace(model.eval(), batch()[0])
    torch.testing.assert_close(traced(batch()[0]), model(batch()[0]))


def test_losses_that_are_read_for_a_log_before_they_are_added_are_told_of_once(caplog):
    images, targets = batch()
    model = routed_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_right in (True, False, False):
        caplog.clear()
        loss = F.cross_entropy(model(images), targets)
        if not is_right:
            timm_moe.auxiliary_loss(model).item()  # The losses are given once.
        (loss + timm_moe.auxiliary_loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_right:
            assert not caplog.messages
            told = []
        told += caplog.messages
    assert len(told) == 1
    assert "no backward reached them" in told[0]


@pytest.mark.parametrize("backward", [False, True])
def test_losses_of_an_earlier_training_forward_are_not_due_in_eval_mode(backward):
    images, targets = batch()
    model = routed_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = F.cross_entropy(model(images), targets)  # whose losses are not added
    if backward:
        loss.backward()
    model.eval()
    assert timm_moe.auxiliary_loss(model) == 0
    for _ in range(2):  # it is trained in eval mode
        loss = F.cross_entropy(model(images), targets) + timm_moe.auxiliary_loss(model)
        loss.backward()
        optimizer.step()
    model.train()
    assert timm_moe.auxiliary_loss(model) == 0  # a step was taken since
    _, expected = losses_by_hand(copy.deepcopy(model), images)
    model(images)
    torch.testing.assert_close(timm_moe.auxiliary_loss(model), expected)


@pytest.mark.parametrize("of_router", [False, True])
def test_a_block_in_eval_mode_brings_no_losses_of_before(of_router):
    images, targets = batch()
    model = routed_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    F.cross_entropy(model(images), targets).backward()  # whose losses are not added
    block = model.blocks[1].mlp.router if of_router else model.blocks[1]
    block.eval()
    fresh = copy.deepcopy(model)  # which holds no records
    for _ in range(2):
        fresh(images)
        outputs, router_loss = model(images), timm_moe.auxiliary_loss(model)
        torch.testing.assert_close(router_loss, timm_moe.auxiliary_loss(fresh))
        assert router_loss > 0
        (F.cross_entropy(outputs, targets) + router_loss).backward()
        optimizer.step()
    block.train()
    assert not model.blocks[1].mlp.router.waiting()


def test_without_gradients_there_are_no_losses_and_those_that_wait_go_on_waiting():
    images, _ = batch()
    model = routed_model()
    model(images)
    with torch.no_grad():
        model(images[:2])
        assert timm_moe.auxiliary_loss(model) == 0
    loss = timm_moe.auxiliary_loss(model)
    assert loss.requires_grad
    torch.testing.assert_close(loss, losses_by_hand(copy.deepcopy(model), images)[1])


def test_a_block_in_eval_mode_is_no_reason_to_refuse_a_step():
    images, targets = batch()
    model = routed_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(images)
    model.eval()
    F.cross_entropy(model(images), targets).backward()
    optimizer.step()
