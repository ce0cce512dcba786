"""Export: every kind of source, stock timm as the judge, and nothing left behind when it fails."""

import json
import logging
import os
import resource
import signal

import numpy as np
import pytest
import timm
import torch
from common import OPTIONS, SMALL_VIT, SPEC
from families import SMALL
from processes import run_code
from safetensors.torch import load_file, save_file
from timm.layers import SwiGLU
from timm.models import save_for_hf
from torch import nn

import timm_moe
from timm_moe.checkpoints import building, checkpoint_file
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.export import export as export_module
from timm_moe.export import formats as formats_module
from timm_moe.export import verify as verify_module
from timm_moe.export.export import export_moe
from timm_moe.model_config import model_input_size, records_arguments
from timm_moe_cli import main

STOCK = """
import sys, numpy, timm, torch
model = timm.create_model("local-dir:" + sys.argv[1], pretrained=True).eval()
assert "timm_moe" not in sys.modules
assert type(model) is timm.models.vision_transformer.VisionTransformer
numpy.save(sys.argv[3], model(torch.from_numpy(numpy.load(sys.argv[2]))).detach().numpy())
"""


def stock_outputs(folder, images, tmp_path):
    """Outputs of the exported model in a process without the plugin."""
    np.save(tmp_path / "in.npy", images.numpy())
    arguments = [str(folder), str(tmp_path / "in.npy"), str(tmp_path / "out.npy")]
    done = run_code(STOCK, *arguments, autoload="0")
    assert done.returncode == 0, done.stderr
    return torch.from_numpy(np.load(tmp_path / "out.npy"))


def test_live_model(ewa_vit, images, tmp_path):
    ewa_vit.train().blocks[0].eval()
    export = timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert ewa_vit.training
    assert ewa_vit.blocks[1].mlp.training
    assert not ewa_vit.blocks[0].training
    assert sorted(path.name for path in export.path.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert export.architecture == "vit_tiny_patch16_224"
    assert export.largest_difference == 0
    assert export.parameters == sum(
        tensor.numel() for tensor in load_file(export.path / "model.safetensors").values()
    )
    assert torch.equal(stock_outputs(export.path, images, tmp_path), ewa_vit.eval()(images))
    assert sorted(os.listdir(tmp_path)) == ["in.npy", "out.npy", "vit"]
    assert (tmp_path / "vit").stat().st_mode & 0o777 == 0o777 & ~_umask()
    assert all(
        file.stat().st_mode & 0o777 == 0o666 & ~_umask() for file in (tmp_path / "vit").iterdir()
    )


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_train_py_checkpoint_with_its_preprocessing(checkpoint, ewa_vit, images, tmp_path):
    export = timm_moe.export_dense(checkpoint, tmp_path / "vit")
    assert torch.equal(stock_outputs(export.path, images, tmp_path), ewa_vit.eval()(images))
    config = json.loads((export.path / "config.json").read_text())
    assert config["architecture"] == "vit_tiny_patch16_224"
    assert config["num_classes"] == 5
    assert not set(config["model_args"]) & {"num_experts", "share_rate"}
    cfg = config["pretrained_cfg"]
    assert (cfg["mean"], cfg["crop_pct"], cfg["input_size"]) == ([0.1, 0.2, 0.3], 0.5, [3, 32, 32])
    assert not cfg.get("hf_hub_id")


def test_weights_in_another_order_in_memory(ewa_vit, tmp_path):
    ewa_vit.to(memory_format=torch.channels_last)
    head = ewa_vit.head
    head.weight = torch.nn.Parameter(head.weight.detach().T.contiguous().T)
    export = timm_moe.export_dense(ewa_vit, tmp_path / "dense")
    assert export.largest_difference < 1e-5
    weights = load_file(export.path / "model.safetensors")
    for name in ("patch_embed.proj.weight", "head.weight"):
        assert not ewa_vit.get_parameter(name).is_contiguous()
        assert torch.equal(weights[name], ewa_vit.get_parameter(name))


def test_ema_weights_on_request(checkpoint, ewa_vit, tmp_path):
    plain = timm_moe.export_dense(checkpoint, tmp_path / "plain")
    ema = timm_moe.export_dense(checkpoint, tmp_path / "ema", use_ema=True)
    plain, ema = (load_file(export.path / "model.safetensors") for export in (plain, ema))
    assert torch.equal(ema["patch_embed.proj.weight"], plain["patch_embed.proj.weight"] / 2)


def test_safetensors_file_and_local_dir(ewa_vit, images, tmp_path):
    save_file(ewa_vit.state_dict(), tmp_path / "moe.safetensors")
    save_for_hf(ewa_vit, str(tmp_path / "moe"), model_args=OPTIONS, safe_serialization=True)
    sources = {"file": (tmp_path / "moe.safetensors", SPEC), "folder": (tmp_path / "moe", None)}
    sources["name"] = f"local-dir:{tmp_path}/moe", None
    for name, (source, spec) in sources.items():
        export = timm_moe.export_dense(source, tmp_path / name, spec=spec)
        stock = timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()
        assert torch.equal(stock(images), ewa_vit.eval()(images))


def test_a_model_converted_in_memory(dense_vit, images, tmp_path):
    model = timm_moe.convert_to_moe(dense_vit)
    export = timm_moe.export_dense(model, tmp_path / "vit", model_args=OPTIONS)
    assert torch.equal(stock_outputs(export.path, images, tmp_path), dense_vit(images))


def test_wrapped_and_compiled_models(ewa_vit, tmp_path):
    compiled = torch.compile(ewa_vit, backend="eager")
    assert timm_moe.export_dense(compiled, tmp_path / "vit").largest_difference == 0
    for number, block in enumerate(ewa_vit.blocks):
        ewa_vit.blocks[number] = torch.compile(block, backend="eager")
    assert timm_moe.export_dense(ewa_vit, tmp_path / "parts").largest_difference == 0
    export_moe(ewa_vit, tmp_path / "moe", model_args=OPTIONS)
    names = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).state_dict().keys()
    assert timm_moe.to_dense(ewa_vit).state_dict().keys() == names
    assert "_orig_mod" in str(ewa_vit.state_dict().keys())  # the caller's is what it was


