"""From files to models.

Nothing is guessed in silence or changed to fit, and what the user states goes first.
"""

import json
import logging
import math

import pytest
import timm
import torch
from common import OPTIONS, SMALL_VIT, SMALL_VIT_KWARGS, SPEC, edit, save_as_train_py
from families import SMALL
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

import timm_moe
from timm_moe.checkpoints import model_folder
from timm_moe.checkpoints.description import architecture_arguments
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.checkpoints.source import load_source
from timm_moe.files import write_json
from timm_moe.model_config import preprocessing
from timm_moe.models.registered import registered_models
from timm_moe_cli import main

ARGUMENTS = [
    "--model",
    "vit_tiny_ewa_moe",
    "--num-classes",
    "5",
    "--model-kwargs",
    *SMALL_VIT_KWARGS,
]


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def same(model, other):
    weights, others = model.state_dict(), other.state_dict()
    return weights.keys() == others.keys() and all(
        torch.equal(weights[name], others[name]) for name in weights
    )


@pytest.fixture
def folder(ewa_vit, tmp_path):
    save_for_hf(ewa_vit, str(tmp_path / "vit"), model_args=OPTIONS, safe_serialization=True)
    return tmp_path / "vit"


# --- what a file may state


def test_what_files_of_each_family_state_is_allowed():
    for name, options in SMALL.items():
        assert {"num_classes", "in_chans", *options} <= architecture_arguments(f"{name}_ewa_moe"), (
            name
        )
    assert {
        "num_experts",
        "top_k",
        "embed_dim",
        "img_size",
        "official_compat",
    } <= architecture_arguments("widenet_b")
    assert {"shifted_patches", "base_dims"} <= architecture_arguments("pit_xs_32_ewa_moe")
    assert {"stem_width", "window_size"} <= architecture_arguments("maxvit_tiny_tf_224_ewa_moe")


@pytest.mark.parametrize("name", registered_models("*")[::97])
def test_nothing_that_leads_elsewhere_is_allowed(name):
    leads = {
        "pretrained",
        "pretrained_cfg",
        "pretrained_strict",
        "checkpoint_path",
        "cache_dir",
        "features_only",
        "file",
    }
    leads |= {
        "pretrained_cfg_overlay",
        "url",
        "state_dict",
        "block_fn",
        "feature_cls",
        "device",
        "pretrained_filter_fn",
    }
    assert not leads & architecture_arguments(name)


def test_what_the_user_states_goes_before_the_file(ewa_vit, tmp_path):
    """Also where the file states what it may not."""
    file = save_as_train_py(
        tmp_path / "a.pth", ewa_vit, model_kwargs={**OPTIONS, "cache_dir": "/x", "num_experts": 9}
    )
    with pytest.raises(ValueError, match=r"a\.pth .*argument cache_dir, .*--model-kwargs"):
        load_source(file)
    spec = ModelSpec(kwargs={"cache_dir": None, "num_experts": 4})
    assert same(load_source(file, spec), ewa_vit)


def test_a_student_is_exported_by_the_folder_that_the_user_names(ewa_vit, folder, tmp_path, capsys):
    """train.py notes down the folder it was given; a file must not lead there by itself."""
    save_as_train_py(tmp_path / "a.pth", ewa_vit, model=f"local-dir:{folder}", model_kwargs={})
    assert main(["export", str(tmp_path / "a.pth"), str(tmp_path / "out")]) == 1
    assert "--model local-dir:FOLDER" in capsys.readouterr().err
    assert (
        main(
            [
                "export",
                str(tmp_path / "a.pth"),
                str(tmp_path / "out"),
                "--model",
                f"local-dir:{folder}",
            ]
        )
        == 0
    )


# --- folders, as strictly as they were saved


