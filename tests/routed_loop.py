"""A routed model, its loss written by hand, and comparisons: for tests of the router losses."""

import timm
import torch
from common import SMALL_VIT
from torch import nn
from torch.nn import functional as F

import timm_moe
from timm_moe.layers import TopKRouter

CPU = torch.device("cpu")


def routed_model(name="vit_tiny_moe", **kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL_VIT, **kwargs)
    # Routers that prefer some experts, so that their losses have a gradient to speak of.
    for module in model.modules():
        if isinstance(module, TopKRouter):
            nn.init.normal_(module.weight, std=0.3)
    return model


def batch():
    torch.manual_seed(1)
    return torch.randn(8, 3, 32, 32), torch.randint(5, (8,))


def losses_by_hand(model, images):
    """Return the outputs of a forward, and 0.01 E sum f P of every router.

    The latter is computed anew from what the routers saw.
    """
    seen, handles = [], []
    for module in model.modules():
        if isinstance(module, TopKRouter):
            handles.append(
                module.register_forward_hook(
                    lambda router, args, _: seen.append((router.weight, args[0]))
                )
            )
    outputs = model(images)
    for handle in handles:
        handle.remove()
    total = 0
    for weight, x in seen:
        with torch.autocast("cpu", enabled=False):
            gates = (x.float().flatten(0, 1) @ weight.float().T).softmax(1)
        fraction = F.one_hot(gates.argmax(1), len(weight)).float().mean(0)
        total = total + 0.01 * len(weight) * (fraction * gates.mean(0)).sum()
    # What a training loop does with the package's own number, so that the optimizer does not
    # complain:
    timm_moe.auxiliary_loss(model)
    return outputs, total


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(b.abs().max().item(), 1e-3))
