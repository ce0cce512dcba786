"""In evaluation an EWA layer computes with the mean of its experts' present weights."""

import pytest
import torch
from timm.layers import Mlp

from timm_moe.layers import EwaMlp, RandomPartition


def layer():
    return EwaMlp(Mlp(8, 12), RandomPartition(4), "independent").eval()


def plain(layer, x):
    mean = {name: stacked.detach().mean(0) for name, stacked in layer.named_expert_parameters()}
    return torch.func.functional_call(Mlp(8, 12).eval(), mean, (x,))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_the_mean(mode):
    ewa, x = layer(), torch.randn(3, 8)
    with mode():
        torch.testing.assert_close(ewa(x), plain(ewa, x))
        with torch.autocast("cpu", torch.bfloat16):
            assert ewa(x).dtype == torch.bfloat16


def step(ewa):
    optimizer = torch.optim.AdamW(ewa.parameters(), lr=0.1, fused=True)
    ewa.train()(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    ewa.eval()


@torch.no_grad()
def in_place(ewa):
    ewa.fc2.bias.add_(1)


def new_parameter(ewa):
    ewa.fc1.weight = torch.nn.Parameter(ewa.fc1.weight.detach() + 1)


def one_entry_of_data(ewa):
    ewa.fc1.weight.data[1, 2, 3] += 10


CHANGES = {
    "in place": in_place,
    "a state dict": lambda ewa: ewa.load_state_dict(layer().state_dict()),
    "a state dict, assigned": lambda ewa: ewa.load_state_dict(layer().state_dict(), assign=True),
    "a dense state dict": lambda ewa: ewa.load_state_dict(Mlp(8, 12).state_dict()),
    "a fused step": step,
    "a new parameter": new_parameter,
    "an entry of data": one_entry_of_data,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change):
    ewa, x = layer(), torch.randn(3, 8)
    with torch.no_grad():
        before = ewa(x)
    CHANGES[change](ewa)
    with torch.no_grad():
        torch.testing.assert_close(ewa(x), plain(ewa, x))
        assert not torch.equal(ewa(x), before)


def test_a_model_in_another_place_or_type():
    ewa, x = layer(), torch.randn(3, 8)
    with torch.no_grad():
        assert ewa.double()(x.double()).dtype == torch.float64
        torch.testing.assert_close(ewa(x.double()).float(), plain(ewa.float(), x))
        assert ewa.to("meta")(x.to("meta")).is_meta


def test_gradients_of_an_evaluation_and_torch_func():
    ewa, x = layer(), torch.randn(3, 8)
    ewa(x).sum().backward()
    assert ewa.fc1.weight.grad.abs().sum() > 0
    weights = dict(ewa.named_parameters())
    many = {name: torch.stack([weight, 2 * weight]).detach() for name, weight in weights.items()}
    with torch.no_grad():
        y = torch.func.vmap(lambda weights: torch.func.functional_call(ewa, weights, (x,)))(many)
        torch.testing.assert_close(y[0], ewa(x))
        assert not torch.equal(y[1], y[0])


def test_compiled_and_traced_it_is_part_of_the_graph():
    ewa, x = layer(), torch.randn(3, 8)
    with torch.no_grad():
        calls = torch.compile(ewa, fullgraph=True, backend="eager"), torch.jit.trace(ewa, x)
        calls[0](x)  # It is compiled at its first call.
        in_place(ewa)
        for call in calls:
            torch.testing.assert_close(call(x), plain(ewa, x))