def _weights(change):
    def edit_weights(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return edit_weights


def _config(change):
    return lambda folder: edit(folder, change)


UNFIT = {
    "classes": _config(lambda config: config.update(num_classes=6)),
    "classes of the arguments": _config(lambda config: config["model_args"].update(num_classes=6)),
    "classes in both": _config(
        lambda config: (config.update(num_classes=6), config["model_args"].update(num_classes=6))
    ),
    "image size": _config(lambda config: config["model_args"].update(img_size=64)),
    "a greater depth": _config(lambda config: config["model_args"].update(depth=5)),
    "a smaller depth": _config(lambda config: config["model_args"].update(depth=3)),
    "channels": _config(lambda config: config["model_args"].update(in_chans=1)),
    "experts": _config(lambda config: config["model_args"].update(num_experts=2)),
    "not strict": _config(
        lambda config: config["model_args"].update(pretrained_strict=False, num_classes=6)
    ),
    "a dense network": _weights(
        lambda weights: weights.update(
            {"blocks.1.mlp.fc1.weight": weights["blocks.1.mlp.fc1.weight"][0].clone()}
        )
    ),
    "a tensor too many": _weights(
        lambda weights: weights.update({"pre_logits.fc.weight": torch.zeros(1)})
    ),
    "a tensor too few": _weights(lambda weights: weights.pop("head.bias")),
    "mean": _config(lambda config: config["pretrained_cfg"].update(mean=[float("nan")] * 3)),
    "huge mean": _config(lambda config: config["pretrained_cfg"].update(mean=[0.5, 0.5])),
    "std": _config(lambda config: config["pretrained_cfg"].update(std=[0.5, 0, 0.5])),
    "crop": _config(lambda config: config["pretrained_cfg"].update(crop_pct=-5)),
    "crop mode": _config(lambda config: config["pretrained_cfg"].update(crop_mode="x")),
    "interpolation": _config(
        lambda config: config["pretrained_cfg"].update(interpolation=["bicubic"])
    ),
    "input size": _config(lambda config: config["pretrained_cfg"].update(input_size=[3, 0, 32])),
    "test size": _config(
        lambda config: config["pretrained_cfg"].update(test_input_size=[3, 10**9, 10**9])
    ),
    "labels": _config(lambda config: config.update(label_names=[1, 2])),
    "text": _config(lambda config: config["pretrained_cfg"].update(license={"x": 1})),
}


@pytest.mark.parametrize("unfit", UNFIT)
@pytest.mark.first_case
def test_a_folder_that_does_not_fit_is_refused(folder, unfit):
    UNFIT[unfit](folder)
    with pytest.raises(ValueError, match=r"^local-dir:.*vit cannot be created .*: \S"):
        load_source(folder)


@pytest.mark.parametrize(
    "command",
    [
        "export {} out",
        "export --moe {} out",
        "push {} user/vit --dry-run",
        "push --moe {} a/b --dry-run",
        "info {}",
    ],
)
def test_every_command_refuses_it(folder, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    UNFIT["classes"](folder)
    assert main(command.format(folder).split()) == 1
    assert "vit cannot be created" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_repository_is_loaded_as_a_folder(ewa_vit, folder, monkeypatch):
    """Asked for are the two files of one that the user named; older ones hold no safetensors."""
    asked = []

    def download(repo_id, file, revision):
        asked.append((repo_id, file, revision))
        if not (folder / file).is_file():
            raise EntryNotFoundError(file)
        return folder / file

    monkeypatch.setattr(model_folder, "hf_hub_download", download)
    torch.save(ewa_vit.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert same(load_source("hf-hub:user/vit@v1"), ewa_vit)
    assert asked == [
        ("user/vit", file, "v1")
        for file in ("config.json", "model.safetensors", "pytorch_model.bin")
    ]
    UNFIT["a greater depth"](folder)
    with pytest.raises(ValueError, match=r"^hf-hub:user/vit cannot be created"):
        load_source("hf-hub:user/vit")


def test_options_go_before_those_of_a_folder(folder):
    assert (
        timm_moe.moe_layers(load_source(folder, ModelSpec(kwargs={"share_rate": 0.1})))[
            "blocks.1.mlp"
        ].share_rate
        == 0.1
    )
    with pytest.raises(ValueError, match="of 5 classes, not 7"):
        load_source(folder, ModelSpec(num_classes=7))


def test_ema_weights_of_what_has_none_are_told(ewa_vit, folder, caplog):
    load_source(folder, use_ema=True)
    load_source(ewa_vit, use_ema=True)
    told = [message for message in warnings(caplog) if "EMA weights" in message]
    assert [message.partition(" has ")[0] for message in told] == [
        str(folder),
        f"This {type(ewa_vit).__name__}",
    ]


def test_the_older_layout_of_a_config(ewa_vit, folder):
    def flatten(config):
        cfg = {**config.pop("pretrained_cfg"), "num_classes": config["num_classes"]}
        config.update(cfg, labels=["a", "b", "c", "d", "e"], mean=[0.1, 0.2, 0.3])

    edit(folder, flatten)
    model = load_source(folder)
    assert same(model, ewa_vit)
    assert preprocessing(model)["mean"] == (0.1, 0.2, 0.3)
    assert model.pretrained_cfg["label_names"] == ["a", "b", "c", "d", "e"]


def test_no_nan_in_json(tmp_path):
    write_json(
        tmp_path / "a.json",
        {"metrics": {"normalized_disagreement": math.inf, "nll": [math.nan, 1.0]}},
    )
    written = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert written["metrics"] == {"normalized_disagreement": None, "nll": [None, 1.0]}


@pytest.mark.parametrize("stated", [dict(img_size=32), dict(input_size=[3, 32, 32])])
@pytest.mark.parametrize(
    "model", ["vit_tiny_patch16_224", "vit_tiny_ewa_moe", "swin_tiny_patch4_window7_224_ewa_moe"]
)
@pytest.mark.first_case
def test_a_model_that_train_py_created_for_its_image_size(tmp_path, model, stated):
    """Newer train.py gives a model of a fixed size --img-size by timm's own function.

    The weights of a Swin do not tell the size.
    """
    options = {name: value for name, value in OPTIONS.items() if name != "img_size"}
    if "swin" in model:
        options = dict(SMALL["swin_tiny_patch4_window7_224"])
        options.pop("img_size", None)
    if not hasattr(timm.models, "resolve_model_input_args"):
        pytest.skip(f"train.py of timm {timm.__version__} gives no model its image size")
    args = timm.models.resolve_model_input_args(model, stated, num_classes=5, **options)
    created = timm.create_model(**args)
    file = save_as_train_py(tmp_path / "a.pth", created, model, model_kwargs=options, **stated)
    loaded = load_source(file)
    assert same(loaded, created)
    assert loaded.pretrained_cfg["input_size"] == (3, 32, 32)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (dict(img_size=10**7), "size mismatch for pos_embed"),
        (dict(img_size={32: 0, 33: 0}), "img_size=.*only numbers"),
        (dict(img_size="w" * 1000), "vit_tiny_ewa_moe cannot be created"),
        (dict(input_size={0: 3}), "arguments in .*damaged"),
        (
            dict(img_size=96, in_chans=1),
            "img_size=96: size mismatch for pos_embed.*; with its own image size: size mismatch",
        ),
    ],
)
def test_an_image_size_that_a_file_makes_up(ewa_vit, tmp_path, stated, message):
    options = {name: value for name, value in OPTIONS.items() if name != "img_size"}
    file = save_as_train_py(tmp_path / "a.pth", ewa_vit, model_kwargs=options, **stated)
    with pytest.raises(ValueError, match=message):
        load_source(file)


def test_weights_of_another_number_of_classes_tell_which(ewa_vit, tmp_path):
    """A file of another trainer does not state it."""
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": ewa_vit.state_dict()}, file)
    with pytest.raises(ValueError, match="of 5 classes, not 1000: state --num-classes 5"):
        load_source(file, ModelSpec("vit_tiny_ewa_moe", kwargs=OPTIONS))
    load_source(file, ModelSpec("vit_tiny_ewa_moe", 5, OPTIONS))


def test_an_image_size_of_training_alone(ewa_vit, tmp_path):
    file = save_as_train_py(tmp_path / "a.pth", ewa_vit, "vit_tiny_ewa_moe", img_size=96)
    with pytest.raises(ValueError, match=r"trainer's arguments .*96x96"):
        load_source(file)


def test_weights_that_fit_two_image_sizes_are_not_guessed(tmp_path):
    """A Swin of 32 pixels has fewer windows to shift than one of 64; their weights are alike."""
    options = dict(strict_img_size=False)
    name = "swin_tiny_patch2_window4_32_ewa_moe"
    created = timm.create_model(name, num_classes=5, **options).eval()
    args = dict(model_kwargs=options, img_size=64)
    file = save_as_train_py(tmp_path / "a.pth", created, name, **args)
    images = torch.rand(2, 3, 64, 64)
    with pytest.raises(ValueError, match=r"two image sizes.* img_size=64 or img_size=32 "):
        load_source(file)
    loaded = load_source(file, ModelSpec(kwargs=dict(img_size=32))).eval()
    assert torch.equal(loaded(images), created(images))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224_ewa_moe", {"use_naflex": True, "pos_embed_grid_size": (4, 4)}),
        ("maxvit_pico_rw_256_ewa_moe", {"conv_pool_type": "max"}),
    ],
)
@pytest.mark.ci
def test_options_that_an_entrypoint_passes_on(tmp_path, name, options):
    created = timm.create_model(name, num_classes=5, **options).eval()
    file = save_as_train_py(tmp_path / "a.pth", created, name, model_kwargs=options)
    assert same(load_source(file), created)
    timm_moe.export_dense(file, tmp_path / "dense")
    images = torch.rand(1, *created.pretrained_cfg["input_size"])
    loaded = load_source(tmp_path / "dense").eval()
    with torch.inference_mode():
        assert torch.allclose(loaded(images), created(images), atol=1e-5)


