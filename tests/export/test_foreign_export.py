"""Export of models that timm did not make.

Their own library reads them, in a process without this package.
"""

import json
import logging
import os

import pytest
import timm
import torch
import torchvision
from common import SMALL_VIT
from hub_client import front_matter
from PIL import Image
from processes import run_code
from safetensors.torch import load_file
from torch import nn

import timm_moe
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.export import verify as verify_module
from timm_moe.export.export import export_dense, export_moe
from timm_moe.export.push import push_dense, push_moe

pytestmark = [pytest.mark.ci]

SIZE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8)
VIT = {**SIZE, "intermediate_size": 32, "id2label": {0: "apple", 1: "bear", 2: "bee"}}
DECODER = dict(
    decoder_num_attention_heads=2,
    decoder_hidden_size=16,
    decoder_num_hidden_layers=1,
    decoder_intermediate_size=32,
)
SWIN = dict(
    image_size=(32, 32), patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
)
#: Class, its config, and what that states.
MODELS = {
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {**SIZE, "mlp_ratio": 2}),
    "siglip": (
        "SiglipVisionModel",
        "SiglipVisionConfig",
        {**SIZE, "intermediate_size": 32, "num_channels": 1},
    ),
    "mae": ("ViTMAEForPreTraining", "ViTMAEConfig", {**VIT, **DECODER}),
    "swin": ("Swinv2ForImageClassification", "Swinv2Config", SWIN),
}
OPEN = """
import json, sys, torch, transformers
root, places = sys.argv[1], json.loads(sys.argv[2])
for name, class_name in places.items():
    kind = getattr(transformers, class_name)
    model, info = kind.from_pretrained(f"{root}/{name}", output_loading_info=True)
    assert not any(info.values()), info
    images = torch.load(f"{root}/{name}.images.pt")
    torch.manual_seed(0)
    torch.save([part.detach() for part in model.eval()(images).to_tuple()], f"{root}/{name}.pt")
assert "timm_moe" not in sys.modules
"""


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


def of_transformers(transformers, kind, **options):
    name, config, settings = MODELS[kind]
    return getattr(transformers, name)(getattr(transformers, config)(**{**settings, **options}))


def with_experts(model, **options):
    """Its experts differ, so that no one of them is their mean."""
    timm_moe.convert_to_moe(model, **options)
    for layer in timm_moe.moe_layers(model).values():
        for parameter in layer.parameters():
            parameter.data.normal_(0, 0.3)
    return model.eval()


def plain(**options):
    layers = [nn.Flatten(), nn.Linear(48, 8), nn.Linear(8, 2)]
    return nn.Sequential(*layers, **options)


