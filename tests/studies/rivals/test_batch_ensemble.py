"""Batch ensembles: layers against slow loops over members, and models in timm's loop."""

import pytest
import timm
import torch
from common import SMALL_VIT
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask
from torch import nn

from studies.callbacks import CALLBACKS
from studies.rivals import BatchEnsembleLinear
from timm_moe.analysis.evaluation import own_members
from timm_moe.analysis.info import model_info
from timm_moe.layers.ensemble import ensemble_log_probabilities
from timm_moe.models.registered import weightless_model


@settings(max_examples=25)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
def test_a_layer_is_a_loop_over_its_members(members, images, rows, width, bias, normal):
    linear = nn.Linear(width, 3, bias=bias).double()
    layer = BatchEnsembleLinear(linear, members, "normal" if normal else "sign")
    if bias:
        nn.init.normal_(layer.bias)
    x = torch.randn(images * members, rows, width, dtype=torch.float64, requires_grad=True)
    expected = []
    for entry in range(images * members):
        m = entry % members
        y = ((x[entry] * layer.input_factor[m]) @ layer.weight.T) * layer.output_factor[m]
        expected.append(y + layer.bias[m] if bias else y)
    expected = torch.stack(expected)
    torch.testing.assert_close(layer(x), expected)
    learned = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(layer(x).square().sum(), learned),
        torch.autograd.grad(expected.square().sum(), learned),
    )


def test_members_begin_as_the_dense_network_but_for_their_factors(dense_vit, images):
    nn.init.normal_(dense_vit.blocks[3].mlp.fc1.bias)
    model = timm.create_model("vit_be_b32", ensemble_size=3, **SMALL_VIT).eval()
    model.load_state_dict(dense_vit.state_dict())
    signs = model.blocks[3].mlp.fc1.input_factor
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    rows = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: rows.append(len(output)))
    with torch.no_grad():
        members = model.forward_members(images)
        assert rows == [6, 18, 18, 18]  # blocks 1 and 3 have factors
        assert members.shape == (6, 3, 5)
        assert not torch.allclose(members[:, 0], members[:, 1])
        torch.testing.assert_close(
            model(images), ensemble_log_probabilities(members.log_softmax(-1))
        )
        assert own_members(model, images).shape == (6, 3, 5)
        for name, parameter in model.named_parameters():
            if name.endswith("_factor"):
                nn.init.ones_(parameter)
        torch.testing.assert_close(
            model.forward_members(images), dense_vit(images)[:, None].expand(-1, 3, -1)
        )
    again = timm.create_model("vit_be_b32", ensemble_size=3, **SMALL_VIT)
    again.load_state_dict(model.state_dict())
    other = timm.create_model("vit_be_b32", **SMALL_VIT)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(model.state_dict())


def test_factors_learn_at_their_own_rate_and_are_not_decayed(monkeypatch):
    model = timm.create_model("vit_be_b32", factor_init="normal", **SMALL_VIT)
    monkeypatch.setattr(timm.optim, "create_optimizer_v2", timm.optim.create_optimizer_v2)
    CALLBACKS["factor_lr"]("2")
    optimizer = timm.optim.create_optimizer_v2(model, opt="momentum", lr=0.1, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=4, updates_per_epoch=2)
    scheduler.step(0)
    rate, decay = {}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rate[id(parameter)], decay[id(parameter)] = group["lr"], group["weight_decay"]
    for name, parameter in model.named_parameters():
        assert rate[id(parameter)] == (0.2 if name.endswith("_factor") else 0.1), name
        undecayed = (
            name.endswith(("bias", "_factor"))
            or "norm" in name
            or name in ("cls_token", "pos_embed")
        )
        assert decay[id(parameter)] == (0 if undecayed else 0.05), name
    task = ClassificationTask(model, criterion=nn.CrossEntropyLoss())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))["loss"].backward()
    optimizer.step()
    assert not [
        name for name, value in model.state_dict().items() if torch.equal(value, before[name])
    ]
    model.init_weights()
    assert not model.blocks[3].mlp.fc2.bias.any()
    assert 0.3 < model.blocks[3].mlp.fc2.output_factor.std() < 0.8


def test_parameters_are_those_of_the_factors():
    dense, model = (weightless_model(name) for name in ("vit_base_patch32_224", "vit_be_b32"))
    more = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in dense.parameters())
    assert more == 2 * 19_200  # of each MLP: 2 (D + H) + 2 (H + D) + (H + D)
    assert model_info("vit_be_b32").members == 2


def test_what_is_not_possible_is_said(images, monkeypatch):
    for options, message in (
        (dict(factor_init="zeros"), "factor_init .*sign, normal, .*'zeros'"),
        (dict(ensemble_size=0), r"ensemble_size .* 0\."),
        (dict(ensemble_layers="last-9"), "last-9"),
    ):
        with pytest.raises(ValueError, match=message):
            timm.create_model("vit_be_b32", **SMALL_VIT, **options)
    monkeypatch.setattr(timm.optim, "create_optimizer_v2", timm.optim.create_optimizer_v2)
    CALLBACKS["factor_lr"]("2")
    with pytest.raises(ValueError, match="no factors"):
        timm.optim.create_optimizer_v2(
            timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT), opt="sgd"
        )
    with pytest.raises(RuntimeError, match="unflatten"):
        BatchEnsembleLinear(nn.Linear(4, 4), 2)(torch.randn(3, 5, 4))