def test_an_unknown_argument_of_a_file_is_told_with_its_value(ewa_vit, tmp_path):
    file = save_as_train_py(tmp_path / "a.pth", ewa_vit, model_kwargs=dict(colour="red"))
    with pytest.raises(ValueError, match=r"states colour='red' .* --model-kwargs colour=VALUE\."):
        load_source(file)


def test_a_folder_in_several_files_is_told(ewa_vit, tmp_path):
    folder = tmp_path / "parts"
    timm_moe.export_dense(ewa_vit, folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="several files"):
        load_source(folder)


# --- preprocessing


def test_preprocessing_is_told_with_its_origin(ewa_vit, tmp_path, capsys, caplog):
    file = save_as_train_py(
        tmp_path / "a.pth", ewa_vit, std=[0.2] * 3, crop_pct=0.8, mean=[0.3] * 3, img_size=32
    )
    caplog.set_level(logging.INFO, "timm_moe")
    options = ["--mean", "0.1", "0.2", "0.3", "--crop-pct", "0.7", "--interpolation", "bilinear"]
    assert main(["export", str(file), str(tmp_path / "out"), *options]) == 0
    (told,) = [text for text in caplog.messages if text.startswith("Images for")]
    assert "input_size 3 32 32, std 0.2 0.2 0.2 (its trainer's arguments)" in told
    assert "interpolation bilinear, mean 0.1 0.2 0.3, crop_pct 0.7 (stated)" in told
    assert "crop_mode center (as train.py evaluates)" in told
    assert not warnings(caplog)
    cfg = json.loads((tmp_path / "out/config.json").read_text())["pretrained_cfg"]
    assert (cfg["mean"], cfg["std"], cfg["crop_pct"]) == ([0.1, 0.2, 0.3], [0.2] * 3, 0.7)
    assert cfg["interpolation"] == "bilinear"


