"""Promise: with gradient checkpointing a model trains as without, its routers' losses included."""

import pytest
import torch
from common import families, without_draws

import timm_moe


def train(name, is_checkpointing):
    """Return the losses of the routers, the weights after some steps, and the calls of a layer."""
    model = without_draws(name)
    model.set_grad_checkpointing(is_checkpointing)
    calls = []
    (layer, *_) = timm_moe.moe_layers(model).values()
    layer.register_forward_pre_hook(lambda *call: calls.append(call))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(0)
    losses = []
    for number in range(3):
        torch.manual_seed(number)  # the same partitions
        y = model(torch.randn(4, 3, 32, 32, generator=random))
        losses.append(timm_moe.auxiliary_loss(model))
        (y.square().mean() + losses[-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), model.state_dict(), len(calls)


@pytest.mark.parametrize("name", families())
def test_training_is_the_same(name):
    expected_losses, expected, forwards = train(name, is_checkpointing=False)
    losses, actual, with_repetitions = train(name, is_checkpointing=True)
    assert with_repetitions == 2 * forwards > 0
    torch.testing.assert_close(losses, expected_losses)
    for path, tensor in expected.items():
        torch.testing.assert_close(actual[path], tensor, msg=path)
