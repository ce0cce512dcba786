"""What users and other libraries do to the modules inside an expert layer: hooks, offloading, computed weights."""

import copy

import pytest
import timm
import torch
from common import SMALL_VIT
from timm.layers import Mlp
from torch import nn
from torch.nn.utils import parametrizations, prune

import timm_moe
from timm_moe.layers import EwaMlp, Experts, MoeMlp, SharedExpertMlp, TopKRouter
from timm_moe.layers.grouped import grouped_linear
from timm_moe.rivals.fused import FusedMlp, Fusion


class Own(nn.Module):
    """A network of a user's, which runs expert by expert, with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.fc1, self.act, self.fc2 = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x * self.scale)))


def top_k():
    return TopKRouter(8, 4, loss_weights={"balance": 0.01})


LAYERS = {
    "routed": lambda: MoeMlp(Mlp(8, 12), top_k(), 4, "independent"),
    "EWA": lambda: EwaMlp(Mlp(8, 12), 4, "independent"),
    "shared": lambda: SharedExpertMlp(Mlp(8, 12), top_k(), 4, "independent"),
    "fused": lambda: FusedMlp(Mlp(8, 12), Fusion(4), 4, "independent"),
    "own": lambda: MoeMlp(Own(), top_k(), 4, "independent"),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 5, 8)


def layer_of(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    layer.path = "blocks.1.mlp"
    return layer


def output(layer, x):
    torch.manual_seed(2)  # the partitions
    return layer(x)


@every_layer
@pytest.mark.parametrize("where", ["cpu", "disk", "blocks"])
def test_weights_that_accelerate_keeps_elsewhere(kind, where, x, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain = nn.Sequential(nn.LayerNorm(8), layer_of(kind)).eval()
    model = copy.deepcopy(plain)
    if where == "cpu":
        accelerate.cpu_offload(model)
    elif where == "disk":
        accelerate.disk_offload(model, tmp_path)
    else:
        places = {"0": "cpu", **{f"1.{name}": "disk" for name, _ in model[1].named_children()}}
        places |= {f"1.{name}": "cpu" for name, _ in model[1].named_parameters(recurse=False)}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    if where != "blocks":
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(output(model, x), output(plain, x))


def spectral(module):
    torch.manual_seed(3)  # the first vectors
    return nn.utils.spectral_norm(module)


COMPUTED = {
    "spectral norm by hooks": spectral,
    "weight norm by hooks": nn.utils.weight_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
computed = pytest.mark.parametrize("how", COMPUTED)


@every_layer
@computed
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_experts_are_trained_through_what_computes_them(kind, how, x):
    layer = layer_of(kind)
    COMPUTED[how](layer.fc1)
    sources = [parameter for name, parameter in layer.named_parameters() if name.startswith("fc1") and "bias" not in name]
    before, first = [source.detach().clone() for source in sources], output(layer, x)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        output(layer, x).square().sum().backward()
        if hasattr(layer.router, "take"):
            layer.router.take()
        optimizer.step()
    assert all(not torch.equal(source, old) for source, old in zip(sources, before, strict=True))
    assert not torch.allclose(output(layer, x), first)
