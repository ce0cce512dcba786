"""Promise: every command takes a checkpoint that train.py wrote of any model of this package."""

import pytest
from common import (
    FAMILIES,
    OPTIONS,
    families,
    save_as_train_py,
    without_draws,
    write_images,
)
from torch import nn

from timm_moe_cli import main

IMAGES = "--data-dir {images} --split test --device cpu --workers 0"
COMMANDS = (
    "info {file}",
    f"evaluate {{file}} {IMAGES}",
    f"fewshot {{file}} {IMAGES} --shots 1",
    f"compare {{file}} {{twin}} {IMAGES}",
    f"benefits --teacher {{file}} --student 5 --dense 1 {IMAGES}",
    f"routes {{file}} {{out}}/routes {IMAGES}",
    "export {file} {out}/dense",
    "export --moe {file} {out}/moe",
    "push {file} user/name --dry-run",
)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    classes = [f"class{number}" for number in range(5)]
    return write_images(tmp_path_factory.mktemp("images"), {"train": 1, "test": 2}, classes)


@pytest.fixture
def run(image_folder, tmp_path, capsys):
    """Run commands on a checkpoint of a family; each must end well, and print something."""

    def run_commands(name, *commands):
        model, options = FAMILIES[name]
        kwargs = {**OPTIONS, "num_experts": 4, "depth": 2, **options}
        files = dict(file=tmp_path / "last.pth.tar", twin=tmp_path / "twin.pth.tar")
        made = without_draws(name)
        nn.init.constant_(made.head.bias[:1], 9.0)  # one class is right: more than --dense has
        for file in files.values():
            save_as_train_py(file, made, model, model_kwargs=kwargs)
        for command in commands:
            words = command.split()
            if name == "fine-grained" and words[0] in ("export", "push") and "--moe" not in words:
                words += ["--method", "sum"]
            words = [word.format(**files, images=image_folder, out=tmp_path) for word in words]
            assert main(words) == 0, capsys.readouterr().err
            assert capsys.readouterr().out, command

    return run_commands


@pytest.mark.parametrize("name", families())
@pytest.mark.first_case
def test_commands_end_well(name, run):
    has_routes = name != "random partition"  # whose tokens choose no expert
    run(name, *(each for each in COMMANDS if has_routes or not each.startswith("routes")))


@pytest.mark.ci
@pytest.mark.parametrize("name", FAMILIES)
def test_the_report_is_written(name, run):
    run(name, f"report {{file}} {{out}}/report {IMAGES}")
