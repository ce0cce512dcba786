"""Promise: what is exported computes what the model did in eval mode."""

import pytest
import timm
import torch
from common import FAMILIES, families, without_draws

import timm_moe
from timm_moe.export import export_moe

#: Those whose dense form timm has no class for.
OF_THIS_PACKAGE = ("WideNet",)


@pytest.mark.parametrize("name", families())
def test_with_its_experts(name, tmp_path, images):
    model = without_draws(name).eval()
    export_moe(model, tmp_path / "moe")
    read = timm.create_model(f"local-dir:{tmp_path / 'moe'}", pretrained=True).eval()
    assert torch.equal(read(images), model(images))


@pytest.mark.parametrize("name", families())
def test_as_a_dense_model(name, tmp_path, images):
    model = without_draws(name).eval()
    method = "sum" if name == "fine-grained" else "average"
    result = timm_moe.export_dense(model, tmp_path / "dense", method)
    dense = timm.create_model(f"local-dir:{tmp_path / 'dense'}", pretrained=True).eval()
    if name not in OF_THIS_PACKAGE:
        assert type(dense).__module__.startswith("timm.")
    assert not timm_moe.moe_layers(dense)
    assert result.exact == (FAMILIES[name][0] == "vit_tiny_ewa_moe")
    source = model if result.exact else timm_moe.to_dense(model, method)
    torch.testing.assert_close(dense(images), source(images), rtol=1e-5, atol=1e-5)
