"""Promise: every command takes a checkpoint that train.py wrote of any model of this package."""

from argparse import Namespace

import pytest
import torch
from common import FAMILIES, OPTIONS, families, without_draws, write_images

from timm_moe_cli import main

COMMANDS = (
    "info {file}",
    "evaluate {file} --data-dir {images} --split test --device cpu --workers 0",
    "export {file} {out}/dense",
    "export --moe {file} {out}/moe",
    "push {file} user/name --dry-run",
)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    classes = [f"class{number}" for number in range(5)]
    return write_images(tmp_path_factory.mktemp("images"), {"test": 2}, classes)


@pytest.mark.parametrize("name", families())
@pytest.mark.first_case
def test_commands_end_well(name, image_folder, tmp_path, capsys):
    model, options = FAMILIES[name]
    kwargs = {**OPTIONS, "num_experts": 4, "depth": 2, **options}
    args = dict(model=model, num_classes=5, model_kwargs=kwargs)
    file = tmp_path / "last.pth.tar"
    state = {"epoch": 1, "arch": model, "state_dict": without_draws(name).state_dict()}
    torch.save({**state, "args": Namespace(**args)}, file)
    for command in COMMANDS:
        words = command.split()
        if name == "fine-grained" and words[0] in ("export", "push") and "--moe" not in words:
            words += ["--method", "sum"]
        words = [word.format(file=file, images=image_folder, out=tmp_path) for word in words]
        assert main(words) == 0, capsys.readouterr().err
        assert capsys.readouterr().out, command
