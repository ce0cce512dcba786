"""Promise: a compiled model trains as in eager mode, from one graph that is compiled once."""

import pytest
import torch
from common import families, without_draws
from devices import equal_slots, move_to_fake_gpu
from torch._subclasses import FakeTensorMode

import timm_moe
from timm_moe.layers import grouped

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
@pytest.mark.parametrize("name", families())
@pytest.mark.first_case
def test_training_is_one_graph_that_is_compiled_once(name, are_equal):
    with equal_slots(are_equal):
        compare(name, backend="aot_eager")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["random partition", "top-1"])
def test_inductor_trains_as_eager_mode(name):
    compare(name, backend="inductor")


@pytest.mark.parametrize("name", families())
@pytest.mark.ci
def test_on_a_gpu_the_forward_is_one_graph_that_never_waits(name, monkeypatch):
    graphs = []

    def capture(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(grouped, "multiplies_by_offsets", lambda *_: True)
    torch.compiler.reset()
    model = without_draws(name)
    with FakeTensorMode():
        move_to_fake_gpu(model)
        y = torch.compile(model, backend=capture, fullgraph=True)(
            torch.randn(4, 3, 32, 32, device="cuda")
        )
    assert y.is_cuda
    assert len(graphs) == 1
    called = {str(node.target) for node in graphs[0].graph.nodes}
    assert not called & {"cpu", "item", "tolist", "nonzero", "timm_moe.grouped_linear"}
