"""ONNX files that timm's onnx_export.py makes of exported models.

In onnxruntime it gives the expert models' outputs.
"""

import math

import pytest
import timm
import torch
from common import SMALL_VIT
from timm.utils.onnx import onnx_export, onnx_forward

import timm_moe

onnx = pytest.importorskip("onnx", reason="pip install timm_moe[onnx]")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install timm_moe[onnx]")

SL = dict(shifted_patches=True, locality_attention=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_ewa_moe", SMALL_VIT),
        ("vit_xtiny_ewa_moe", dict(embed_dim=32, depth=2, num_heads=2, **SL)),
        ("pit_xs_32_ewa_moe", dict(base_dims=[8, 8, 8], depth=[1, 2, 1], **SL)),
        ("swin_tiny_patch2_window4_32_ewa_moe", dict(embed_dim=12, depths=[1, 2, 1], **SL)),
    ],
)
@pytest.mark.first_case
def test_an_exported_model_in_onnxruntime(name, options, images, tmp_path):
    model = timm.create_model(name, **options).eval()
    timm_moe.export_dense(model, tmp_path / "dense")
    dense = timm.create_model(f"local-dir:{tmp_path}/dense", pretrained=True, exportable=True)
    size = (3, 32, 32)  # the list in a config.json would do for timm 1.0.31
    onnx_export(
        dense, str(tmp_path / "dense.onnx"), check_forward=True, batch_size=2, input_size=size
    )
    with torch.no_grad():
        for batch in (images, images[:1]):
            actual = torch.from_numpy(onnx_forward(str(tmp_path / "dense.onnx"), batch))
            torch.testing.assert_close(actual, model(batch), rtol=1e-4, atol=1e-5)


ROUTED = [
    ("vit_tiny_moe", dict(top_k=2, eval_capacity_factor=1.1, batch_priority=True)),
    ("vit_tiny_moe", dict(top_k=2, eval_capacity_factor=0.6, group_images=1)),
    ("vmoe_b16", dict(top_k=2, gate_mode="renorm", group_images=3)),
    ("vimoe_s14_shared", {}),
    ("vit_tiny_moe", dict(top_k=2, expert_width=0.5, shared_expert=True)),
    ("vimoe_s14", dict(top_k=2, eval_capacity_factor=1.0)),
    ("widenet_b", dict(eval_capacity_factor=0.8, capacity_rounding="floor")),
    ("vit_tiny_ewa_moe", dict(router="expert_choice", capacity_factor=1.5)),
    ("soft_moe_s16", dict(num_experts=3, moe_layers="every-2", slots_per_expert=2)),
    ("vmoe_pbe_s32", {}),
    ("vmoe_pbe_s32", dict(ensemble="partitioning")),
    ("vmoe_pbe_s32", dict(ensemble="multi_head", top_k=2)),
    ("vit_tiny_ewa_moe", {}),
    ("t2t_i2_32_ewa_moe", {}),
    ("t2t_i2_32_ewa_moe", dict(router="top_k", **SL)),
]


CASES = [(*case, exporter) for case in ROUTED for exporter in ("timm's", "dynamo")]
#: Groups that drop choices have a size, which torch.export asks of every batch.
GROUPED = ("vit_tiny_moe", dict(top_k=2, eval_capacity_factor=0.6, group_images=2), "timm's")


@pytest.mark.parametrize(("name", "options", "exporter"), [*CASES, GROUPED])
@pytest.mark.first_case
def test_experts_in_onnxruntime(name, options, exporter, tmp_path):
    model = timm.create_model(
        name, exportable=True, **{**SMALL_VIT, "num_experts": 4, **options}
    ).eval()
    for layer in timm_moe.moe_layers(model).values():
        for parameter in layer.parameters():  # upcycled experts would be equal
            torch.nn.init.normal_(parameter, std=0.2)
    file = str(tmp_path / "experts.onnx")
    if exporter == "dynamo":
        shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
        torch.onnx.export(
            model,
            (torch.randn(4, 3, 32, 32),),
            file,
            dynamo=True,
            dynamic_shapes=shapes,
            verbose=False,
        )
    else:
        onnx_export(model, file, batch_size=4, dynamic_size=False, input_size=(3, 32, 32))
    written = {tensor.name: tuple(tensor.dims) for tensor in onnx.load(file).graph.initializer}
    weights = sum(math.prod(shape) for shape in written.values())
    foldable = sum(  # an exporter may store the mean that EWA computes instead of the experts
        stacked.numel() - stacked[0].numel()
        for layer in timm_moe.moe_layers(model).values()
        for _, stacked in layer.named_expert_parameters()
        if layer.deploys_dense
    )
    assert weights >= 0.95 * (sum(parameter.numel() for parameter in model.parameters()) - foldable)
    session = onnxruntime.InferenceSession(file)
    with torch.no_grad():
        for batch in (4, 2, 7):  # the routing of each is its own
            images = 3 * torch.randn(batch, 3, 32, 32)
            (got,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
            torch.testing.assert_close(torch.from_numpy(got), model(images), rtol=1e-4, atol=1e-5)
