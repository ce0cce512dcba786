"""Hugging Face transformers opens what is written here.

timm opens what transformers saves of it.
"""

import json

import pytest
import timm
import torch
from common import SMALL_VIT
from PIL import Image
from processes import run_code
from sklearn.datasets import load_sample_image

import timm_moe
from timm_moe.export.export import export_moe
from timm_moe.model_config import change_pretrained_cfg

VIT = {**SMALL_VIT, "num_classes": 7}
SWIN = {"embed_dim": 24, "depths": (2, 2, 2), "num_heads": (1, 2, 3), "num_classes": 7}
PIT = {"base_dims": (8, 8, 8), "depth": (2, 2, 2), "heads": (2, 4, 8), "num_classes": 7}
XTINY = {"embed_dim": 24, "depth": 3, "num_heads": 2, "num_classes": 7}
SPT_LSA = {"shifted_patches": True, "locality_attention": True}

#: What is exported as a dense model that timm has without this package: name and options of the
#: expert model.
STOCK = {
    "vit": ("vit_tiny_ewa_moe", VIT),
    "naive": ("vit_tiny_moe", VIT),
    "another shape": ("vit_tiny_ewa_moe", {**VIT, "img_size": (40, 48), "global_pool": "avg"}),
    "grey": ("vit_tiny_ewa_moe", {**VIT, "in_chans": 1}),
    "xtiny": ("vit_xtiny_ewa_moe", XTINY),
    "pit": ("pit_xs_32_ewa_moe", PIT),
    "swin": ("swin_tiny_patch2_window4_32_ewa_moe", SWIN),
    "timm's swin": (
        "swin_tiny_patch4_window7_224_ewa_moe",
        {**SWIN, "img_size": 32, "window_size": 4},
    ),
    "vimoe": ("vimoe_s14", {**VIT, "img_size": 28, "patch_size": 14}),
    "pbe": ("vmoe_pbe_s32", {**VIT, "num_experts": 4}),
}
#: What needs this package: the dense models of its own, and all expert models.
OWN = {
    "own xtiny": ("vit_xtiny_ewa_moe", {**XTINY, **SPT_LSA}),
    "own pit": ("pit_xs_32_ewa_moe", {**PIT, **SPT_LSA}),
    "own swin": ("swin_tiny_patch2_window4_32_ewa_moe", {**SWIN, **SPT_LSA}),
    "ones": ("widenet_b", {**VIT, "mlp_ratio": 2}),
    "official ones": ("widenet_b", {**VIT, "mlp_ratio": 2, "official_compat": True}),
}
EXPERTS = {
    "experts": ("vit_tiny_ewa_moe", VIT),
    "routed": ("vit_tiny_moe", VIT),
    "routed xtiny": ("vit_xtiny_moe", XTINY),
    "routed vimoe": ("vimoe_s14_shared", {**VIT, "img_size": 28, "patch_size": 14}),
    "routed pbe": ("vmoe_pbe_s32", {**VIT, "num_experts": 4}),
    "widenet": ("widenet_b", {**VIT, "mlp_ratio": 2, "official_compat": True, "routing_groups": 2}),
    "experts of pit": ("pit_xs_32_ewa_moe", {**PIT, **SPT_LSA}),
    "experts of swin": ("swin_tiny_patch2_window4_32_ewa_moe", SWIN),
    "experts of timm's swin": (
        "swin_tiny_patch4_window7_224_ewa_moe",
        {**SWIN, "img_size": 32, "window_size": 4},
    ),
}
NAMES = ["apple", "bear", "bee", "bee", "camel", "cattle", "fish"]
NAMED = ("vit", "deit", "own pit", "routed")  # the classes of these have names
PLAIN = [*STOCK, "deit", "changed"]
PACKAGE = [*OWN, *EXPERTS]
FIRST = ("vit", "grey", "deit", "own pit", "experts", "routed vimoe")
KINDS = [
    pytest.param(kind, marks=[] if kind in FIRST else pytest.mark.ci) for kind in (*PLAIN, *PACKAGE)
]

