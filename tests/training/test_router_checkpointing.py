"""Router losses under gradient checkpointing: repetitions in backward do not count."""

import copy
from functools import partial

import pytest
import torch
from routed_loop import assert_same, batch, gradients, losses_by_hand, routed_model
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import timm_moe


def test_gradient_checkpointing_in_a_loop_of_ones_own():
    images, targets = batch()

    def around(part_of_model):
        return lambda model, x: checkpoint(part_of_model(model), x, use_reentrant=False)

    roads = {
        "none": lambda model, x: model(x),
        "inside": lambda model, x: (model.set_grad_checkpointing(), model(x))[1],
        "around the model": around(lambda model: model),
        "around its features": lambda model, x: model.forward_head(
            around(lambda m: m.forward_features)(model, x)
        ),
    }
    outcomes = []
    for call in roads.values():
        model = routed_model()
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
    model = routed_model()
    model.set_grad_checkpointing(True)
    model(images).sum().backward(retain_graph=True)
    torch.testing.assert_close(
        timm_moe.auxiliary_loss(model), losses_by_hand(copy.deepcopy(model), images)[1]
    )


def test_a_call_that_finds_no_losses_leaves_a_repetition_one():
    images, _ = batch()
    model = routed_model()
    y = checkpoint(model, images, use_reentrant=False)
    loss = timm_moe.auxiliary_loss(model)
    assert timm_moe.auxiliary_loss(model) == 0  # for a log
    (y.sum() + loss).backward()
    assert timm_moe.auxiliary_loss(model) == 0


def test_recomputation_in_backward_leaves_no_record():
    images, targets = batch()
    model = routed_model()
    model.set_grad_checkpointing(True)
    outputs = model(images)
    assert [len(layer.router.records) for layer in timm_moe.moe_layers(model).values()] == [1, 1]
    (F.cross_entropy(outputs, targets) + timm_moe.auxiliary_loss(model)).backward()
    assert [len(layer.router.records) for layer in timm_moe.moe_layers(model).values()] == [0, 0]
    assert timm_moe.auxiliary_loss(model) == 0


class Repeated(nn.Module):
    """All blocks as one that is repeated in backward."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        return checkpoint(self.blocks, x, use_reentrant=False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.first_case
def test_compiled_blocks_that_are_repeated_in_backward_leave_no_record(compiled):
    """Compiled code cannot ask whether backward is running.

    So it takes records as in a forward, which are ignored.
    """
    images, targets = batch()
    outcomes = []
    for repeated in (False, True):
        model = routed_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        if repeated:
            model.blocks = Repeated(model.blocks)
        for part, labels in zip(images.split(4), targets.split(4), strict=True):
            loss = F.cross_entropy(model(part), labels) + timm_moe.auxiliary_loss(model)
            loss.backward()
            assert timm_moe.auxiliary_loss(model) == 0
        outcomes.append(gradients(model))
        optimizer.step()
    assert_same(*outcomes)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_was_left_out_before_blocks_are_repeated_in_backward(compiled):
    images, targets = batch()
    model = routed_model()
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    model.blocks = Repeated(model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(images)
    timm_moe.auxiliary_loss(model)
    (F.cross_entropy(model(images), targets) + timm_moe.auxiliary_loss(model)).backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, dict(balance="bias")])
def test_reentrant_checkpointing_would_lose_losses_and_loads(options):
    images, _ = batch()
    model = routed_model(**options)
    x = model.patch_embed(images)
    y = checkpoint(model.blocks, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"Reentrant.*use_reentrant=False"):
        (y.mean() + timm_moe.auxiliary_loss(model)).backward()


@pytest.mark.parametrize("options", [{}, dict(balance="bias")])
def test_reentrant_checkpointing_loses_nothing_of_a_frozen_router(options):
    images, _ = batch()
    outcomes = []
    for run in (lambda blocks, x: blocks(x), partial(checkpoint, use_reentrant=True)):
        model = routed_model(**options)
        for layer in timm_moe.moe_layers(model).values():
            layer.router.requires_grad_(False)
        run(model.blocks, model.patch_embed(images)).mean().backward()
        weights = (each for each in model.blocks.parameters() if each.requires_grad)
        outcomes.append([weight.grad for weight in weights])
    assert_same(*outcomes)