def test_low_precision_and_other_inputs(tmp_path):
    model = timm.create_model(
        "vit_tiny_ewa_moe", **{**SMALL_VIT, "in_chans": 1, "img_size": 40, "global_pool": "avg"}
    )
    timm_moe.export_dense(model.bfloat16(), tmp_path / "vit")
    config = json.loads((tmp_path / "vit/config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [1, 40, 40]
    assert load_file(tmp_path / "vit/model.safetensors")["head.weight"].dtype == torch.bfloat16


def test_a_model_changed_after_its_creation(ewa_vit, tmp_path):
    ewa_vit.reset_classifier(7)
    ewa_vit.set_input_size(48)
    stated = {}
    if not records_arguments():  # nor does timm then record a change
        with pytest.raises(ValueError, match=r"pos_embed .*model_args"):
            timm_moe.export_dense(ewa_vit, tmp_path / "vit")
        stated = {"img_size": 48}
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", model_args=stated)
    config = json.loads((tmp_path / "vit/config.json").read_text())
    assert (config["num_classes"], config["pretrained_cfg"]["input_size"]) == (7, [3, 48, 48])


CHANGES = {
    "window": (
        "swin_tiny_patch4_window7_224",
        dict(img_size=64, window_size=4),
        lambda model: model.set_input_size(128, window_size=8),
    ),
    "patch": ("vit_tiny_patch16_224", OPTIONS, lambda model: model.set_input_size(patch_size=4)),
    "norm": ("vit_tiny_patch16_224", OPTIONS, lambda model: model.reset_classifier(7, "avg")),
}


@pytest.mark.skipif(not records_arguments(), reason="this timm records no change")
@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_timm_notes_are_those_of_the_dense_model(tmp_path, name):
    """A model of a name of this package has noted its arguments when it was made."""
    architecture, options, change = CHANGES[name]
    small = {**SMALL.get(architecture, {}), **options}
    model = timm.create_model(f"{architecture}_ewa_moe", num_classes=5, **small)
    change(model)
    dense = timm_moe.to_dense(model.eval())
    save_for_hf(dense, str(tmp_path / "saved"), safe_serialization=True)
    timm_moe.export_dense(model, tmp_path / "exported")
    images = torch.randn(1, *model_input_size(model))
    for folder in ("saved", "exported"):
        loaded = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True).eval()
        torch.testing.assert_close(loaded(images), dense(images), rtol=0, atol=0)


def test_a_classifier_that_was_replaced_gets_its_remedy(ewa_vit, tmp_path):
    ewa_vit.head = torch.nn.Linear(32, 7)
    remedy = r"head has 7 outputs, but .*num_classes is 5: .*reset_classifier\(7\), or set .* = 7"
    with pytest.raises(ValueError, match=remedy):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    ewa_vit.num_classes = 7
    assert timm_moe.export_dense(ewa_vit, tmp_path / "vit").largest_difference == 0


#: A model that converts itself, so that no name creates its dense form.
CONVERTS_ITSELF = """
import timm, timm_moe
from timm.models import build_model_with_cfg, register_model
from timm.models.vision_transformer import VisionTransformer

class Converted(VisionTransformer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        timm_moe.convert_to_moe(self)

@register_model
def converted(pretrained=False, **kwargs):
    return build_model_with_cfg(Converted, "converted", pretrained, **kwargs)

size = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
try:
    timm_moe.export_dense(timm.create_model("converted", **size), "vit", model_args=size)
except ValueError as error:
    print(error)
"""


def test_a_model_that_converts_itself_gets_its_remedy(tmp_path):
    done = run_code(CONVERTS_ITSELF, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "experts in blocks.1.mlp.fc1.weight" in done.stdout
    assert "by note_dense_form, as CONTRIBUTING.md" in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_stem_that_was_replaced_gets_its_remedy(ewa_vit, tmp_path):
    ewa_vit.patch_embed.proj = torch.nn.Conv2d(4, 32, 8, 8)
    with pytest.raises(ValueError, match=r"4 channels as patch_embed\.proj .*in_chans = 4: Given"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    ewa_vit.in_chans = 4
    if records_arguments():  # Earlier versions of timm change weights of other channels.
        assert timm_moe.export_dense(ewa_vit, tmp_path / "vit").largest_difference == 0


def test_a_pruned_model_is_told_to_keep_its_weights(ewa_vit, tmp_path):
    qkv = ewa_vit.blocks[0].attn.qkv
    torch.nn.utils.prune.l1_unstructured(qkv, "weight", 0.5)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"blocks\.0\.attn\.qkv has a hook .*prune\.remove"):
            timm_moe.export_dense(ewa_vit, tmp_path / "vit")
        with torch.no_grad():  # Then its weights have no graph.
            ewa_vit(torch.randn(1, 3, 32, 32))
    torch.nn.utils.prune.remove(qkv, "weight")
    assert timm_moe.export_dense(ewa_vit, tmp_path / "vit").largest_difference == 0


def test_a_quantized_model_is_told_to_be_exported_before(dense_vit, tmp_path):
    dense_vit.register_module("packed", PackedWeights())
    with pytest.raises(ValueError, match=r"packed\._extra_state is a dtype .*quantization"):
        timm_moe.export_dense(dense_vit, tmp_path / "vit")


class PackedWeights(torch.nn.Module):
    """A module whose state is no tensor, as of a quantized layer."""

    def get_extra_state(self):
        return torch.qint8

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize("stated", [{}, {"mean": (0.5,) * 3, "input_size": (3, 32, 32)}])
def test_images_that_a_loop_of_ones_own_states_are_those_of_validate_py(tmp_path, caplog, stated):
    """timm has another size for tests of its own weights."""
    caplog.set_level(logging.INFO, "timm_moe")
    model = timm.create_model(
        "convnext_tiny", depths=(1,) * 4, dims=(8,) * 4, pretrained_cfg_overlay=stated
    )
    timm_moe.convert_to_moe(model, num_experts=2)
    timm_moe.export_dense(model, tmp_path / "vit")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'vit'}", pretrained=True)
    of_tests = timm.data.resolve_data_config({}, model=loaded, use_test_size=True)
    assert tuple(of_tests["input_size"]) == stated.get("input_size", (3, 288, 288))
    size = " ".join(map(str, stated.get("input_size", (3, 224, 224))))
    assert f"Images for this ConvNeXt: input_size {size}" in caplog.text
    timm_moe.export_dense(loaded, tmp_path / "again")  # Its config has lists in place of tuples.
    again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True)
    assert timm.data.resolve_data_config({}, model=again, use_test_size=True) == of_tests