OPEN = """
import json, sys, timm, torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

def classify(folder, picture):
    return pipeline("image-classification", model=folder)(picture, top_k=1)

picture = Image.open(sys.argv[2])
for folder in json.loads(sys.argv[3]):
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    channels, *size = model.config.pretrained_cfg["input_size"]
    torch.manual_seed(0)
    images = torch.randn(2, channels, *size)
    processor = AutoImageProcessor.from_pretrained(folder)
    grey = channels == 1
    result = {
        "logits": model(images).logits.detach(),
        "pixels": processor(picture.convert("L") if grey else picture)["pixel_values"],
        "names": [model.config.id2label[number] for number in range(model.config.num_labels)],
        "answer": None if grey else classify(folder, picture),
    }
    model.save_pretrained(folder + "/saved")
    loaded = timm.create_model(f"local-dir:{folder}/saved", pretrained=True).eval()
    result["again"] = loaded(images).detach()
    result["again names"] = loaded.pretrained_cfg["label_names"]
    torch.save(result, folder + "/result.pt")
assert ("timm_moe" in sys.modules) == (sys.argv[1] == "package")
"""


def _randomize(model):
    """So that no weight is what it would be from the start."""
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    return model


def _expert_model(kind):
    if kind == "deit":
        deit = timm.create_model("deit_tiny_distilled_patch16_224", **VIT)
        return timm_moe.convert_to_moe(deit)
    if kind == "changed":
        model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, fc_norm=False)
        model.reset_classifier(7, "avg")
        model.set_input_size(48)
        return model
    name, options = {**STOCK, **OWN, **EXPERTS}[kind]
    return timm.create_model(name, **options)


def _write(kind, folder):
    model = _randomize(_expert_model(kind)).eval()
    cfg = {
        "mean": (0.2, 0.4, 0.6),
        "std": (0.3, 0.2, 0.1),
        "crop_pct": 0.8,
        "interpolation": "bilinear",
    }
    if kind == "grey":
        cfg |= {"mean": (0.4,), "std": (0.2,)}
    change_pretrained_cfg(model, **cfg)
    names = NAMES if kind in NAMED else None
    if kind in EXPERTS:
        args = {name: value for name, value in EXPERTS[kind][1].items() if name != "num_classes"}
        export_moe(model, folder, model_args=args, label_names=names)
    else:
        timm_moe.export_dense(model, folder, label_names=names)


@pytest.fixture(scope="module")
def opened(request, tmp_path_factory):
    """Write a folder of each kind to be tested.

    transformers opens it in another process, with or without this package.
    """
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    wanted = {
        item.callspec.params["kind"]
        for item in request.session.items
        if "opened" in item.fixturenames
    }
    root = tmp_path_factory.mktemp("folders")
    Image.fromarray(load_sample_image("china.jpg")).resize((90, 70)).save(root / "picture.png")
    for environment, kinds in (("plain", PLAIN), ("package", PACKAGE)):
        folders = [root / kind for kind in kinds if kind in wanted]
        for folder in folders:
            _write(folder.name, folder)
        paths = [environment, root / "picture.png", json.dumps([str(folder) for folder in folders])]
        autoload = str(int(environment == "package"))
        done = run_code(OPEN, *paths, modules=("timm", "transformers.pipelines"), autoload=autoload)
        assert done.returncode == 0, done.stderr
        assert "newly initialized" not in done.stderr
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_opens_a_folder_and_timm_what_it_saves(opened, kind):
    result = torch.load(opened / kind / "result.pt")
    model = timm.create_model(f"local-dir:{opened / kind}", pretrained=True).eval()
    torch.manual_seed(0)
    expected = model(torch.randn(2, *model.pretrained_cfg["input_size"])).detach()
    assert expected.shape == (2, 7)
    assert expected.std() > 1e-3
    torch.testing.assert_close(result["logits"], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result["again"], expected, rtol=1e-5, atol=1e-6)
    config = timm.data.resolve_model_data_config(model)
    picture = Image.open(opened / "picture.png").convert("L" if kind == "grey" else "RGB")
    pixels = timm.data.create_transform(**config, is_training=False)(picture)[None]
    assert torch.equal(result["pixels"], pixels)
    names = NAMES if kind in NAMED else [f"LABEL_{number}" for number in range(7)]
    assert result["names"] == result["again names"] == names
    if kind != "grey":  # transformers' pipeline makes every image a coloured one
        (answer,) = result["answer"]
        assert answer["label"] == names[model(pixels).argmax()]
    configs = [
        json.loads((opened / kind / name).read_text())
        for name in ("config.json", "saved/config.json")
    ]
    assert configs[0]["timm_moe"] == configs[1]["timm_moe"]  # where it came from
    assert ("num_classes" in configs[0]) == ("num_classes" not in configs[0]["model_args"])