class Tied(nn.Module):
    """One weight under two names, and one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x, *, scale):
        return {"x": (self.second(self.first(x)) * scale) @ self.turned.t(), "sign": x > 0}


# --- transformers


def test_from_pretrained_gives_the_model_back_without_this_package(transformers, tmp_path):
    expected = {}
    for kind in MODELS:
        model = with_experts(of_transformers(transformers, kind))
        config = model.config.to_dict()
        export = export_dense(model, tmp_path / kind)
        assert (export.exact, export.library, export.architecture) == (
            True,
            "transformers",
            type(model).__name__,
        )
        assert export.largest_difference < 1e-6
        assert export.parameters == timm_moe.to_dense(model).num_parameters()
        assert sorted(os.listdir(export.path)) == ["config.json", "model.safetensors"]
        assert model.config.to_dict() == config
        assert timm_moe.moe_layers(model)  # the caller's is as it was
        size = model.config.image_size
        images = torch.randn(
            2, model.config.num_channels, *((size, size) if isinstance(size, int) else size)
        )
        torch.save(images, tmp_path / f"{kind}.images.pt")
        torch.manual_seed(0)
        expected[kind] = model(images).to_tuple()
    classes = {kind: name for kind, (name, _, _) in MODELS.items()}
    done = run_code(OPEN, str(tmp_path), json.dumps(classes), autoload="0")
    assert done.returncode == 0, done.stderr
    for kind, tensors in expected.items():
        torch.testing.assert_close(
            torch.load(tmp_path / f"{kind}.pt"), list(tensors), rtol=1e-5, atol=1e-6
        )
    config = json.loads((tmp_path / "vit/config.json").read_text())
    assert config["architectures"] == ["ViTForImageClassification"]
    assert config["id2label"] == {"0": "apple", "1": "bear", "2": "bee"}
    assert config["timm_moe"]["experts"]["model"] == "ViTForImageClassification"
    modes = {file.stat().st_mode for file in (tmp_path / "vit").iterdir()}
    assert modes == {(tmp_path / "vit/config.json").stat().st_mode}


def test_a_pipeline_takes_the_folder_and_an_image_processor(transformers, tmp_path):
    model = with_experts(of_transformers(transformers, "vit"))
    export_dense(model, tmp_path / "vit")
    with pytest.raises(OSError, match="image processor"):
        transformers.AutoImageProcessor.from_pretrained(tmp_path / "vit")
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    picture = Image.new("RGB", (20, 20), "red")
    best = model.config.id2label[
        model(**processor(picture, return_tensors="pt")).logits.argmax().item()
    ]
    pipe = transformers.pipeline(
        "image-classification", model=str(tmp_path / "vit"), image_processor=processor
    )
    assert pipe(picture)[0]["label"] == best
    processor.save_pretrained(tmp_path / "vit")
    assert (
        transformers.pipeline("image-classification", model=str(tmp_path / "vit"))(picture)[0][
            "label"
        ]
        == best
    )


def test_options_of_a_model_of_transformers(transformers, tmp_path):
    model = with_experts(of_transformers(transformers, "vit"), router="top_k").bfloat16()
    export = export_dense(
        model, tmp_path / "vit", "svd", svd_ratio=0.5, label_names=["x", "y", "z"], license="mit"
    )
    assert not export.exact
    loaded = type(model).from_pretrained(tmp_path / "vit")
    assert loaded.config.id2label == {0: "x", 1: "y", 2: "z"}
    assert loaded.config.label2id == {"x": 0, "y": 1, "z": 2}
    assert model.config.id2label[0] == "apple"
    assert (
        load_file(tmp_path / "vit/model.safetensors")["classifier.weight"].dtype == torch.bfloat16
    )
    assert loaded.config.timm_moe["method"] == "svd"
    assert loaded.config.license == "mit"
    export_dense(loaded, tmp_path / "vit", overwrite=True)  # perhaps trained further
    assert json.loads((tmp_path / "vit/config.json").read_text())["timm_moe"].keys() == {"weights"}


def test_a_dense_model_of_transformers_is_written_as_it_is(transformers, tmp_path):
    model = of_transformers(transformers, "vit").train()
    assert export_dense(model, tmp_path / "vit").exact
    assert model.training
    model.save_pretrained(tmp_path / "own")
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("own", "vit")]
    assert saved[0] == saved[1]


def test_a_model_of_two_towers_takes_the_images_of_its_vision_config(transformers, tmp_path):
    vision = {**SIZE, "intermediate_size": 32, "num_channels": 1}
    config = transformers.CLIPConfig(vision_config=vision, num_labels=3)
    model = transformers.CLIPForImageClassification(config)
    assert export_dense(with_experts(model), tmp_path / "clip").largest_difference < 1e-6


def test_a_model_that_does_not_say_which_images_it_takes(transformers, tmp_path):
    config = transformers.ResNetConfig(hidden_sizes=[8], depths=[1], embedding_size=8)
    model = transformers.ResNetForImageClassification(config)
    with pytest.raises(ValueError, match=r"which images .*example_inputs"):
        export_dense(model, tmp_path / "resnet")
    with pytest.raises(ValueError, match=r"inputs of shape \(2, 5\); .*example_inputs"):
        export_dense(model, tmp_path / "resnet", example_inputs=torch.randn(2, 5))
    with pytest.raises(ValueError, match="example_inputs hold no tensor"):
        export_dense(model, tmp_path / "resnet", example_inputs={"pixel_values": None})
    assert os.listdir(tmp_path) == []
    images = {"pixel_values": torch.randn(1, 3, 16, 16, dtype=torch.float64)}
    assert export_dense(model, tmp_path / "resnet", example_inputs=images).largest_difference == 0


def test_what_is_not_given_back_stops_the_export(transformers, tmp_path):
    model = with_experts(of_transformers(transformers, "vit"))
    # Not in the weights.
    model.classifier.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(ValueError, match=r"outputs differ .*by 1"):
        export_dense(model, tmp_path / "vit")
    model = of_transformers(transformers, "vit").bfloat16()
    nn.init.normal_(model.classifier.float().weight)
    with pytest.raises(ValueError, match=r"classifier\.weight \(torch\.float32\).*float\(\)"):
        export_dense(model, tmp_path / "vit")
    model = of_transformers(transformers, "vit")
    model.extra = nn.Linear(2, 2)  # which from_pretrained knows nothing of
    with pytest.raises(ValueError, match=r"from_pretrained .*extra\.\w+"):
        export_dense(model, tmp_path / "vit")
    model = of_transformers(transformers, "vit")
    model.classifier.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"classifier\.weight .*NaN"):
        export_dense(model, tmp_path / "vit")
    assert os.listdir(tmp_path) == []


def test_adapters_have_to_be_merged(transformers, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        of_transformers(transformers, "vit"), peft.LoraConfig(target_modules=["q_proj"])
    )
    for adapted in (model, model.get_base_model()):
        with pytest.raises(ValueError, match=r"PEFT: .*merge_and_unload\(\)"):
            export_dense(adapted, tmp_path / "vit")
    assert export_dense(model.merge_and_unload(), tmp_path / "vit").largest_difference == 0


def test_a_wrapper_of_a_timm_model(transformers, tmp_path, images):
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    cfg = {"mean": (0.1, 0.2, 0.3), "crop_pct": 0.5}
    dense.pretrained_cfg = {**dense.pretrained_cfg, **cfg}
    names = ["a", "b", "c", "d", "e"]
    export_dense(dense, tmp_path / "dense", model_args=SMALL_VIT, label_names=names)
    wrapper = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "dense")
    with_experts(wrapper.timm_model)
    export = export_dense(wrapper, tmp_path / "vit")
    assert (export.library, export.architecture) == ("timm", "vit_tiny_patch16_224")
    loaded = timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images), wrapper(images).logits, rtol=1e-5, atol=1e-6)
    assert loaded.pretrained_cfg["label_names"] == names
    assert (loaded.pretrained_cfg["mean"], loaded.pretrained_cfg["crop_pct"]) == (
        [0.1, 0.2, 0.3],
        0.5,
    )
    again = transformers.AutoModelForImageClassification.from_pretrained(export.path).eval()
    torch.testing.assert_close(again(images).logits, wrapper(images).logits, rtol=1e-5, atol=1e-6)
    assert list(again.config.id2label.values()) == names
    wrapper.config.id2label = {number: names[number] for number in (0, 1, 4, 2, 3)}
    export_dense(wrapper, tmp_path / "sorted")
    config = json.loads((tmp_path / "sorted/config.json").read_text())
    assert config["label_names"] == names
    wrapper.config.id2label = {number: f"LABEL_{number}" for number in range(5)}
    export_dense(wrapper, tmp_path / "unnamed", spec=ModelSpec(preprocessing=dict(crop_pct=0.75)))
    config = json.loads((tmp_path / "unnamed/config.json").read_text())
    assert config["pretrained_cfg"]["crop_pct"] == 0.75
    assert not {"label_names", "problem_type"} & config.keys()


def test_a_wrapper_with_several_labels_for_an_image_keeps_its_sigmoids(transformers, tmp_path):
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    export_dense(dense, tmp_path / "dense", model_args=SMALL_VIT)
    wrapper = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "dense", problem_type="multi_label_classification"
    )
    wrapper.save_pretrained(tmp_path / "saved")
    for number, source in enumerate([wrapper, tmp_path / "saved"]):
        export_dense(source, tmp_path / f"vit {number}")
        classify = transformers.pipeline("image-classification", str(tmp_path / f"vit {number}"))
        image = Image.new("RGB", (32, 32), "red")
        logits = wrapper(classify.preprocess(image)["pixel_values"]).logits[0]
        scores = {result["label"]: result["score"] for result in classify(image)}
        expected = dict(zip(wrapper.config.label2id, logits.sigmoid().tolist(), strict=True))
        assert scores == pytest.approx(expected, rel=1e-4)


# --- any other module


def test_a_model_of_torchvision(tmp_path, caplog):
    model = with_experts(torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5))
    export = export_dense(model, tmp_path / "vit", license="mit")
    assert (export.exact, export.library) == (True, "pytorch")
    assert export.largest_difference < 1e-6
    stock = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5).eval()
    stock.load_state_dict(load_file(export.path / "model.safetensors"))
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(stock(images), model(images), rtol=1e-5, atol=1e-6)
    config = json.loads((export.path / "config.json").read_text())
    assert config["architecture"] == f"class {export.architecture}"
    assert export.architecture == "torchvision.models.vision_transformer.VisionTransformer"
    assert (config["library"], config["license"]) == ("torchvision", "mit")
    assert config["timm_moe"]["experts"]["layers"] == 1
    assert sorted(os.listdir(export.path)) == ["config.json", "model.safetensors"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    model.heads.register_forward_hook(lambda module, args, output: output + torch.randn(()))
    # The seed is set before each forward.
    assert export_dense(model, tmp_path / "again").largest_difference == 0


def test_neither_timm_nor_transformers_takes_a_state_dict_for_theirs(transformers, tmp_path):
    """timm takes what stands before a dot for its architecture.

    Older transformers guess by the folder's name.
    """
    lookalike = type("ResNet", (timm.models.ResNet,), {"__module__": "resnet18"})
    model = lookalike(timm.models.resnet.BasicBlock, (2, 2, 2, 2), num_classes=1000)
    export_dense(model, tmp_path / "vit", example_inputs=torch.randn(1, 3, 32, 32))
    with pytest.raises(RuntimeError, match=r"Unknown model \(class resnet18\.ResNet\)"):
        timm.create_model(f"local-dir:{tmp_path / 'vit'}", pretrained=True)
    with pytest.raises(ValueError, match="model type `state_dict`"):
        transformers.AutoModel.from_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match="cannot be created"):
        export_dense(tmp_path / "vit", tmp_path / "other")


def test_shared_weights_and_arguments_by_name(tmp_path):
    model = Tied()
    inputs = {"x": torch.randn(2, 4), "scale": 3.0}
    assert export_dense(model, tmp_path / "tied", example_inputs=inputs).largest_difference == 0
    loaded = Tied()
    loaded.load_state_dict(load_file(tmp_path / "tied/model.safetensors"))
    assert torch.equal(loaded(**inputs)["x"], model(**inputs)["x"])
    assert model.second.weight is model.first.weight


def test_outputs_are_not_compared_without_inputs(tmp_path, caplog):
    export = export_dense(plain(), tmp_path / "plain")
    assert export.largest_difference is None
    assert "pass example_inputs" in caplog.text
    assert (
        export_dense(
            plain(), tmp_path / "other", example_inputs=(torch.randn(1, 3, 4, 4),)
        ).largest_difference
        == 0
    )


def test_outputs_of_another_kind_stop_the_export(tmp_path):
    model = plain()
    sizes = iter([2, 3])
    model.register_forward_hook(lambda module, args, output: output[:, :1].expand(-1, next(sizes)))
    with pytest.raises(ValueError, match=r"outputs .*other shapes"):
        export_dense(model, tmp_path / "plain", example_inputs=torch.randn(2, 3, 4, 4))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        dict(model_args={}),
        dict(spec=ModelSpec(num_classes=3)),
        dict(use_ema=True),
        dict(label_names=["a", "b"]),
        dict(label_descriptions={"a": "b"}),
    ],
)
def test_options_without_meaning_are_refused(tmp_path, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name} .*Sequential"):
        export_dense(plain(), tmp_path / "plain", **options)
    assert os.listdir(tmp_path) == []


def test_a_folder_is_replaced_when_asked(transformers, tmp_path):
    export_dense(plain(), tmp_path / "model", example_inputs=torch.randn(1, 48))
    model = of_transformers(transformers, "vit")
    with pytest.raises(FileExistsError, match=r"not empty.*--overwrite"):
        export_dense(model, tmp_path / "model")
    export_dense(model, tmp_path / "model", overwrite=True)
    assert (
        type(model).from_pretrained(tmp_path / "model").num_parameters() == model.num_parameters()
    )


def test_experts_themselves_are_a_state_dict(transformers, tmp_path):
    for model in (with_experts(of_transformers(transformers, "vit")), plain()):
        refused = (
            "has no expert layers"
            if isinstance(model, nn.Sequential)
            else r"save its state_dict\(\), and load"
        )
        with pytest.raises(ValueError, match=refused):
            export_moe(model, tmp_path / "model")
        with pytest.raises(ValueError, match=refused):
            push_moe(model, "user/model", dry_run=True)
    assert os.listdir(tmp_path) == []


def test_transformers_is_not_imported():
    code = """