def test_a_module_of_ones_own_is_written_as_its_weights(tmp_path):
    """tests/export/test_foreign_export.py has those of other libraries."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    exported = timm_moe.export_dense(model, tmp_path / "own", example_inputs=torch.randn(3, 4))
    assert (exported.library, exported.largest_difference) == ("pytorch", 0)
    assert torch.equal(load_file(exported.path / "model.safetensors")["0.bias"], model[0].bias)


def test_a_tag_that_timm_does_not_know_is_no_error(tmp_path):
    model = timm.create_model(
        "vit_tiny_ewa_moe", pretrained_cfg_overlay={"tag": "mine"}, **SMALL_VIT
    )
    assert timm_moe.export_dense(model, tmp_path / "vit").largest_difference == 0


def test_a_feature_extractor_is_refused_before_the_work(tmp_path, monkeypatch):
    model = timm.create_model("vit_tiny_ewa_moe", features_only=True, **SMALL_VIT)
    monkeypatch.setattr(export_module, "to_dense_", lambda *args: pytest.fail("It was gathered."))
    for write in (timm_moe.export_dense, export_moe):
        with pytest.raises(ValueError, match=r"FeatureGetterNet .*state_dict\(\), .*to_dense"):
            write(model, tmp_path / "vit")
    assert timm_moe.to_dense(model).state_dict()


def test_parameters_keep_their_types(ewa_vit, tmp_path):
    ewa_vit.bfloat16().head.float()
    folder = timm_moe.export_dense(ewa_vit, tmp_path / "vit").path
    for weights in (ewa_vit.state_dict(), load_file(folder / "model.safetensors")):
        assert weights["head.weight"].dtype == torch.float32
        assert weights["blocks.1.mlp.fc1.weight"].dtype == torch.bfloat16


def test_a_small_model_that_was_converted_in_memory_is_exported_as_timms_own(tmp_path):
    dense = timm.create_model("vit_xtiny", depth=2, shifted_patches=False)
    model = timm_moe.convert_to_moe(dense, num_experts=2)
    export = timm_moe.export_dense(model, tmp_path / "vit")
    assert export.architecture == "vit_tiny_patch16_224"


def test_no_generator_of_a_gpu_is_seeded(ewa_vit, tmp_path, monkeypatch):
    """A process that exports after each epoch would draw the same numbers in every epoch."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("It was seeded."))
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")


