"""Compiled training of whole models.

There is one graph, compiled once, and after some steps the weights are those of eager mode.
"""

import pytest
import torch
from common import FAMILIES, without_draws
from devices import equal_slots

import timm_moe

STEPS = 4


def train(name, **compiled):
    """Weights after some steps, by a compiled model if there are options for the compiler."""
    model = without_draws(name)
    call = torch.compile(model, fullgraph=True, **compiled) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.Generator().manual_seed(0)
    for number in range(STEPS):
        torch.manual_seed(number)  # the same partitions
        y = call(torch.randn(4, 3, 32, 32, generator=images))
        (y.square().mean() + timm_moe.auxiliary_loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def compare(name, **compiled):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        actual = train(name, **compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for path, expected in train(name).items():
        torch.testing.assert_close(
            actual[path],
            expected,
            rtol=1e-3,
            atol=1e-5,
            msg=lambda text, path=path: f"{path}: {text}",
        )


@pytest.mark.parametrize("are_equal", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_training_is_one_graph_that_is_compiled_once(name, are_equal):
    with equal_slots(are_equal):
        compare(name, backend="aot_eager")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["random partition", "top-1"])
def test_inductor_trains_as_eager_mode(name):
    compare(name, backend="inductor")