def test_weights_alone_make_preprocessing_a_guess(ewa_vit, tmp_path, caplog):
    save_file(ewa_vit.state_dict(), tmp_path / "a.safetensors")
    load_source(
        tmp_path / "a.safetensors", ModelSpec("vit_tiny_ewa_moe", 5, OPTIONS, dict(mean=(0.5,)))
    )
    (warning,) = warnings(caplog)
    assert "a.safetensors does not say" in warning
    assert warning.endswith(" --std, --crop-pct, --interpolation.")
    caplog.clear()
    stated = dict(mean=(0.5,), std=(0.5,), crop_pct=1.0, interpolation="bicubic")
    load_source(tmp_path / "a.safetensors", ModelSpec("vit_tiny_ewa_moe", 5, OPTIONS, stated))
    tagged = "vit_tiny_ewa_moe.augreg_in21k_ft_in1k"  # whose preprocessing was asked for by that
    assert (
        preprocessing(load_source(tmp_path / "a.safetensors", ModelSpec(tagged, 5, OPTIONS)))[
            "mean"
        ]
        == (0.5,) * 3
    )
    assert not warnings(caplog)


def test_a_config_that_says_nothing_of_images_makes_it_a_guess(folder, caplog):
    edit(folder, lambda config: [config["pretrained_cfg"].pop(name) for name in ("mean", "std")])
    load_source(folder)
    (warning,) = warnings(caplog)
    assert "vit_tiny_ewa_moe" in warning
    assert warning.endswith(" --mean, --std.")