@pytest.mark.parametrize("export", [timm_moe.export_dense, export_moe])
def test_a_training_goes_on_with_its_random_numbers(ewa_vit, tmp_path, export):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    export(ewa_vit, tmp_path / "vit")
    assert torch.equal(torch.rand(3), expected)


def test_the_images_of_the_check_are_where_the_model_is(dense_vit):
    expected = verify_module.inputs_for(dense_vit, None)
    with torch.device("meta"):  # as if the default device were another one
        assert torch.equal(verify_module.inputs_for(dense_vit, None), expected)


def test_small_outputs_are_compared_in_their_own_size(ewa_vit, tmp_path, monkeypatch):
    torch.nn.init.trunc_normal_(ewa_vit.head.weight, std=1e-4)
    outputs = verify_module.outputs
    off = {True: 1.0, False: 1.0003}
    monkeypatch.setattr(
        verify_module,
        "outputs",
        lambda model, images: outputs(model, images) * off[bool(timm_moe.moe_layers(model))],
    )
    with pytest.raises(ValueError, match="outputs differ"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")


def test_dynamic_image_size_keeps_the_size_of_the_config(tmp_path):
    model = timm.create_model("vit_tiny_ewa_moe", dynamic_img_size=True, **SMALL_VIT)
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 64, 64)}
    timm_moe.export_dense(model, tmp_path / "vit")
    config = json.loads((tmp_path / "vit/config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [3, 64, 64]


def test_an_image_processor_of_before_does_not_stay_beside_the_model(ewa_vit, tmp_path):
    """transformers would take it in place of the preprocessing of the new model."""
    for name in ("preprocessor_config.json", "processor_config.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    timm_moe.export_dense(ewa_vit, tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "notes.txt",
    }


def test_a_full_folder_is_replaced_only_when_asked(ewa_vit, tmp_path):
    (tmp_path / "vit").mkdir()
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")  # an empty one is used
    (tmp_path / "vit/notes.txt").write_text("mine")
    before = (tmp_path / "vit/model.safetensors").read_bytes()
    ewa_vit.head.bias.data += 1
    with pytest.raises(FileExistsError, match=r"not empty.*--overwrite"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert (tmp_path / "vit/model.safetensors").read_bytes() == before
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", overwrite=True)
    assert (tmp_path / "vit/model.safetensors").read_bytes() != before
    assert (tmp_path / "vit/notes.txt").read_text() == "mine"


def test_a_folder_that_another_process_writes_meanwhile_is_kept(ewa_vit, tmp_path, monkeypatch):
    def compute(model, inputs):
        (tmp_path / "vit").mkdir()
        (tmp_path / "vit/config.json").write_text("another's")
        return source_outputs(model, inputs)

    source_outputs = export_module.source_outputs
    monkeypatch.setattr(export_module, "source_outputs", compute)
    with pytest.raises(FileExistsError, match="not empty"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert [file.read_text() for file in (tmp_path / "vit").iterdir()] == ["another's"]


@pytest.mark.parametrize("function", [timm_moe.export_dense, export_moe])
def test_no_export_writes_onto_what_it_reads(ewa_vit, tmp_path, function):
    """The experts would be gone."""
    folder = export_moe(ewa_vit, tmp_path / "moe", model_args=OPTIONS)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (tmp_path / "link").symlink_to(folder)
    for source in (folder, f"local-dir:{folder}", tmp_path / "link", folder / "model.safetensors"):
        with pytest.raises(ValueError, match="which is read"):
            function(
                source, folder, overwrite=True, spec=SPEC if "safetensors" in str(source) else None
            )
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_checkpoint_is_read_once(checkpoint, tmp_path, monkeypatch):
    """And its tensors are verified once, by an export and by a push."""
    read, verified = [], []

    def counted(module, name, calls):
        function = getattr(module, name)

        def call(*arguments):
            calls.append(arguments[0])
            return function(*arguments)

        monkeypatch.setattr(module, name, call)

    counted(checkpoint_file, "read_checkpoint", read)
    counted(building, "require_intact", verified)
    timm_moe.export_dense(checkpoint, tmp_path / "vit")
    timm_moe.push_dense(checkpoint, "user/vit", dry_run=True)
    export_moe(checkpoint, tmp_path / "moe")
    assert read == verified == [checkpoint] * 3


def test_a_new_model_never_stands_beside_another_ones_config(ewa_vit, tmp_path, monkeypatch):
    """Wherever an overwriting export is interrupted."""
    target, seen = tmp_path / "vit", []
    timm_moe.export_dense(ewa_vit, target)
    old = {file.name: file.read_bytes() for file in target.iterdir()}
    ewa_vit.head.bias.data += 1
    replace = os.replace

    def look_and_replace(source, destination):
        found = [file for file in target.iterdir() if not file.name.startswith(".")]
        seen.append({file.name: file.read_bytes() == old[file.name] for file in found})
        replace(source, destination)

    monkeypatch.setattr(os, "replace", look_and_replace)
    timm_moe.export_dense(ewa_vit, target, overwrite=True)
    assert seen == [{"model.safetensors": True}, {"model.safetensors": False}]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(ewa_vit, tmp_path, bad):
    ewa_vit.blocks[1].mlp.fc1.weight.data[2, 0, 0] = bad
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.fc1\.weight .*NaN"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert not (tmp_path / "vit").exists()


def test_a_buffer_may_be_a_mask(tmp_path):
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    timm_moe.export_dense(model, tmp_path / "masked")
    model.running_var[0] = torch.inf  # The outputs are finite all the same.
    with pytest.raises(ValueError, match="running_var holds NaN or Inf"):
        timm_moe.export_dense(model, tmp_path / "norm")


@pytest.mark.parametrize("write", [timm_moe.export_dense, export_module.export_moe])
def test_outputs_that_are_not_finite(ewa_vit, tmp_path, write):
    # A number, which the next addition exceeds.
    torch.nn.init.constant_(ewa_vit.blocks[0].mlp.fc2.bias, 3e38)
    torch.nn.init.constant_(ewa_vit.blocks[2].mlp.fc2.bias, 3e38)
    with pytest.raises(ValueError, match=r"outputs .*NaN"):
        write(ewa_vit, tmp_path / "vit")
    assert not (tmp_path / "vit").exists()


def test_no_nan_in_config_json(ewa_vit, tmp_path):
    with pytest.raises(ValueError, match=r"argument .*config\.json: .*JSON"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit", model_args={"init_values": float("nan")})
    assert not (tmp_path / "vit").exists()


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        ("user/name", "vit", FileNotFoundError, "user/name is neither .*hf-hub:"),
        (None, "hf-hub:user/name", ValueError, "hf-hub:user/name .*local folder"),
        (None, "file/name", NotADirectoryError, "file is a file, .*file/name"),
        (None, "file", FileExistsError, "file is a file"),
        ("folder", "vit", FileNotFoundError, "has no config.json"),
    ],
)
def test_names_that_do_not_fit(ewa_vit, tmp_path, monkeypatch, source, target, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(error, match=message):
        timm_moe.export_dense(source or ewa_vit, target)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_dense_model_is_written_as_it_is(dense_vit, images, tmp_path):
    export = timm_moe.export_dense(dense_vit, tmp_path / "vit")
    assert export.exact
    loaded = timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images), dense_vit(images), rtol=0, atol=0)
    with pytest.raises(ValueError, match="has no expert layers"):
        timm_moe.export_dense(dense_vit, tmp_path / "other", "svd")


def test_the_users_home_is_no_folder_of_that_name(ewa_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    timm_moe.export_dense(ewa_vit, "~/vit")
    timm_moe.export_dense("~/vit", "~/again")
    timm_moe.export_dense("local-dir:~/vit", "~/once more")
    with pytest.raises(ValueError, match="which is read"):
        timm_moe.export_dense("~/vit", "home/vit", overwrite=True)
    save_file(ewa_vit.state_dict(), "home/weights.safetensors")
    spec = ModelSpec("vit_tiny_ewa_moe", 5, OPTIONS)
    timm_moe.export_dense("~/weights.safetensors", "~/of weights", spec=spec)
    assert os.listdir(tmp_path) == ["home"]
    folders = {path.name for path in (tmp_path / "home").iterdir() if path.is_dir()}
    assert folders == {"vit", "again", "once more", "of weights"}


@pytest.mark.parametrize(
    ("function", "mistyped", "nearest"),
    [
        (timm_moe.export_dense, "labels", "label_names"),
        (timm_moe.export_dense, "methode", "method"),
        (export_moe, "overwritten", "overwrite"),
        (timm_moe.push_dense, "licence", "license"),
        (timm_moe.push_moe, "dryrun", "dry_run"),
    ],
)
@pytest.mark.first_case
def test_a_mistyped_option_gets_the_nearest(dense_vit, function, mistyped, nearest):
    with pytest.raises(TypeError) as error:
        function(dense_vit, "user/vit", **{mistyped: "x"})
    assert str(error.value) == (
        f"{function.__name__} got an unexpected keyword argument {mistyped!r}; did you mean "
        f"{nearest}?"
    )
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'zzz'\.$"):
        function(dense_vit, "user/vit", zzz=1)


def test_an_argument_that_is_a_class_is_told_of(tmp_path):
    """timm takes one in Python, but config.json has no place for it."""
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT, mlp_layer=SwiGLU)
    timm_moe.convert_to_moe(model, num_experts=2)
    # timm names the argument since 1.0.31, json the type.
    message = (
        r"save the state_dict\(\) of .* timm_moe\.to_dense\(model\), instead "
        r"\(.*('mlp_layer'|type type) is not"
    )
    with pytest.raises(ValueError, match=message):
        timm_moe.export_dense(model, tmp_path / "vit")
    assert not (tmp_path / "vit").exists()


def test_a_student_is_told_of_without_any_set_up_of_logging(tmp_path):
    """Python prints warnings of a logger that nobody set up, and nothing below them."""
    code = (
        "import timm, timm_moe\n"
        f"model = timm.create_model('vit_tiny_moe', **{SMALL_VIT})\n"
        "timm_moe.export_dense(model, 'vit')\n"
    )
    done = run_code(code, cwd=tmp_path)
    assert done.returncode == 0
    (told,) = [line for line in done.stderr.splitlines() if "method='average'" in line]
    assert "is not the one that was trained: validate it, or train it further" in told


def test_arguments_that_stock_timm_would_need_are_asked_for(ewa_vit, tmp_path):
    ewa_vit.stock_form = ewa_vit.stock_form._replace(args={"num_classes": 5})
    del ewa_vit._model_args
    with pytest.raises(ValueError, match=r"Stock timm cannot load .*model_args"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert os.listdir(tmp_path) == []


def test_outputs_that_differ_stop_the_export(ewa_vit, tmp_path):
    # Not in the weights.
    ewa_vit.head.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(ValueError, match=r"outputs differ .*by 1"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert os.listdir(tmp_path) == []


def test_weights_that_a_reader_changes_stop_the_export(ewa_vit, tmp_path, monkeypatch):
    """However little the outputs differ by it."""

    def created(*arguments, **options):
        model = create_model(*arguments, **options)
        model.head.bias.data += 1e-6
        return model

    create_model = timm.create_model
    monkeypatch.setattr(timm, "create_model", created)
    with pytest.raises(ValueError, match=r"Stock timm does not load head\.bias as it was saved"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda held: {**held, "bias": held["bias"] + 1e-6}, "does not load bias"),
        (lambda held: {"weight": held["weight"]}, "does not load bias"),
        (lambda held: {**held, "scale": held["bias"]}, "a tensor scale that it did not have"),
    ],
)
def test_a_state_dict_that_is_read_otherwise_stops_the_export(
    tmp_path, monkeypatch, changed, message
):
    monkeypatch.setattr(formats_module, "load_file", lambda file: changed(load_file(file)))
    with pytest.raises(ValueError, match=message):
        timm_moe.export_dense(nn.Linear(3, 2), tmp_path / "own", example_inputs=torch.ones(1, 3))
    assert os.listdir(tmp_path) == []


class Gives(nn.Module):
    """Gives the same outputs for all inputs."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return self.outputs


def test_all_outputs_are_compared():
    one, nan = torch.ones(1), torch.full((1,), torch.nan)
    assert verify_module.compare((one, one), Gives(one, one + 5e-5), one) > 0
    for wrong, message in (
        ((one, one + 2e-4), "differ from the source's"),
        ((one, nan), "differ from the source's by nan"),
        ((one, one.view(1, 1)), "of other shapes"),
        ((one,), "not as many"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_module.compare((one, one), Gives(*wrong), one)
    with pytest.raises(ValueError, match="hold NaN or Inf"):
        verify_module.source_outputs(Gives(one, nan), one)


def test_a_disk_that_fills_up_leaves_nothing(ewa_vit, tmp_path):
    """The process may write no file beyond 64 KiB, as if the disk ended there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(OSError, match="could not be written"):
            timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert os.listdir(tmp_path) == []


def test_the_command_exports_the_ema_weights(checkpoint, tmp_path):
    ema = torch.load(checkpoint, weights_only=False)["state_dict_ema"]
    assert main(["export", str(checkpoint), str(tmp_path / "vit"), "--use-ema"]) == 0
    weights = load_file(tmp_path / "vit" / "model.safetensors")
    torch.testing.assert_close(weights["head.weight"], ema["head.weight"])
