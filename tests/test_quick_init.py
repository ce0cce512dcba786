"""Weights that a file replaces at once are drawn quickly; all others as ever."""

import timm
import torch
from common import SMALL_VIT
from timm.layers import Mlp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import timm_moe
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.checkpoints.source import load_source
from timm_moe.layers import EwaMlp, RandomPartition
from timm_moe.models.registered import weightless_model
from timm_moe.quick_init import quick_init


def test_few_numbers_are_drawn_and_they_are_what_was_asked_for():
    with quick_init():
        normal = nn.Parameter(torch.empty(300, 301))
        with torch.no_grad():
            normal.normal_(2.0, 0.5)
        uniform, truncated = torch.empty(300, 301).uniform_(-1, 3), torch.empty(300, 301)
        nn.init.trunc_normal_(truncated, std=1.0, a=2.0, b=3.0)  # draws until it has enough
        linear = nn.Linear(300, 300)
    assert abs(normal.mean() - 2) < 0.02
    assert abs(normal.std() - 0.5) < 0.02
    assert -1 <= uniform.min() < -0.99
    assert 2.99 < uniform.max() <= 3
    assert 2 <= truncated.min() <= truncated.max() <= 3
    assert len(uniform.unique()) <= 2**14
    assert linear.weight.abs().max() == 0
    dense = Mlp(300, 301)
    with quick_init():
        experts = EwaMlp(dense, RandomPartition(3), "independent").fc1.weight.detach()
    assert all(len(expert.unique()) <= 2**14 for expert in experts[1:])
    assert abs(experts[1].std() / dense.fc1.weight.std() - 1) < 0.02
    assert len(torch.empty(300, 301).uniform_().unique()) > 2**14
    assert nn.Linear(300, 300).weight.std() > 0


def test_routers_that_a_dense_checkpoint_lacks_are_drawn(tmp_path):
    spec = ModelSpec(
        name="vit_tiny_moe", kwargs={**SMALL_VIT, "embed_dim": 192, "num_experts": 128}
    )
    dense = timm.create_model("vit_tiny_patch16_224", **{**SMALL_VIT, "embed_dim": 192})
    torch.save({"state_dict": dense.state_dict()}, tmp_path / "dense.pth")
    model = load_source(tmp_path / "dense.pth", spec)
    for layer in timm_moe.moe_layers(model).values():
        assert 0.01 < layer.router.weight.std() < 0.04
        assert len(layer.router.weight.unique()) > 2**14  # of 24,576
        assert torch.equal(layer.fc1.weight[0], layer.fc1.weight[1])


class Operators(TorchDispatchMode):
    """Keeps the names of torch's operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


def test_a_model_without_weights_is_made_without_the_work_of_truncated_normals():
    model = timm.create_model("vit_tiny_moe", **SMALL_VIT)
    with Operators() as operators:
        weightless = weightless_model("vit_tiny_moe", **SMALL_VIT)
    assert "empty" in operators.names
    assert operators.names.isdisjoint({"erfinv_", "mul_", "add_", "clamp_"})
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    assert {
        name: (tensor.shape, tensor.dtype) for name, tensor in weightless.state_dict().items()
    } == shapes
    assert all(
        parameter.is_meta and parameter.requires_grad for parameter in weightless.parameters()
    )
