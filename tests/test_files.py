"""Where outputs are written.

Tested are mount points, missing parents, several processes at once, and what killed ones leave.
"""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import timm
import torch
from common import DATA, SMALL_VIT
from safetensors.torch import load_file

import timm_moe
from timm_moe import files
from timm_moe.export.export import export_moe
from timm_moe.files import (
    check_apart,
    check_folder,
    check_writable,
    publish,
    staged,
    write_json,
    written_whole,
)
from timm_moe_cli import main

NAMES = ("weights", "config")


def write_pair(target, text):
    """A folder of two files that belong together."""
    with staged(target) as temporary:
        folder = temporary / "new"
        folder.mkdir()
        for name in NAMES:
            (folder / name).write_text(text)
        publish(folder, Path(target), NAMES)


@pytest.fixture
def volume(tmp_path, monkeypatch):
    """A folder into which and out of which no rename leads, as if it were mounted."""
    folder = tmp_path / "volume"
    folder.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder)

    def guarded(rename):
        def move(source, target, **options):
            if Path(source).absolute().is_relative_to(folder) != Path(
                target
            ).absolute().is_relative_to(folder):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            return rename(source, target, **options)

        return move

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    return folder


# --- mount points


def test_an_export_into_a_mount_point(volume, ewa_vit):
    timm_moe.export_dense(ewa_vit, volume)
    ewa_vit.head.bias.data += 1
    timm_moe.export_dense(ewa_vit, volume, overwrite=True)
    assert torch.equal(load_file(volume / "model.safetensors")["head.bias"], ewa_vit.head.bias)
    export_moe(ewa_vit, volume, overwrite=True)
    assert sorted(os.listdir(volume)) == ["config.json", "model.safetensors"]


MOUNTED = """
import os, subprocess, sys, timm
from timm_moe import export_dense
subprocess.run(["mount", "-t", "tmpfs", "none", sys.argv[1]], check=True)
assert os.stat(sys.argv[1]).st_dev != os.stat(os.path.dirname(sys.argv[1])).st_dev
model = timm.create_model("vit_tiny_ewa_moe", **{options})
export_dense(model, sys.argv[1])
export_dense(model, sys.argv[1], overwrite=True)
assert sorted(os.listdir(sys.argv[1])) == ["config.json", "model.safetensors"]
"""