def test_what_is_stated_holds_for_validate_py_too(ewa_vit):
    """It prefers entries for tests, which were those of other weights."""
    ewa_vit.pretrained_cfg = {
        **ewa_vit.pretrained_cfg,
        "test_crop_pct": 1.0,
        "test_input_size": (3, 48, 48),
    }
    model = load_source(ewa_vit, ModelSpec(preprocessing=dict(crop_pct=0.7, img_size=32)))
    config = timm.data.resolve_data_config({}, model=model, use_test_size=True)
    assert (config["crop_pct"], config["input_size"]) == (0.7, (3, 32, 32))
    assert ewa_vit.pretrained_cfg["test_crop_pct"] == 1.0  # the caller's is what it was
    assert model.head.weight is ewa_vit.head.weight


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--mean", "nan"], "mean must be finite numbers"),
        (["--std", "0", "1", "1"], "std must be finite numbers above 0"),
        (["--mean", "0.1", "0.2"], "mean must hold a number for each channel, 3, got (0.1, 0.2)"),
        (["--crop-pct", "-5"], "crop_pct must be a number from 0.05 to 2, got -5.0"),
        (["--crop-mode", "round"], "crop_mode must be one of center, squash, border, got 'round'"),
        (["--interpolation", "cubic"], "interpolation must be one of nearest, bilinear"),
        (["--img-size", "0"], "img_size must be an integer from 1 to 8192"),
        (["--img-size", "64"], "is built for images of 32x32 pixels and takes none of 64x64"),
    ],
)
def test_preprocessing_that_cannot_be(ewa_vit, tmp_path, capsys, option, message):
    save_as_train_py(tmp_path / "a.pth", ewa_vit)
    assert main(["export", str(tmp_path / "a.pth"), str(tmp_path / "out"), *option]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- files of others


def test_a_dense_file_under_a_routed_name_is_told(dense_vit, tmp_path, caplog):
    torch.save(dense_vit.state_dict(), tmp_path / "a.pth")
    torch.save({"state_dict": dense_vit.state_dict()}, tmp_path / "b.pth")
    stated = dict(mean=(0.5,), std=(0.5,), crop_pct=1.0, interpolation="bicubic")
    for file in ("a.pth", "b.pth"):
        caplog.clear()
        load_source(tmp_path / file, ModelSpec("vit_tiny_moe", 5, OPTIONS, stated))
        (warning,) = warnings(caplog)
        assert "are a dense model's" in warning
    caplog.clear()
    load_source(tmp_path / "a.pth", ModelSpec("vit_tiny_ewa_moe", 5, OPTIONS, stated))
    trained = timm.create_model("vit_tiny_moe", **SMALL_VIT)
    torch.save(trained.state_dict(), tmp_path / "c.pth")
    load_source(tmp_path / "c.pth", ModelSpec("vit_tiny_moe", 5, {**OPTIONS, "top_k": 1}, stated))
    assert not warnings(caplog)
    caplog.set_level(logging.INFO, "timm_moe")
    # What timm's scripts do.
    for model in (trained, timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)):
        caplog.clear()
        model.load_state_dict(dense_vit.state_dict())
        told = [text for text in caplog.messages if "routers are untrained" in text]
        assert len(told) == (model is trained)


@pytest.mark.parametrize(
    "files", [["last.pth.tar", "args.yaml"], ["model.safetensors"], ["README.md"]]
)
def test_folders_without_a_config(tmp_path, files):
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no config.json"):
        load_source(tmp_path)


