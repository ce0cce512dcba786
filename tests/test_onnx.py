"""What timm's onnx_export.py makes of exported models gives the expert models' outputs in onnxruntime."""

import pytest
import timm
import torch
from conftest import SMALL_VIT
from timm.utils.onnx import onnx_export, onnx_forward

import timm_moe

pytest.importorskip("onnx", reason="pip install timm_moe[onnx]")
pytest.importorskip("onnxruntime", reason="pip install timm_moe[onnx]")

SL = dict(shifted_patches=True, locality_attention=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_ewa_moe", SMALL_VIT),
        pytest.param("vit_xtiny_ewa_moe", dict(embed_dim=32, depth=2, num_heads=2, **SL), marks=pytest.mark.ci),
        pytest.param("pit_xs_32_ewa_moe", dict(base_dims=[8, 8, 8], depth=[1, 2, 1], **SL), marks=pytest.mark.ci),
        pytest.param(
            "swin_tiny_patch2_window4_32_ewa_moe", dict(embed_dim=12, depths=[1, 2, 1], **SL), marks=pytest.mark.ci
        ),
    ],
)
def test_an_exported_model_in_onnxruntime(name, options, images, tmp_path):
    model = timm.create_model(name, **options).eval()
    timm_moe.export_dense(model, tmp_path / "dense")
    dense = timm.create_model(f"local-dir:{tmp_path}/dense", pretrained=True, exportable=True)
    # older versions of timm do not take the list of a config.json
    onnx_export(dense, str(tmp_path / "dense.onnx"), check_forward=True, batch_size=2, input_size=(3, 32, 32))
    with torch.no_grad():
        for batch in (images, images[:1]):
            actual = torch.from_numpy(onnx_forward(str(tmp_path / "dense.onnx"), batch))
            torch.testing.assert_close(actual, model(batch), rtol=1e-4, atol=1e-5)


def test_routed_experts_are_refused(images, tmp_path):
    model = timm.create_model("vit_tiny_moe", exportable=True, **SMALL_VIT).eval()
    with pytest.raises(RuntimeError, match="Routed experts cannot be exported to ONNX"):
        torch.onnx.export(model, (images,), str(tmp_path / "moe.onnx"), dynamo=False)