import sys, tempfile, torch, timm_moe
model, folder = torch.nn.Linear(2, 2), tempfile.mkdtemp() + "/model"
timm_moe.export_dense(model, folder, example_inputs=torch.ones(1, 2))
assert "transformers" not in sys.modules
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr


# --- on the Hub


def test_the_card_of_a_model_of_transformers(transformers):
    model = with_experts(of_transformers(transformers, "vit"))
    pushed = push_dense(
        model, "user/my-vit", dry_run=True, revision="v1", license="mit", metrics={"top1": 50}
    )
    assert set(pushed.files) == {"README.md", "config.json", "model.safetensors"}
    told = front_matter(pushed.card)
    assert (told["library_name"], told["license"]) == ("transformers", "mit")
    assert told["pipeline_tag"] == "image-classification"
    assert told["tags"] == ["image-classification", "timm_moe"]
    assert "for images of 16x16 pixels and 3 classes" in pushed.card
    assert "4 experts in one layer, of which one network was made (`average`)" in pushed.card
    assert (
        'ViTForImageClassification.from_pretrained("user/my-vit", revision="v1").eval()'
        in pushed.card
    )
    assert "Huang, Yongqi" in pushed.card
    assert "From `" not in pushed.card  # no name of a temporary folder
    own = type("MyViT", (type(model),), {"__module__": "my_models"})(model.config)
    assert "from my_models import MyViT" in push_dense(own, "user/my-vit", dry_run=True).card