@pytest.mark.parametrize(
    "prefix", ["model.", "net.", "timm_model.", "model._orig_mod.", "model.module."]
)
def test_weights_that_are_part_of_another_module(ewa_vit, tmp_path, caplog, prefix):
    """Lightning's LightningModule keeps them beside a criterion.

    Trainer keeps those of a wrapped model so.
    """
    weights = {f"{prefix}{name}": tensor for name, tensor in ewa_vit.state_dict().items()}
    checkpoint = {
        "state_dict": {**weights, "criterion.weight": torch.ones(5)},
        "pytorch-lightning_version": "2.5",
    }
    torch.save(checkpoint, tmp_path / "a.ckpt")
    caplog.set_level(logging.INFO, "timm_moe")
    assert same(load_source(tmp_path / "a.ckpt", SPEC), ewa_vit)
    assert f"under {prefix.partition('.')[0]}; not taken: criterion.weight." in caplog.text
    if prefix == "model.":
        both = {
            **weights,
            **{name.replace("model.", "net.", 1): tensor for name, tensor in weights.items()},
        }
        torch.save({"state_dict": both}, tmp_path / "b.ckpt")
        with pytest.raises(ValueError, match=r"b\.ckpt .*several models, .*model\. and net\."):
            load_source(tmp_path / "b.ckpt", SPEC)


def test_a_folder_of_transformers(dense_vit, tmp_path):
    """Its config.json is timm's; its weights have another prefix."""
    save_for_hf(dense_vit, str(tmp_path / "vit"), model_args=OPTIONS, safe_serialization=True)
    weights = {f"timm_model.{name}": tensor for name, tensor in dense_vit.state_dict().items()}
    save_file(weights, tmp_path / "vit/model.safetensors")
    edit(
        tmp_path / "vit",
        lambda config: config.update(model_type="timm_wrapper", architectures=["TimmWrapper"]),
    )
    assert same(load_source(tmp_path / "vit"), dense_vit)
    save_file({**weights, "criterion.weight": torch.ones(5)}, tmp_path / "vit/model.safetensors")
    with pytest.raises(ValueError, match=r"holds criterion\.weight too"):
        load_source(tmp_path / "vit")


@pytest.mark.parametrize(
    "command",
    [
        "export a.pth out --model {}",
        "export --moe a.pth out --model {}",
        "push a.pth user/vit --dry-run --model {}",
        "info {}",
        "info ./a.pth --model {}",
    ],
)
@pytest.mark.parametrize("name", ["vit_tiny_ewa_mo", "vit_tinyewa_moe.augreg_in21k"])
@pytest.mark.first_case
def test_a_mistyped_name_gets_the_nearest(ewa_vit, tmp_path, monkeypatch, capsys, command, name):
    monkeypatch.chdir(tmp_path)
    torch.save(ewa_vit.state_dict(), "a.pth")
    assert main(command.format(name).split()) == 1
    assert f"({name}); did you mean vit_tiny_ewa_moe?" in capsys.readouterr().err


def test_what_is_said_of_a_trainings_images(ewa_vit, tmp_path, caplog):
    load_source(save_as_train_py(tmp_path / "last.pth.tar", ewa_vit, naflex_loader=True))
    assert "--naflex-loader" in caplog.text
    load_source(save_as_train_py(tmp_path / "last.pth.tar", ewa_vit, input_key=".jpg"))
    assert "--input-key" in caplog.text
    file = save_as_train_py(tmp_path / "last.pth.tar", ewa_vit, class_map="names.txt")
    caplog.clear()
    timm_moe.export_dense(file, tmp_path / "without")
    assert "class map" not in caplog.text
    timm_moe.export_dense(file, tmp_path / "with", label_names=list("abcde"))
    assert "class map 'names.txt'" in caplog.text
    file = save_as_train_py(
        tmp_path / "last.pth.tar", ewa_vit, class_map="names.txt", dataset="torch/image_folder"
    )
    caplog.clear()
    timm_moe.export_dense(file, tmp_path / "torch", label_names=list("abcde"))
    assert "class map" not in caplog.text  # timm ignores it there
    assert "timm's reader 'torch'" in caplog.text
    stated = dict(dataset="wds/shards", input_key="jpg", input_img_mode="L")
    file = save_as_train_py(tmp_path / "last.pth.tar", ewa_vit, **stated)
    caplog.clear()
    timm_moe.export_dense(file, tmp_path / "wds", label_names=list("abcde"))
    assert "timm's reader 'wds'" in caplog.text
    assert "--input-" not in caplog.text  # the key is of no folder, the mode that of one channel


