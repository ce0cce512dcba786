"""Gradient checkpointing gives the gradients of the forward.

It repeats forwards in backward.
"""

import copy
import pickle
from functools import partial

import pytest
import timm
import torch
from common import SMALL_VIT
from timm.layers import Mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from timm_moe.layers import EwaMlp, MoeMlp, RandomPartition, TopKRouter

KINDS = {
    "random": lambda: EwaMlp(Mlp(8, 12), RandomPartition(4), "independent"),
    "noisy": lambda: MoeMlp(Mlp(8, 12), TopKRouter(8, 4, 2, noise_std=4.0), "independent"),
    "plain": lambda: MoeMlp(Mlp(8, 12), TopKRouter(8, 4, 2, capacity_factor=0.8), "independent"),
}


class Repeated(nn.Module):
    """Two layers, each repeated in backward."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([KINDS[kind](), KINDS[kind]()])
        self.options = options

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, **self.options) if self.options else layer(x))
        return x


def gradients(model, x, passes=1):
    torch.manual_seed(1)
    for layer in model.layers:
        if isinstance(layer.router, TopKRouter):
            layer.router.forget()
    x = x.clone().requires_grad_()
    loss = model(x).square().sum()
    for left in reversed(range(passes)):
        grads = (
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=left > 0)
            if passes > 1
            else None
        )
    if grads is None:
        model.zero_grad()
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
    return grads


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_repetition_with_the_state_of_the_generators_gives_the_gradients_of_the_forward(
    kind, reentrant
):
    x = torch.randn(3, 7, 8)
    with torch.no_grad():
        Repeated(kind)(x)  # in training mode, as a discriminator's
    expected = gradients(Repeated(kind), x)
    for got, exact in zip(
        gradients(Repeated(kind, use_reentrant=reentrant), x), expected, strict=True
    ):
        torch.testing.assert_close(got, exact)
    if not reentrant:  # which does not know torch.autograd.grad
        for got, exact in zip(
            gradients(Repeated(kind, use_reentrant=False), x, passes=3), expected, strict=True
        ):
            torch.testing.assert_close(got, exact)


def test_a_layer_without_random_numbers_needs_no_state_of_the_generators():
    x = torch.randn(3, 7, 8)
    for reentrant in (False, True):
        model = Repeated("plain", use_reentrant=reentrant, preserve_rng_state=False)
        for got, expected in zip(gradients(model, x), gradients(Repeated("plain"), x), strict=True):
            torch.testing.assert_close(got, expected)


def test_several_forwards_before_one_backward():
    found, expected = (
        gradients_of_copies(Repeated("random", **options))
        for options in (dict(use_reentrant=False), {})
    )
    torch.testing.assert_close(found, expected)


def gradients_of_copies(model):
    """Return the gradients of a model that ran twice, and of its copies that ran in between."""
    models, total = (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))), 0
    for number, each in enumerate((*models, model)):
        torch.manual_seed(number)
        total = total + each(torch.randn(3, 7, 8)).square().sum()
    total.backward()
    return [parameter.grad for each in models for parameter in each.parameters()]


def loss_and_gradients(backend, checkpointing, **options):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_ewa_moe", **{**SMALL_VIT, "depth": 2}, **options)
    model.set_grad_checkpointing(checkpointing)
    call = torch.compile(model, backend=backend)
    torch.manual_seed(1)
    call(torch.ones(2, 3, 32, 32)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.ci
def test_a_compiler_that_keeps_the_state_is_right():
    compiled = partial(loss_and_gradients, "aot_eager")
    for got, expected in zip(compiled(True), compiled(False), strict=True):
        torch.testing.assert_close(got, expected)