def test_the_card_of_a_state_dict():
    model = torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5)
    pushed = push_dense(model, "user/my-vit", dry_run=True)
    told = front_matter(pushed.card)
    assert told["library_name"] == "pytorch"
    assert told["tags"] == ["torchvision", "timm_moe"]
    assert "pipeline_tag" not in told
    assert (
        "The state dict of a `torchvision.models.vision_transformer.VisionTransformer`."
        in pushed.card
    )
    assert 'file = hf_hub_download("user/my-vit", "model.safetensors")' in pushed.card
    assert "timm.create_model" not in pushed.card


def test_every_file_that_save_pretrained_writes_is_pushed_and_published(transformers, tmp_path):
    class Generating(transformers.ViTForImageClassification):
        generation_config = transformers.GenerationConfig()

        def can_generate(self):
            return True

    model = Generating(transformers.ViTConfig(**VIT))
    model.generation_config = transformers.GenerationConfig(max_length=7)
    (tmp_path / "model").mkdir()
    export_dense(model, tmp_path / "model", overwrite=True)
    assert json.loads((tmp_path / "model/generation_config.json").read_text())["max_length"] == 7
    assert "generation_config.json" in push_dense(model, "user/model", dry_run=True).files


def test_inputs_of_the_caller_go_first(transformers, tmp_path, monkeypatch):
    seen = []
    outputs = verify_module.outputs
    monkeypatch.setattr(
        verify_module,
        "outputs",
        lambda model, inputs: seen.append(inputs) or outputs(model, inputs),
    )
    images = torch.randn(1, 3, 16, 16)
    export_dense(of_transformers(transformers, "vit"), tmp_path / "vit", example_inputs=images)
    assert [torch.equal(inputs, images) for inputs in seen] == [True, True]


def test_an_adapter_of_before_does_not_stay_beside_the_model(transformers, tmp_path):
    model = with_experts(of_transformers(transformers, "vit"))
    (tmp_path / "out").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "notes.txt"):
        (tmp_path / "out" / name).write_text("{}")
    export_dense(model, tmp_path / "out", overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "notes.txt"]