def test_the_epsilon_of_batch_norms_is_that_of_the_training(tmp_path):
    trained = timm.create_model("test_efficientnet", num_classes=5, bn_eps=0.1)
    loaded = load_source(
        save_as_train_py(
            tmp_path / "last.pth.tar", trained, "test_efficientnet", model_kwargs={}, bn_eps=0.1
        )
    )
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(loaded.eval()(images), trained.eval()(images))


def test_info_of_a_checkpoint_and_of_a_folder(ewa_vit, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["info", "vit_tiny_ewa_moe", "--num-classes", "5", "--model-kwargs", *SMALL_VIT_KWARGS])
    of_the_name = capsys.readouterr().out.splitlines()
    assert any("4 in each of 2 layers" in line for line in of_the_name)
    twin = "  dense twin             vit_tiny_patch16_224"
    assert twin in of_the_name
    expected = [line for line in of_the_name if line != twin]  # that of a name
    torch.save(ewa_vit.state_dict(), "weights.pth")
    save_as_train_py("last.pth.tar", ewa_vit)
    for arguments in (
        ["./last.pth.tar"],
        ["vit"],
        [f"local-dir:{folder}"],
        ["weights.pth", *ARGUMENTS],
    ):
        assert main(["info", *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        norms = [
            line for line in lines if line.startswith("  LayerNorm divergence   norm1.weight 0, ")
        ]
        assert [line for line in lines if line not in norms] == expected
        assert len(norms) == 1  # of a name there are no weights to compare
    timm_moe.export_dense(ewa_vit, tmp_path / "dense")
    assert main(["info", "dense"]) == 0
    assert "experts                none" in capsys.readouterr().out
    assert main(["info", "./gone.pth.tar"]) == 1
    assert "gone.pth.tar is neither" in capsys.readouterr().err


@pytest.mark.parametrize("use_ema", [False, True])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_checkpoint_that_holds_ema_weights_too_says_so(
    ewa_vit, tmp_path, caplog, use_ema, on_cpu
):
    """The best accuracies in train.py's log are theirs, but for --model-ema-force-cpu."""
    file = save_as_train_py(tmp_path / "last.pth.tar", ewa_vit)
    checkpoint = torch.load(file, weights_only=False)
    vars(checkpoint["args"]).update(model_ema=True, model_ema_force_cpu=on_cpu)
    torch.save({**checkpoint, "state_dict_ema": checkpoint["state_dict"]}, file)
    caplog.set_level(logging.INFO, "timm_moe")
    load_source(file, use_ema=use_ema)
    assert ("holds EMA weights too" in caplog.text) == (not use_ema)
    said = "too, of which train.py's accuracies are: --use-ema" in caplog.text
    assert said == (not use_ema and not on_cpu)


def test_a_stated_preprocessing_is_that_of_timms_tests_too():
    """timm's config of ConvNeXt has another crop and size for tests of its own weights."""
    model = timm.create_model("convnext_atto.d2_in1k")
    assert model.pretrained_cfg["test_input_size"] == (3, 288, 288)
    stated = ModelSpec(preprocessing={"mean": (0.1, 0.1, 0.1), "std": (0.3, 0.3, 0.3)})
    cfg = load_source(model, stated).pretrained_cfg
    assert not [name for name in cfg if name.startswith("test_") and cfg[name] is not None]
    model.pretrained_cfg = {**model.pretrained_cfg, "test_crop_pct": 0.5}  # is not timm's
    cfg = load_source(model, ModelSpec(preprocessing={"interpolation": "nearest"})).pretrained_cfg
    assert (cfg["test_crop_pct"], cfg.get("test_input_size")) == (0.5, None)
    assert cfg["pool_size"] == (7, 7)
    cfg = load_source(model, ModelSpec(preprocessing={"img_size": 128})).pretrained_cfg
    assert cfg.get("pool_size") is None  # It was that of 224 pixels.


def test_images_of_another_number_of_channels_than_the_configs():
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, in_chans=2)
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.1, 0.2, 0.6)}
    assert preprocessing(model)["mean"] == pytest.approx((0.3, 0.3))  # as timm's loader has it
    stated = ModelSpec(preprocessing={"img_size": 32, "mean": (0.1, 0.2), "std": (0.4,)})
    cfg = load_source(model, stated).pretrained_cfg
    assert (cfg["input_size"], cfg["mean"], cfg["std"]) == ((2, 32, 32), (0.1, 0.2), (0.4, 0.4))