@pytest.mark.ci
def test_an_export_into_a_real_mount_point(tmp_path):
    unshare = ["unshare", "-rm"]
    (tmp_path / "try").mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "none", str(tmp_path / "try")]
        subprocess.run([*unshare, *mount], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"Nothing can be mounted here: {error}")
    code = MOUNTED.replace("{options}", repr(SMALL_VIT))
    done = subprocess.run(
        [*unshare, sys.executable, "-c", code, str(tmp_path / "try")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_where_a_file_must_be_written_is_told_first(ewa_vit, tmp_path, monkeypatch, name):
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    (tmp_path / "vit" / name).unlink()
    (tmp_path / "vit" / name).mkdir()
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    monkeypatch.setattr(
        timm.models.VisionTransformer, "forward", lambda *_: pytest.fail("A model was run.")
    )
    with pytest.raises(IsADirectoryError, match=f"{name} is a folder"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit", overwrite=True)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


# --- names of outputs


@pytest.mark.parametrize(
    "output", ["out", "out/", "./out", "sub/../out", ".", "link", "link/", "linked", "a/../b"]
)
def test_ways_to_name_a_folder(tmp_path, monkeypatch, output):
    (tmp_path / "here/sub").mkdir(parents=True)
    (tmp_path / "here/elsewhere").mkdir()
    (tmp_path / "here/link").symlink_to("elsewhere")
    (tmp_path / "here/linked").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path / "here")
    for text in ("old", "new"):
        check_folder(output, NAMES, overwrite=True)
        write_pair(output, text)
        assert [Path(os.path.normpath(output), name).read_text() for name in NAMES] == [text] * 2
    assert (tmp_path / "here/link").is_symlink()
    assert not list(tmp_path.rglob(".*"))


def test_a_link_to_a_file_stays_one(tmp_path):
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("real.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert '"a": 1' in (tmp_path / "real.json").read_text()


def test_outputs_that_nothing_can_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("pipe", "pipe or a device"),
        ("folder", "is a folder"),
        ("gone", "link"),
        ("loop", "link"),
    ):
        with pytest.raises(OSError, match=message):
            check_writable(tmp_path / name, overwrite=True)
    for name, message in (
        ("file", "is a file"),
        ("gone", "broken symbolic link"),
        ("loop", "link"),
    ):
        with pytest.raises(OSError, match=message):
            check_folder(tmp_path / name, NAMES)
    for check in (check_writable, lambda file: check_folder(file, NAMES)):
        with pytest.raises(NotADirectoryError, match=r"file is a file, .*file/a/b"):
            check(tmp_path / "file/a/b")


def test_a_folder_that_the_user_must_not_write_to(tmp_path, monkeypatch):
    """Known before anything is done, and in one sentence."""

    def refuse(folder):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    for check in (check_writable, lambda file: check_folder(file, NAMES)):
        with pytest.raises(PermissionError, match=r"^\S*/a/b .*Permission denied\.$"):
            check(tmp_path / "a/b")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_as_another_user(tmp_path):
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(0o755)
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            check_writable(tmp_path / "a.json")
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


# --- parents


def test_missing_parents_are_made(ewa_vit, tmp_path, monkeypatch, capsys):
    timm_moe.export_dense(ewa_vit, tmp_path / "a/b/vit")
    assert sorted(os.listdir(tmp_path / "a/b/vit")) == ["config.json", "model.safetensors"]
    monkeypatch.chdir(tmp_path)
    assert main(["import-vmoe", str(DATA / "vmoe/vmoe_tiny"), "c/d/vmoe"]) == 0
    assert os.listdir(tmp_path / "c/d") == ["vmoe"]
    write_json("e/f.json", {})
    assert os.listdir(tmp_path / "e") == ["f.json"]


def test_an_interrupt_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), written_whole(tmp_path / "file"):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


# --- several processes


def race(target, text, begin):
    """Write the pair again and again."""
    begin.wait()
    for number in range(60):
        with suppress(BlockingIOError):  # another one is at it
            write_pair(target, f"{text} {number}")


def watch(target, begin, stop, seen):
    """Count what can be seen beside each other: a config only with its own weights."""
    begin.wait()
    while not stop.is_set():
        try:
            first = (target / "config").read_text()
            weights = (target / "weights").read_text()
            second = (target / "config").read_text()
        except FileNotFoundError:
            continue
        if first == second:  # so both stood there when the weights were read
            seen[weights != first] += 1


def test_what_another_process_wrote_meanwhile_is_not_replaced(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": 1}, overwrite=False)
    before = file.read_text()
    with pytest.raises(FileExistsError, match="pass --overwrite"):
        write_json(file, {"a": 2}, overwrite=False)
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.first_case
def test_racing_processes_never_mix_what_belongs_together(tmp_path, new):
    target = tmp_path / "out"
    if not new:
        write_pair(target, "before")
    context = multiprocessing.get_context("fork")
    begin, stop, seen = context.Event(), context.Event(), context.Array("i", [0, 0])
    writers = [
        context.Process(target=race, args=(target, str(n), begin), daemon=True) for n in range(6)
    ]
    watcher = context.Process(target=watch, args=(target, begin, stop, seen), daemon=True)
    for process in (*writers, watcher):
        process.start()
    begin.set()
    for process in writers:
        process.join()
        assert process.exitcode == 0
    stop.set()
    watcher.join()
    assert watcher.exitcode == 0
    assert seen[1] == 0
    assert seen[0] > 0
    assert len({(target / name).read_text() for name in NAMES}) == 1
    assert sorted(os.listdir(target)) == sorted(NAMES)
    assert os.listdir(tmp_path) == ["out"]


def test_the_second_export_is_refused_in_a_sentence(ewa_vit, tmp_path):
    with (
        staged(tmp_path / "vit"),
        pytest.raises(BlockingIOError, match=r"Another process .*vit: "),
    ):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    with staged(tmp_path / "other"):  # does not stand in the way
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    with staged(tmp_path / "vit"), pytest.raises(BlockingIOError, match="Another process"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit", overwrite=True)
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", overwrite=True)


def test_what_came_meanwhile_is_not_overwritten_unasked(ewa_vit, tmp_path, monkeypatch):
    check = timm_moe.export.export.check_target

    def check_and_be_late(*arguments):
        target = check(*arguments)
        if not target.exists():
            write_pair(target, "of another process")
        return target

    monkeypatch.setattr("timm_moe.export.export.check_target", check_and_be_late)
    with pytest.raises(FileExistsError, match=r"not empty.*--overwrite"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert sorted(os.listdir(tmp_path / "vit")) == sorted(NAMES)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for text in ("old", "new"):
        write_pair(tmp_path / "out", text)
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == dict.fromkeys(
        NAMES, "new"
    )


def test_windows_locks_by_a_file_that_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    with staged(tmp_path / "out"):
        with pytest.raises(BlockingIOError, match="Another process is writing"):
            write_pair(tmp_path / "out", "new")
        assert len(os.listdir(tmp_path)) == 2  # not removed by the process that is refused
    assert os.listdir(tmp_path) == []
    write_pair(tmp_path / "out", "new")
    assert os.listdir(tmp_path) == ["out"]


def test_a_drive_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(FileNotFoundError, match="on a drive that is not there"):
        check_writable(tmp_path / "a.json")


def test_the_check_of_a_place_leaves_nothing(tmp_path, monkeypatch):
    """Leftovers of a process that was killed in the midst of its check go, too."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", lambda path: None)
        check_writable(tmp_path / "a.json")
    assert len(os.listdir(tmp_path)) == 1
    check_writable(tmp_path / "a.json")
    assert os.listdir(tmp_path) == []


# --- what killed processes leave


def kill_within(hidden):
    """A process that dies within the block of a context manager, having written there."""
    child = os.fork()
    if child == 0:
        with hidden as path:
            (path / "x" if path.is_dir() else path).write_text("x" * 99)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_leftovers_are_removed_by_the_next_run(tmp_path):
    output = tmp_path / "a.json"
    kill_within(written_whole(output))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".a.json.timm_moe.lock", ".a.json.timm_moe.partial"]
    write_json(tmp_path / "b.json", {})  # another target
    assert set(left) < set(os.listdir(tmp_path))
    write_json(output, {})
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]


def test_a_killed_export_leaves_nothing_to_the_next(tmp_path, ewa_vit):
    for overwrite in (False, True):
        kill_within(staged(tmp_path / "vit"))
        assert sorted(path.name for path in tmp_path.glob(".*")) == [
            ".vit.timm_moe.lock",
            ".vit.timm_moe.partial",
        ]
        timm_moe.export_dense(ewa_vit, tmp_path / "vit", overwrite=overwrite)
        assert os.listdir(tmp_path) == ["vit"]
        assert sorted(os.listdir(tmp_path / "vit")) == ["config.json", "model.safetensors"]


def test_results_of_any_type_are_written(tmp_path):
    """An option of a model may be what JSON has no word for."""
    write_json(
        tmp_path / "a.json", {"kwargs": {"a": {1}, "b": 1j, "c": tmp_path}, "value": float("nan")}
    )
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["kwargs"] == {"a": "{1}", "b": "1j", "c": str(tmp_path)}
    assert written["value"] is None


def test_what_is_not_read_may_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name in ("a.json", "run/a.json"):
        (tmp_path / name).touch()
    check_apart("a.json", [""])  # no class map
    check_apart("new.json", [tmp_path])
    check_apart("run/a.json", [tmp_path])
