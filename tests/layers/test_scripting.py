"""torch.jit.script compiles what is evaluated; the model stays as it is."""

import pytest
import timm
import torch
from common import SMALL_VIT
from timm.layers import Mlp
from torch import nn

from timm_moe import moe_layers
from timm_moe.layers import EwaMlp

SMALL = {**SMALL_VIT, "num_experts": 3}
MODELS = {
    "vit_tiny_ewa_moe": {},
    "vit_tiny_moe": {},
    "vmoe_b16": dict(top_k=2, gate_mode="renorm"),
    "vit_small_moe": dict(gate_mode="one", pre_logits=True),
    "vimoe_s14": dict(top_k=2),
    "vimoe_s14_shared": {},
    "widenet_b": {},
}


def small_model(name: str, **kwargs) -> nn.Module:
    model = timm.create_model(name, **{**SMALL, **kwargs})
    for layer in moe_layers(model).values():
        for parameter in layer.parameters():  # upcycled experts would be equal
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("vit_tiny_ewa_moe", "vimoe_s14_shared") else pytest.mark.ci)
        for name in MODELS
    ],
)
def test_the_script_computes_what_the_model_does(name, images, tmp_path):
    model = small_model(name, **MODELS[name])
    names = list(model.state_dict())
    scripted = torch.jit.script(model)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(scripted(images), expected)
        torch.testing.assert_close(scripted(images[:1]), model(images[:1]))  # another batch, other shapes
        torch.jit.save(scripted, tmp_path / "model.pt")
        torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(images), expected)
    assert list(model.state_dict()) == names
    weights = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    assert (tmp_path / "model.pt").stat().st_size < weights + 500_000


def test_each_layer_of_a_script_has_its_own_weights():
    """torch forgets the layers that it replaces, and takes a new one at the place in memory of an old one for that."""
    for _ in range(5):
        layers = nn.Sequential(*(EwaMlp(Mlp(8, 12), 2, "independent") for _ in range(6))).eval()
        x = torch.randn(3, 4, 8)
        expected = layers(x)
        torch.testing.assert_close(torch.jit.script(layers)(x), expected)


def test_the_script_has_the_weights_of_the_model(images):
    model = small_model("vmoe_b16")
    scripted = torch.jit.script(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
        torch.testing.assert_close(scripted(images), model(images))


def test_what_cannot_be_scripted_is_named():
    with pytest.raises(RuntimeError, match="eval_capacity_factor"):
        torch.jit.script(small_model("vit_tiny_moe", eval_capacity_factor=1.0))
    with pytest.raises(RuntimeError, match="EnsembleRouter"):
        torch.jit.script(small_model("vmoe_pbe_b16", num_experts=4))
    with pytest.raises(RuntimeError, match="RandomPartition"):
        torch.jit.script(small_model("vit_tiny_ewa_moe", eval_mode="partition"))


@pytest.mark.parametrize("name", ["vit_tiny_ewa_moe", "vit_tiny_moe"])
def test_a_script_is_for_evaluation_though_made_in_training_mode_as_by_validate_py(name, images):
    model = small_model(name)
    scripted = torch.jit.script(model.train())
    with pytest.raises(torch.jit.Error, match=r"no experts in training: call eval\(\) first"):
        scripted(images)
    with torch.no_grad():
        torch.testing.assert_close(scripted.eval()(images), model.eval()(images))