def test_info_takes_ema_weights(ewa_vit, tmp_path, capsys):
    """The error of a file that holds nothing else names the option."""
    torch.save({"state_dict_ema": ewa_vit.state_dict()}, tmp_path / "ema.pth")
    arguments = ["info", str(tmp_path / "ema.pth"), *ARGUMENTS]
    assert main(arguments) == 1
    assert "--use-ema" in capsys.readouterr().err
    assert main([*arguments, "--use-ema"]) == 0
    assert "4 in each of 2 layers" in capsys.readouterr().out
    assert main(["info", "vit_tiny_ewa_moe", "--use-ema"]) == 1
    assert "--use-ema is for train.py's checkpoints" in capsys.readouterr().err


def test_of_two_files_of_weights_the_one_of_the_hub_is_taken(ewa_vit, folder):
    others = {name: tensor + 1 for name, tensor in ewa_vit.state_dict().items()}
    torch.save(others, folder / "pytorch_model.bin")
    assert same(load_source(folder), ewa_vit)


def test_the_pooling_is_that_of_the_training(tmp_path):
    """No weight tells of it."""
    name = "test_efficientnet"
    trained = timm.create_model(name, num_classes=5, global_pool="max").eval()
    file = save_as_train_py(tmp_path / "last.pth.tar", trained, name, model_kwargs={}, gp="max")
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(load_source(file).eval()(images), trained(images))


def test_what_train_py_was_not_told_is_that_of_the_models_folder(tmp_path):
    options = dict(num_classes=5, global_pool="max", bn_eps=0.1)
    trained = timm.create_model("test_efficientnet", **options).eval()
    folder = timm_moe.export_dense(trained, tmp_path / "folder").path
    name = f"local-dir:{folder}"
    file = save_as_train_py(tmp_path / "last.pth.tar", trained, name, model_kwargs={})
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(load_source(file, ModelSpec(name)).eval()(images), trained(images))


def test_integers_of_averaged_checkpoints_are_read(tmp_path):
    """timm's avg_checkpoints.py writes all tensors as float32."""
    model = timm.create_model("test_efficientnet", num_classes=5)
    weights = {name: tensor.float() for name, tensor in model.state_dict().items()}
    file = tmp_path / "averaged.safetensors"
    save_file(weights, file)
    assert same(load_source(file, ModelSpec("test_efficientnet", 5)), model)


def test_weights_of_another_kind_of_numbers_are_refused(ewa_vit, tmp_path):
    weights = {**ewa_vit.state_dict(), "head.bias": torch.zeros(5, dtype=torch.long)}
    torch.save(weights, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"head\.bias as torch\.int64, .*torch\.float32"):
        load_source(tmp_path / "a.pth", SPEC)


def test_another_name_than_a_folders_is_told_of(folder, caplog):
    load_source(folder, ModelSpec("vit_tiny_ewa_moe.augreg_in21k"))
    assert warnings(caplog) == []
    load_source(folder, ModelSpec("vit_tiny_patch16_224"))
    (told,) = warnings(caplog)
    assert "its model is vit_tiny_ewa_moe, which is taken" in told
    assert told.endswith("; --model vit_tiny_patch16_224 is for files.")


def test_the_licence_of_a_repository_goes_along(folder, tmp_path, monkeypatch):
    def download(repo_id, file, revision):
        return folder / file

    monkeypatch.setattr(model_folder, "hf_hub_download", download)
    edit(folder, lambda config: config["pretrained_cfg"].update(license="cc-by-nc-4.0"))
    export = timm_moe.export_dense("hf-hub:user/vit", tmp_path / "out")
    config = json.loads((export.path / "config.json").read_text())
    assert config["pretrained_cfg"]["license"] == "cc-by-nc-4.0"
