"""A model in evaluation keeps the mean of its experts exactly as long as their weights are the same."""

import copy
import pickle
import weakref

import pytest
import timm
import torch
from common import SMALL_VIT
from timm.layers import Mlp
from timm.utils import ModelEmaV3

from timm_moe import moe_layers
from timm_moe.layers import EwaMlp, kept_mean


@pytest.fixture
def means(monkeypatch):
    """Counts the means that are computed."""
    computed, mean = [], kept_mean.mean_over_experts

    def counted(stacked):
        computed.append(stacked.shape)
        return mean(stacked)

    monkeypatch.setattr(kept_mean, "mean_over_experts", counted)
    return computed


def layer():
    return EwaMlp(Mlp(8, 12), 4, "independent").eval()


def plain(layer, x):
    mean = {name: stacked.detach().mean(0) for name, stacked in layer.named_expert_parameters()}
    return torch.func.functional_call(Mlp(8, 12).eval(), mean, (x,))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_computed_once(mode, means):
    ewa, x = layer(), torch.randn(3, 8)
    with mode():
        outputs = [ewa(x) for _ in range(3)]
    assert len(means) == 4
    with torch.no_grad():  # what one kept, the other takes
        outputs.append(ewa(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert ewa(x).dtype == torch.bfloat16
    assert len(means) == 4
    for y in outputs:
        torch.testing.assert_close(y, plain(ewa, x))


def shift_data(ewa):
    ewa.fc1.weight.data += 1


def change_one_entry(ewa):
    ewa.fc1.weight.data[1, 2, 3] += 10
    ewa.eval()


def ema_by_data(ewa):
    for own, other in zip(ewa.parameters(), layer().parameters(), strict=True):
        own.data.mul_(0.99).add_(other.data, alpha=0.01)


def step(ewa):
    optimizer = torch.optim.AdamW(ewa.parameters(), lr=0.1, fused=True)
    ewa.train()(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    ewa.eval()


def step_in_eval_mode(ewa):
    optimizer = torch.optim.SGD(ewa.parameters(), lr=0.1, foreach=True)
    ewa(torch.randn(5, 8)).sum().backward()
    optimizer.step()


@torch.no_grad()
def in_place(ewa):
    ewa.fc2.bias.add_(1)


def new_parameter(ewa):
    ewa.fc1.weight = torch.nn.Parameter(ewa.fc1.weight.detach() + 1)


def new_data(ewa):
    ewa.fc1.weight.data = ewa.fc1.weight.data + 1


CHANGES = {
    "in place": in_place,
    "a state dict": lambda ewa: ewa.load_state_dict(layer().state_dict()),
    "a state dict, assigned": lambda ewa: ewa.load_state_dict(layer().state_dict(), assign=True),
    "a dense state dict": lambda ewa: ewa.load_state_dict(Mlp(8, 12).state_dict()),
    "a fused step": step,
    "a step in eval mode": step_in_eval_mode,
    "a new parameter": new_parameter,
    "new data": new_data,
    "data": shift_data,
    "an average of weights by data": ema_by_data,
    "an entry of data, then eval()": change_one_entry,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("held", [False, True])
def test_a_change_is_seen(change, held):
    ewa, x = layer(), torch.randn(3, 8)
    optimizer = torch.optim.SGD(ewa.parameters(), lr=0.1) if held else None
    with torch.no_grad():
        before = ewa(x)
    CHANGES[change](ewa)
    with torch.no_grad():
        torch.testing.assert_close(ewa(x), plain(ewa, x))
        assert not torch.equal(ewa(x), before)
    del optimizer  # which may have held parameters that were replaced


def test_copies_state_dicts_and_ema_have_nothing_of_it(means):
    model = timm.create_model("vit_tiny_ewa_moe", expert_init="independent", **SMALL_VIT).eval()
    size, names = len(pickle.dumps(model)), list(model.state_dict())
    images = torch.randn(2, 3, 32, 32)
    ema = ModelEmaV3(model, decay=0.5)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(ema.module(images), expected)
        assert len(pickle.dumps(model)) == size
        assert list(model.state_dict()) == names
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.mul_(0.5)
        assert not torch.equal(other(images), expected)
        ema.update(other)
        changed = ema.module(images)
        assert not torch.equal(changed, expected)
        torch.testing.assert_close(changed, copy.deepcopy(ema.module)(images))
    gone = weakref.ref(next(iter(moe_layers(other).values())))
    del other
    assert gone() is None


@torch.no_grad()
@pytest.mark.parametrize("columns", [slice(1, None), slice(1, None, 2), slice(0, 8)])
def test_what_is_compared_stands_in_all_columns(columns):
    ewa, x = EwaMlp(Mlp(32, 64), 4, "independent").eval(), torch.randn(3, 32)
    before = ewa(x)
    ewa.fc1.weight.data[..., columns] *= 0.5
    assert not torch.equal(ewa(x), before)


@torch.no_grad()
def test_parameters_may_be_swapped():
    ewa, x = layer(), torch.randn(3, 8)
    ewa(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        ewa.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert ewa(x.double()).dtype == torch.float64


def test_a_model_in_another_place_or_type():
    ewa, x = layer(), torch.randn(3, 8)
    with torch.no_grad():
        ewa(x)
        assert ewa.double()(x.double()).dtype == torch.float64
        torch.testing.assert_close(ewa(x.double()).float(), plain(ewa.float(), x))
        assert ewa.to("meta")(x.to("meta")).is_meta


def test_gradients_of_an_evaluation_and_torch_func(means):
    ewa, x = layer(), torch.randn(3, 8)
    with torch.no_grad():
        ewa(x)
    ewa(x).sum().backward()
    assert ewa.fc1.weight.grad.abs().sum() > 0
    weights = dict(ewa.named_parameters())
    many = {name: torch.stack([weight, 2 * weight]).detach() for name, weight in weights.items()}
    with torch.no_grad():
        ewa(x)
        y = torch.func.vmap(lambda weights: torch.func.functional_call(ewa, weights, (x,)))(many)
        torch.testing.assert_close(y[0], ewa(x))
        assert not torch.equal(y[1], y[0])


def test_compiled_and_traced_it_is_part_of_the_graph():
    ewa, x = layer(), torch.randn(3, 8)
    with torch.no_grad():
        ewa(x)
        calls = torch.compile(ewa, fullgraph=True, backend="eager"), torch.jit.trace(ewa, x)
        in_place(ewa)
        for call in calls:
            torch.testing.assert_close(call(x), plain(ewa, x))
