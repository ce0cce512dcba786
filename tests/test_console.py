"""What the commands print and log.

Names from files are harmless, and results are written before a pipe is closed.
"""

import builtins
import csv
import errno
import json
import logging
import os
import shutil
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch
from common import SMALL_VIT_KWARGS, make_model, write_images
from safetensors.torch import save_file

from timm_moe.console import PrintableFormatter, describe, printable, show, shown_name
from timm_moe_cli import main

#: Mathematics for matplotlib, a colour and a second line for a terminal, bytes that are no UTF-8,
#: markup, a surprise.
NAMES = [
    b"$x_$",
    b"a\x1b[31m\nfalse: 100%",
    b"\xff\xfe",
    b"</script><b>",
    "\u202egpj.\u00e9".encode(),
]


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    folder = write_images(
        tmp_path_factory.mktemp("data"), {"val": 2}, [f"class{number}" for number in range(4)]
    )
    for number, name in enumerate(NAMES[:3]):
        (folder / "val" / f"class{number}").rename(folder / "val" / os.fsdecode(name))
    shutil.copytree(folder / "val", folder / "shots")
    return folder


@pytest.fixture(scope="module")
def command(splits, tmp_path_factory):
    """Options that run a model with experts on the images."""
    file = tmp_path_factory.mktemp("model") / "a.safetensors"
    torch.manual_seed(0)
    save_file(make_model("vit_tiny_moe", num_experts=4, num_classes=4).state_dict(), file)
    kwargs = [*SMALL_VIT_KWARGS, "num_experts=4"]
    model = ["--model", "vit_tiny_moe", "--num-classes", "4", "--model-kwargs", *kwargs]
    return lambda name, *output: main(
        [name, str(file), *output, "--data-dir", str(splits), "-j", "0", "--device", "cpu", *model]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_written_on_one_line_and_steers_nothing(name):
    text = printable(os.fsdecode(name))
    assert text.isprintable()
    text.encode()
    assert printable("héé 漢字 🙂 ±") == "héé 漢字 🙂 ±"
    assert printable(ValueError("a\x9b1m")) == r"a\x9b1m"


def test_a_long_name_is_shortened():
    assert shown_name("a" * 100) == "a" * 80 + " ..."
    assert shown_name("a\n") == r"a\n"


def test_lines_messages_and_errors(capsys):
    show("a\nb", "c\x07")
    assert capsys.readouterr().out == "a\\nb\nc\\x07\n"
    record = logging.LogRecord("timm_moe", logging.INFO, "", 0, "class %s", ("a\n\x1b[2J",), None)
    assert PrintableFormatter("%(message)s").format(record) == r"class a\n\x1b[2J"
    assert describe(ValueError("a \n b \x1b[2J")) == r"a b \x1b[2J"


@pytest.mark.parametrize("usetex", [False, True])
@pytest.mark.first_case
def test_routes_of_classes_of_any_name(command, tmp_path, capfd, monkeypatch, usetex):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", usetex)
    assert command("routes", str(tmp_path / "routes")) == 0
    captured = capfd.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\nfalse" not in captured.out + captured.err
    assert (tmp_path / "routes/routes.png").stat().st_size > 1000
    json.loads((tmp_path / "routes/routes.json").read_text())
    with open(tmp_path / "routes/routes.csv", encoding="utf-8", newline="") as stream:
        classes = {row["class"] for row in csv.DictReader(stream)}
    assert {"$x_$", "a\x1b[31m\nfalse: 100%", "class3"} < classes
    assert len(classes) == 4


@pytest.mark.ci
def test_a_report_on_classes_of_any_name(command, tmp_path):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    assert command("report", str(tmp_path / "page")) == 0
    assert "$x_$" in (tmp_path / "page/index.html").read_text(encoding="utf-8")


@contextmanager
def closed_pipe():
    """Make a standard output whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield


def test_results_are_written_though_nobody_reads_them(command, tmp_path):
    with closed_pipe():
        assert command("evaluate", "--json", str(tmp_path / "a.json")) == 0
    assert json.loads((tmp_path / "a.json").read_text())["metrics"]["images"] == 8


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EINVAL, errno.ENOSPC])
def test_a_reader_that_has_gone_is_no_error_on_windows_either(number, capfd, monkeypatch):
    """Windows tells of it by EINVAL."""

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(builtins, "print", fail)
    moved = []
    monkeypatch.setattr(os, "dup2", lambda *descriptors: moved.append(descriptors))
    with pytest.raises(OSError, match="No space") if number == errno.ENOSPC else nullcontext():
        show("a")
    assert len(moved) == (number != errno.ENOSPC)


def test_few_shots_are_written_though_nobody_reads_them(command, tmp_path):
    options = ["--shots", "1", "--draws", "1", "--train-split", "shots", "--split", "val"]
    with closed_pipe():
        assert command("fewshot", "--json", str(tmp_path / "a.json"), *options) == 0
    assert json.loads((tmp_path / "a.json").read_text())["results"][0]["shots"] == 1


def test_a_pipe_of_others_that_breaks_is_an_error(command, monkeypatch, capsys):
    """As a connection to the Hub, or to a process that loads images."""

    def broken(*args, **kwargs):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("timm_moe.analysis.data.create_loader", broken)
    assert command("evaluate") == 1
    assert "Broken pipe" in capsys.readouterr().err
