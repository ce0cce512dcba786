"""Publishing on a Hub: the real client of huggingface_hub against a server on the loopback."""

import argparse
import itertools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
import timm
import torch
import yaml
from common import ROOT, SMALL_VIT, SMALL_VIT_KWARGS
from hub_server import hub_server
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from PIL import Image
from safetensors.torch import load_file

import timm_moe
from timm_moe.export import push as hub_module
from timm_moe.export.export import export_moe
from timm_moe.export.push import Destination, push_dense, push_folder, push_moe
from timm_moe_cli import main

TOKEN = "hf_SecretOfTheTests"
READ_TOKEN = "hf_ReadOnlySecret"
OPTIONS = {name: value for name, value in SMALL_VIT.items() if name != "num_classes"}

#: Runs commands of timm-moe one after another: importing torch and timm for each of them takes seconds.
WORKER = """
import json, os, sys, time
commands, replies = sys.stdin, os.fdopen(os.dup(1), "w")
sys.stdout.flush()
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), 1)
os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), 2)
from timm_moe_cli import main
sleep = time.sleep
for line in commands:
    command = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    if command["token"]:
        os.environ["HF_TOKEN"] = command["token"]
    time.sleep = sleep if command["patient"] else lambda seconds: None
    status = main(command["arguments"])
    sys.stdout.flush()
    replies.write(json.dumps(status) + "\\n")
    replies.flush()
"""


class Worker:
    """A process with the real client, whose Hub is the server."""

    def __init__(self, folder, env):
        self.folder = folder
        self.files = [folder / "out.txt", folder / "err.txt"]
        for file in self.files:
            file.touch()
        self.read = [0, 0]
        command = [sys.executable, "-c", WORKER, *map(str, self.files)]
        self.process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *arguments, token=TOKEN, patient=False):
        """Exit status, standard output and standard error of a command; the client's pauses are skipped."""
        command = {"arguments": list(map(str, arguments)), "token": token, "patient": patient}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        status = json.loads(self.process.stdout.readline())
        texts = [file.read_text() for file in self.files]
        new = [text[start:] for text, start in zip(texts, self.read, strict=True)]
        self.read = [len(text) for text in texts]
        return status, *new

    def stop(self):
        self.process.stdin.close()
        self.process.wait(timeout=20)

    def push(self, *arguments, **options):
        """Output of a push that succeeds."""
        status, out, err = self.run("push", *arguments, **options)
        assert status == 0, err
        return out

    def refused(self, *arguments, **options):
        """The sentence of a push that fails."""
        status, out, err = self.run("push", *arguments, **options)
        assert (status, out) == (1, "")
        sentence = err.strip().splitlines()[-1]
        assert sentence.startswith("timm-moe: error: ")
        return sentence


def client_environment(folder, url):
    """Nothing of the user's login or caches, and a Hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    places = {"HF_HOME": folder, "HF_HUB_CACHE": folder / "hub", "HF_TOKEN_PATH": folder / "token", "HOME": folder}
    switches = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    search = {"PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")]).strip(os.pathsep)}
    return {**kept, **search, **{name: str(place) for name, place in places.items()}, **switches}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with hub_server(tmp_path_factory.mktemp("hub")) as server:
        server.tokens = {TOKEN: ("user", "write"), READ_TOKEN: ("user", "read")}
        yield server


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A client whose Hub is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    folder = tmp_path_factory.mktemp("offline")
    worker = Worker(folder, client_environment(folder, url))
    yield worker, url
    worker.stop()


@pytest.fixture(scope="module")
def process(server, offline, tmp_path_factory):  # the two start at the same time
    folder = tmp_path_factory.mktemp("client")
    worker = Worker(folder, client_environment(folder, server.url))
    yield worker
    worker.stop()
    written = [*folder.rglob("*"), *server.folder.rglob("*")]
    leaks = [file for file in written if file.is_file() and re.search(rb"hf_\w*Secret", file.read_bytes())]
    assert not leaks, "the token is in a file or an output"


@pytest.fixture
def hub(process, server):
    """The client, and a server without repositories."""
    server.reset()
    return process


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """What train.py leaves of an EWA model and of a routed one, each after two epochs."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs of somebody")
    for name in ("vit_tiny_ewa_moe", "vit_tiny_moe"):
        model = timm.create_model(name, **SMALL_VIT, num_experts=3)
        args = argparse.Namespace(
            model=name, num_classes=5, model_kwargs={**OPTIONS, "num_experts": 3}, data_dir="/home/somebody/images",
            dataset="torch/cifar100", epochs=2, batch_size=64, opt="adamw", lr=1e-3, eval_metric="top1",
            model_ema=False, resume="/home/somebody/a run/last.pth.tar",
            kd_model_name="local-dir:/home/somebody/teacher", kd_temperature=1.0, mixup=0.0,
        )  # fmt: skip
        ema = {key: value / 2 for key, value in model.state_dict().items()}
        state = {"epoch": 1, "arch": name, "args": args, "state_dict": model.state_dict(), "state_dict_ema": ema}
        (folder / name).mkdir()
        torch.save({**state, "metric": 51.25}, folder / name / "last.pth.tar")
        rows = ["epoch,train_loss,eval_loss,eval_top1,eval_top5,lr", "0,4,3.5,33,70,0.1", "1,3,2.5,51.25,81.5,0.05"]
        (folder / name / "summary.csv").write_text("\n".join(rows) + "\n")
    return {name: folder / name / "last.pth.tar" for name in ("vit_tiny_ewa_moe", "vit_tiny_moe")}


@pytest.fixture
def checkpoint(checkpoints):
    return checkpoints["vit_tiny_ewa_moe"]


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


# --- there and back

LOAD = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] == "timm_moe" and sys.argv[1] == "plain":
            raise ModuleNotFoundError(fullname)
sys.meta_path.insert(0, Missing())
import timm, torch
from huggingface_hub import snapshot_download
from pathlib import Path
for name, file in zip(sys.argv[2::2], sys.argv[3::2]):
    model = timm.create_model(name, pretrained=True).eval()
    torch.manual_seed(0)
    output = model(torch.randn(4, 3, 32, 32)).detach()
    repo_id, _, revision = name.removeprefix("hf-hub:").partition("@")
    files = sorted(path.name for path in Path(snapshot_download(repo_id, revision=revision or None)).iterdir())
    result = {"class": type(model).__name__, "files": files, "tensors": model.state_dict(), "output": output}
    torch.save(result, file)
assert ("timm_moe" in sys.modules) == (sys.argv[1] == "package")
"""


def load(server, folder, environment, *names):
    """Models that another process gets from the Hub by name, in an environment with the package or plain."""
    files = [folder / f"{number}.pt" for number in range(len(names))]
    env = {**client_environment(folder, server.url), "HF_TOKEN": TOKEN}
    if environment == "plain":
        env = {**env, "TIMM_MOE_AUTOLOAD": "0"}
        del env["PYTHONPATH"]
    arguments = [str(part) for pair in zip(names, files, strict=True) for part in pair]
    command = [sys.executable, "-c", LOAD, environment, *arguments]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return [torch.load(file) for file in files]


def output_of(model):
    torch.manual_seed(0)
    return model.eval()(torch.randn(4, 3, 32, 32))


def assert_same(loaded, model):
    expected = model.state_dict()
    assert loaded["tensors"].keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded["tensors"].items())
    assert torch.equal(loaded["output"], output_of(model))


def test_plain_timm_loads_what_was_pushed(hub, server, checkpoint, tmp_path):
    out = hub.push(checkpoint, "user/vit")
    assert 'Load it with timm.create_model("hf-hub:user/vit", pretrained=True).' in out
    hub.push(checkpoint, "user/ema", "--use-ema", "--private")
    hub.push(checkpoint, "user/vit", "--use-ema", "--revision", "ema")
    out = hub.push(checkpoint, "user/ema", "--create-pr")
    assert f"{server.url}/user/ema/discussions/1" in out
    assert '"hf-hub:user/ema@refs/pr/1"' in out
    names = ["hf-hub:user/vit", "hf-hub:user/ema", "hf-hub:user/vit@ema", "hf-hub:user/ema@refs/pr/1"]
    hub.push(checkpoint, "user/ema", "--revision", "refs/pr/1", "--license", "mit")
    assert server.messages("user/ema", "refs/pr/1") == ["Add model"] * 3 + ["initial commit"]
    loaded = load(server, tmp_path, "plain", *names)
    expert = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, num_experts=3)
    state = torch.load(checkpoint, weights_only=False)
    for result, weights in zip(loaded, ["state_dict", "state_dict_ema", "state_dict_ema", "state_dict"], strict=True):
        expert.load_state_dict(state[weights])
        assert result["class"] == "VisionTransformer"
        assert result["files"] == [".gitattributes", "README.md", "config.json", "model.safetensors"]
        assert_same(result, timm_moe.to_dense(expert))
    assert server.messages("user/vit") == server.messages("user/ema") == ["Add model", "initial commit"]
    assert server.messages("user/vit", "ema") == ["Add model", "Add model", "initial commit"]  # it began at main
    assert [server.repositories[name].private for name in ("user/vit", "user/ema")] == [False, True]
    assert sum(method == "PUT" for method, _, _ in server.requests) == 2  # the same weights are stored once


@pytest.mark.ci
def test_expert_models_come_back_with_the_package(hub, server, checkpoints, tmp_path):
    for name, checkpoint in checkpoints.items():
        hub.push(checkpoint, f"user/{name}", "--moe")
    loaded = load(server, tmp_path, "package", *(f"hf-hub:user/{name}" for name in checkpoints))
    for result, (name, checkpoint) in zip(loaded, checkpoints.items(), strict=True):
        model = timm.create_model(name, **SMALL_VIT, num_experts=3)
        model.load_state_dict(torch.load(checkpoint, weights_only=False)["state_dict"])
        assert result["class"] == "MoeVisionTransformer"
        assert_same(result, model)
        card = server.files(f"user/{name}")["README.md"].decode()
        assert "needs the package timm_moe" in card
        assert "It has 3 experts in each of 2 layers." in card
        assert "mixture-of-experts" in front_matter(card)["tags"]
        metrics = front_matter(card)["model-index"][0]["results"][0]["metrics"]
        assert [metric["value"] for metric in metrics] == [51.25, 81.5, 2.5]


def test_a_repository_is_exported(hub, checkpoint, tmp_path):
    hub.push(checkpoint, "user/vit", "--moe")
    status, _, err = hub.run("export", "hf-hub:user/vit", tmp_path / "from_hub")
    assert status == 0, err
    timm_moe.export_dense(checkpoint, tmp_path / "from_file")
    exported = [load_file(tmp_path / name / "model.safetensors") for name in ("from_hub", "from_file")]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())


def test_a_folder_is_uploaded_as_it_is(hub, server, checkpoint, tmp_path):
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    (folder / "README.md").write_text("---\nlicense: mit\n---\nMine.\n")
    (folder / "secrets.env").write_text("password")
    hub.push(folder, "user/vit")
    pushed = server.files("user/vit")
    assert pushed["README.md"] == b"---\nlicense: mit\n---\nMine.\n"
    for name in ("config.json", "model.safetensors"):
        assert pushed[name] == (folder / name).read_bytes()
    assert "secrets.env" not in pushed


@pytest.mark.ci
def test_a_folder_of_experts_is_uploaded_as_it_is_too(hub, server, checkpoints, tmp_path):
    for name, checkpoint in checkpoints.items():
        folder = export_moe(checkpoint, tmp_path / name)
        (folder / "README.md").write_text("Mine.")
        for options in ([], ["--moe"]):
            hub.push(folder, f"user/{name}", *options)
            pushed = server.files(f"user/{name}")
            for file in ("README.md", "config.json", "model.safetensors"):
                assert pushed[file] == (folder / file).read_bytes()
        assert server.messages(f"user/{name}") == ["Add model", "initial commit"]
        assert "no stock" not in hub.push(f"local-dir:{folder}", f"user/{name}", "--dry-run")
        hub.push(folder, f"user/{name}", "--method", "average", "--revision", "dense")  # asked for by name
        pushed = server.files(f"user/{name}", "dense")
        assert json.loads(pushed["config.json"])["architecture"] == "vit_tiny_patch16_224"
        assert pushed["README.md"] != b"Mine."  # which was of the experts
        sentence = hub.refused(folder, f"user/{name}", "--use-ema")
        assert "states its model and has one kind of weights" in sentence
        assert "states its model" in hub.refused(folder, f"user/{name}", "--num-classes", "3")
    dense = timm_moe.export_dense(checkpoint, tmp_path / "dense").path
    assert "has no expert layers" in hub.refused(dense, "user/vit", "--method", "svd")


PRETRAINED = {"pretrained": True, "dataset": "hfds/uoft-cs/cifar100"}
IN_DEFAULT_SUITE = [("vit_tiny_ewa_moe", "pretrained", "average"), ("vit_tiny_moe", "nothing", "sum")]
STATED = {
    "nothing": {},
    "pretrained": PRETRAINED,
    "a checkpoint": {"initial_checkpoint": "/a/b.pth"},
    "both": {**PRETRAINED, "initial_checkpoint": "/a/b"},
}


@pytest.mark.parametrize(
    ("name", "stated", "method"),
    [
        pytest.param(*case, marks=() if case in IN_DEFAULT_SUITE else pytest.mark.ci)
        for case in itertools.product(("vit_tiny_ewa_moe", "vit_tiny_moe"), STATED, ("average", "sum"))
    ],
)
def test_a_pushed_export_has_the_card_of_its_checkpoint(checkpoints, tmp_path, name, stated, method):
    content = torch.load(checkpoints[name], weights_only=False)
    vars(content["args"]).update(STATED[stated])
    torch.save(content, tmp_path / "last.pth.tar")
    summary = (checkpoints[name].parent / "summary.csv").read_bytes()
    (tmp_path / "summary.csv").write_bytes(summary)
    folder = timm_moe.export_dense(tmp_path / "last.pth.tar", tmp_path / "vit", method).path
    pushed = push_dense(tmp_path / "last.pth.tar", "user/vit", method=method, dry_run=True, metrics={"top1": 5})
    assert push_folder(folder, "user/vit", dry_run=True, metrics={"top1": 5}).card == pushed.card
    pushed = push_dense(tmp_path / "last.pth.tar", "user/vit", method=method, dry_run=True)
    assert push_dense(folder, "user/vit", dry_run=True).card == pushed.card
    config = json.loads((folder / "config.json").read_text())
    assert config["pretrained_cfg"].get("license") == front_matter(pushed.card).get("license")
    again = timm_moe.export_dense(folder, tmp_path / "again").path
    assert push_dense(again, "user/vit", dry_run=True).card == pushed.card
    experts = export_moe(tmp_path / "last.pth.tar", tmp_path / "moe")
    assert push_dense(experts, "user/vit", method=method, dry_run=True).card == pushed.card
    pushed = push_moe(tmp_path / "last.pth.tar", "user/vit", dry_run=True)
    assert push_folder(experts, "user/vit", dry_run=True).card == pushed.card


def test_the_licence_of_the_card_is_that_of_config_json(hub, server, checkpoint, tmp_path):
    hub.push(checkpoint, "user/vit", "--license", "mit")
    hub.push(checkpoint, "user/moe", "--moe", "--license", "mit")
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    before = (folder / "config.json").read_bytes()
    hub.push(folder, "user/folder", "--license", "mit")
    for name in ("user/vit", "user/moe", "user/folder"):
        pushed = server.files(name)
        assert json.loads(pushed["config.json"])["pretrained_cfg"]["license"] == "mit"
        assert front_matter(pushed["README.md"].decode())["license"] == "mit"
    assert (folder / "config.json").read_bytes() == before
    config = json.loads(before)
    config["pretrained_cfg"]["license"] = "cc-by-nc-4.0"
    (folder / "config.json").write_text(json.dumps(config))
    card = push_dense(folder, "user/vit", dry_run=True).card
    assert front_matter(card)["license"] == "cc-by-nc-4.0"
    assert "cc-by-nc-4.0, as its config.json states." in card
    timm_moe.export_dense(folder, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["pretrained_cfg"]["license"] == "cc-by-nc-4.0"


def test_a_folder_that_transformers_could_not_open_is_mended(checkpoint, hub, server, tmp_path):
    """timm states the number of classes twice."""
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    config = json.loads((folder / "config.json").read_text())
    twice = {**config, "model_args": {**config["model_args"], "num_classes": 5}}
    (folder / "config.json").write_text(json.dumps(twice))
    assert timm.create_model(f"local-dir:{folder}", pretrained=True).num_classes == 5
    hub.push(folder, "user/vit")
    assert json.loads(server.files("user/vit")["config.json"]) == config
    assert json.loads((folder / "config.json").read_text()) == twice


def test_names_of_classes_are_published(checkpoint, hub, server, tmp_path):
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        (tmp_path / "images/train" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "images/train" / name / "1.png")
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    for source, options in ((checkpoint, []), (checkpoint, ["--moe"]), (folder, [])):
        hub.push(source, "user/vit", *options, "--data-dir", tmp_path / "images")
        assert json.loads(server.files("user/vit")["config.json"])["label_names"] == names
    shutil.rmtree(tmp_path / "images/train/e")
    sentence = hub.refused(folder, "user/vit", "--data-dir", tmp_path / "images")
    assert "There are 4 names of classes, but the model has 5 classes" in sentence


def test_a_folders_own_card_takes_no_statements(checkpoint, tmp_path):
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    (folder / "README.md").write_text("Mine.")
    with pytest.raises(ValueError, match=r"has a README\.md of its own"):
        push_dense(folder, "user/vit", license="mit", dry_run=True)


def test_no_path_and_nothing_that_is_not_known_is_in_the_card(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    content["args"].dataset = "hfds//home/alice/data"
    content["args"].initial_checkpoint = "/home/alice/start.pth.tar"
    torch.save(content, tmp_path / "last.pth.tar")
    card = push_moe(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card
    assert "alice" not in card
    assert "it began from the weights of `start.pth.tar`" in card
    stated = push_moe(tmp_path / "last.pth.tar", "user/vit", dry_run=True, metrics={"top1": 50.0}).card
    assert "name: not stated" in stated
    assert "Stated by the publisher." in stated


def test_nothing_new_is_no_commit(hub, server, checkpoint):
    assert "/user/vit/commit/" in hub.push(checkpoint, "user/vit")
    hub.push(checkpoint, "user/vit", "--revision", "other", "--license", "mit")
    for options in ([], ["--create-pr"], ["--revision", "other", "--license", "mit"]):
        out = hub.push(checkpoint, "user/vit", *options)
        assert f"Nothing changed: {server.url}/user/vit has these very files already, so nothing was uploaded." in out
        assert not re.search("commit/|discussions|in one commit", out)
    assert server.repositories["user/vit"].revisions.keys() == {"main", "other"}
    assert server.messages("user/vit") == ["Add model", "initial commit"]
    assert server.messages("user/vit", "other") == ["Add model", "Add model", "initial commit"]
    assert "/user/vit/commit/" in hub.push(checkpoint, "user/vit", "--license", "mit")


def test_what_the_client_says_comes_once_and_without_bars(hub, server, checkpoint):
    _, _, first = hub.run("push", checkpoint, "user/vit")
    _, _, second = hub.run("push", checkpoint, "user/vit")
    assert "No files have been modified" in second
    for text in (first, second):
        lines = text.splitlines()
        assert len(set(lines)) == len(lines), text
        assert not re.search(r"\r|\d%|B/s", text)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_clients_settings_are_restored(monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    logger = logging.getLogger("huggingface_hub")
    with hub_module.client_output():
        assert are_progress_bars_disabled() is not terminal
        assert not logger.propagate
    with pytest.raises(KeyError), hub_module.client_output():
        raise KeyError
    assert not are_progress_bars_disabled()
    assert logger.propagate
    disable_progress_bars()
    try:
        with hub_module.client_output():
            assert are_progress_bars_disabled()
        assert are_progress_bars_disabled()  # as the caller wanted it
    finally:
        enable_progress_bars()


# --- what goes wrong


def test_who_may_not_push(hub, server, checkpoint):
    assert "not logged in to the Hub: run hf auth login" in hub.refused(checkpoint, "user/vit", token=None)
    assert not server.requests
    assert "does not know your token" in hub.refused(checkpoint, "user/vit", token="hf_wrongSecret")
    assert "may only read" in hub.refused(checkpoint, "user/vit", token=READ_TOKEN)
    assert "holds characters that no token has" in hub.refused(checkpoint, "user/vit", token="hf_Sécret")
    (hub.folder / "token").write_text(TOKEN)  # as hf auth login leaves it
    assert "does not let you write to other/vit" in hub.refused(checkpoint, "other/vit", token=None)
    (hub.folder / "token").unlink()
    server.create("other/vit")
    assert "does not let you write to other/vit" in hub.refused(checkpoint, "other/vit")
    assert server.messages("other/vit") == ["initial commit"]
    hub.push(checkpoint, "other/vit", "--create-pr")  # anybody may propose a change
    assert server.requests[-1][1] == "/api/models/other/vit/commit/main?create_pr=1"
    assert server.messages("other/vit") == ["initial commit"]
    assert server.messages("other/vit", "refs/pr/1") == ["Add model", "initial commit"]


def test_where_nothing_can_be_pushed(hub, server, checkpoint):
    server.create("user/data", "dataset")
    assert "taken, perhaps by another kind of repository: You already created this dataset" in hub.refused(
        checkpoint, "user/data"
    )
    server.create("user/public")
    assert "user/public is there already and public" in hub.refused(checkpoint, "user/public", "--private")
    assert server.messages("user/public") == ["initial commit"]
    sentence = hub.refused(checkpoint, "user/vit", "--license", "my-own")
    assert 'The Hub did not take it: Invalid metadata in README.md. - "license" must be one of' in sentence
    server.faults.quota = 1000
    assert "user/vit: Private repository storage limit reached" in hub.refused(checkpoint, "user/vit")
    assert server.messages("user/vit") == ["initial commit"]


def test_the_client_tries_again_after_server_errors(hub, server, checkpoint):
    server.faults.answers = {step: [503] for step in ("preupload", "lfs_batch", "upload", "lfs_verify")}
    server.faults.answers["upload"] = [500]
    hub.push(checkpoint, "user/vit")
    assert not any(server.faults.answers.values())
    assert server.messages("user/vit") == ["Add model", "initial commit"]


def test_server_errors_that_stay(hub, server, checkpoint):
    server.create("user/vit")
    for step, statuses in {"whoami": [500], "preupload": [502] * 6, "commit": [500]}.items():
        server.faults.answers = {step: statuses}
        assert re.search(r"The Hub failed \(50\d: .*\); a push is made whole or", hub.refused(checkpoint, "user/vit"))
        assert server.messages("user/vit") == ["initial commit"]
    hub.push(checkpoint, "user/vit")


def test_a_connection_that_breaks_in_the_upload(hub, server, checkpoint):
    server.create("user/vit")
    server.faults.cuts = 6  # the client tries five times more
    assert "cannot be reached or broke off" in hub.refused(checkpoint, "user/vit")
    assert server.faults.cuts == 0
    assert set(server.files("user/vit")) == {".gitattributes"}
    server.faults.cuts = 1
    hub.push(checkpoint, "user/vit")
    assert server.messages("user/vit") == ["Add model", "initial commit"]
    assert len(server.files("user/vit")) == 4


def test_no_network(offline, checkpoint):
    worker, url = offline
    _, out, _ = worker.run("push", checkpoint, "user/vit", "--dry-run", token=None)
    assert f"Dry run; a push would upload to {url}/user/vit:" in out
    begin = time.monotonic()
    sentence = worker.refused(checkpoint, "user/vit", patient=True)
    assert time.monotonic() - begin < 5
    assert f"The Hub at {url} cannot be reached" in sentence


def test_dry_run_uploads_nothing(hub, server, checkpoint):
    out = hub.push(checkpoint, "user/vit", "--dry-run")
    assert not server.requests
    assert not server.repositories
    for text in ("config.json ", "model.safetensors ", "library_name: timm", "# vit"):
        assert text in out
    hub.push(checkpoint, "user/vit")
    files = server.files("user/vit")
    assert files["README.md"].decode() in out
    assert all(f"{len(files[name]):,} bytes" in out for name in ("README.md", "config.json", "model.safetensors"))


def test_the_check_comes_first(hub, server, checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    content["state_dict"]["head.weight"][0, 0] = float("nan")
    torch.save(content, tmp_path / "nan.pth.tar")
    for options in ([], ["--moe"]):
        assert "head.weight holds NaN or Inf" in hub.refused(tmp_path / "nan.pth.tar", "user/vit", *options)
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    os.truncate(folder / "model.safetensors", 1000)
    assert "vit cannot be created from its config.json and weights" in hub.refused(folder, "user/vit")
    assert [path for _, path, _ in server.requests] == ["/api/whoami-v2"] * 3


# --- the card


def test_card_of_a_checkpoint(checkpoint):
    card = push_dense(checkpoint, "user/my-vit", dry_run=True, license="mit").card
    metadata = front_matter(card)
    assert metadata["tags"] == ["image-classification", "timm", "timm_moe"]
    assert (metadata["library_name"], metadata["license"]) == ("timm", "mit")
    assert "base_model" not in metadata
    (result,) = metadata["model-index"][0]["results"]
    assert result["dataset"] == {"name": "cifar100", "type": "imagefolder"}
    assert "datasets" not in metadata  # torchvision's, not the Hub's
    assert {metric["type"]: metric["value"] for metric in result["metrics"]}["accuracy"] == 51.25
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    assert f"| this model | {sum(p.numel() for p in dense.parameters()):,} |" in card
    expert = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, num_experts=3)
    assert f"| in training, with experts | {sum(p.numel() for p in expert.parameters()):,} |" in card
    assert "From `last.pth.tar`, which timm's train.py wrote after epoch 1 (from 0)." in card
    for text in ("| opt | `adamw` |", "| model option num_experts | `3` |", "| kd_model_name | `teacher` |"):
        assert text in card
    for text in ("mixup", "somebody", str(checkpoint.parent)):
        assert text not in card
    assert "Plain timm loads it" in card
    assert 'timm.create_model("hf-hub:user/my-vit", pretrained=True)' in card
    assert "arXiv:2308.06093" in card
    assert "| top-1 accuracy (%) | 51.25 |" in card


def test_card_of_a_dense_model_made_of_routed_experts_claims_no_results(checkpoints):
    card = push_dense(checkpoints["vit_tiny_moe"], "user/vit", dry_run=True).card
    assert "model-index" not in front_matter(card)
    assert "belongs to the expert model, not to this dense one" in card
    assert "51.25" not in card
    assert "Not stated: ask the publisher" in card
    measured = push_dense(checkpoints["vit_tiny_moe"], "user/vit", dry_run=True, metrics={"top1": 48.5}).card
    assert "Stated by the publisher" in measured
    assert front_matter(measured)["model-index"][0]["results"][0]["metrics"][0]["value"] == 48.5


@pytest.mark.parametrize("change", ["EMA measured", "other run", "recovery", "damaged", "absent"])
def test_results_of_other_weights_are_left_out(checkpoint, tmp_path, change):
    content = torch.load(checkpoint, weights_only=False)
    rows = (checkpoint.parent / "summary.csv").read_bytes()
    if change == "EMA measured":
        content["args"].model_ema = True
    if change == "other run":
        content["metric"] = 50.0
    if change == "recovery":
        del content["metric"]
    torch.save(content, tmp_path / "last.pth.tar")
    if change != "absent":
        (tmp_path / "summary.csv").write_bytes(b"\x00\xff" + rows[::-1] if change == "damaged" else rows)
    assert "## Results" not in push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card


def test_card_names_the_pretrained_weights_and_their_licence(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    content["args"].pretrained = True
    content["args"].dataset = "hfds/uoft-cs/cifar100"
    torch.save(content, tmp_path / "last.pth.tar")
    metadata = front_matter(push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card)
    assert metadata["base_model"] == "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert (metadata["license"], metadata["datasets"]) == ("apache-2.0", ["uoft-cs/cifar100"])
    content["args"].initial_checkpoint = "mine.pth"  # is loaded last
    torch.save(content, tmp_path / "last.pth.tar")
    metadata = front_matter(push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card)
    assert not {"base_model", "license"} & metadata.keys()


def test_models_in_memory():
    model = timm.create_model("widenet_b", num_experts=2, **SMALL_VIT)
    told = {**OPTIONS, "num_experts": 2}  # timm records them by itself only in later versions
    dense, moe = push_dense(model, "user/wide", dry_run=True), push_moe(model, "user/w", dry_run=True, model_args=told)
    for pushed in (dense, moe):
        assert pushed.url is None
        assert "needs the package timm_moe" in pushed.card  # no stock model has shared blocks
        assert "arXiv:2107.11817" in pushed.card
        assert "## Training" not in pushed.card
    assert "mixture-of-experts" in front_matter(moe.card)["tags"]
    assert "mixture-of-experts" not in front_matter(dense.card)["tags"]


# --- expert models on disk


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_ewa_moe", {"eval_mode": "partition", "drop_path_rate": 0.1}),
        ("vimoe_s14_shared", {"shared_init": "zero_out"}),
        ("widenet_b", {"routing_groups": 2, "num_experts": 3}),
        ("vmoe_pbe_s32", {"num_experts": 4, "ensemble": "tiling"}),
        ("vmoe_b32", {"num_experts": 2, "moe_layers": "1", "pre_logits": True, "capacity_factor": "none"}),
    ],
)
def test_every_kind_comes_back(name, options, tmp_path):
    model = timm.create_model(name, **{**SMALL_VIT, **options})
    model.reset_classifier(3)
    cfg = dict(model.pretrained_cfg)
    export_moe(model, tmp_path / "moe", model_args={**OPTIONS, **options})
    assert model.pretrained_cfg == cfg
    loaded = timm.create_model(f"local-dir:{tmp_path / 'moe'}", pretrained=True)
    assert type(loaded) is type(model)
    assert torch.equal(output_of(loaded), output_of(model))
    if hasattr(timm.models, "get_model_args"):
        export_moe(model, tmp_path / "untold")
        assert (tmp_path / "untold/model.safetensors").is_file()
    saved = load_file(tmp_path / "moe/model.safetensors")
    assert all(torch.equal(saved[key], value) for key, value in loaded.state_dict().items())


def test_arguments_that_nobody_told(tmp_path):
    model = timm.create_model("vit_tiny_moe", num_experts=3, top_k=2, **SMALL_VIT)
    model._model_args = {**SMALL_VIT, "num_experts": 3, "top_k": 1}
    with pytest.raises(ValueError, match="outputs differ"):
        export_moe(model, tmp_path / "moe")
    export_moe(model, tmp_path / "moe", model_args={"top_k": 2})
    converted = timm_moe.convert_to_moe(timm.create_model("vit_tiny_patch16_224", **SMALL_VIT))
    with pytest.raises(ValueError, match="converted in memory"):
        export_moe(converted, tmp_path / "converted")
    assert os.listdir(tmp_path) == ["moe"]


# --- bad input


@pytest.mark.parametrize(
    ("repo_id", "options", "message"),
    [
        ("name", {}, "named user/name, got 'name'"),
        ("a/b/c", {}, "no name of a repository"),
        ("user/na me", {}, "no name of a repository"),
        ("hf-hub:user/name", {}, "no name of a repository"),
        ("user/name", {"revision": "a b"}, "name of a branch"),
        ("user/name", {"revision": ""}, "name of a branch"),
    ],
)
def test_bad_destinations(repo_id, options, message):
    with pytest.raises(ValueError, match=message):
        Destination(repo_id, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/file", "user/vit", "--dry-run"], "is neither a file nor a folder"),
        (["{checkpoint}", "user", "--dry-run"], "named user/name"),
        (["{checkpoint}", "user/vit", "--dry-run", "--license", "My Own"], "license must be an abbreviation"),
        (["{checkpoint}", "user/vit", "--dry-run", "--metrics", "top1=high"], "top1 must be a finite number"),
        (["{checkpoint}", "user/vit", "--dry-run", "--metrics", "top1=float('nan')"], "top1 must be a finite number"),
        (["{checkpoint}", "user/vit", "--dry-run", "--model", "vit_tiny_moe"], "do not fit"),
        (["{folder}", "user/vit", "--dry-run"], "has no config.json"),
    ],
)
def test_bad_arguments(checkpoint, tmp_path, capsys, arguments, message):
    arguments = [argument.format(checkpoint=checkpoint, folder=tmp_path) for argument in arguments]
    assert main(["push", *arguments]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("timm-moe: error: ")
    assert message in error


def test_what_is_no_expert_model(checkpoint, dense_vit, tmp_path):
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    with pytest.raises(ValueError, match="holds no expert model; leave out --moe"):
        push_moe(folder, "user/vit", dry_run=True)
    with pytest.raises(ValueError, match="has no expert layers"):
        push_dense(dense_vit, "user/vit", method="svd", dry_run=True)
    assert "Plain timm loads it" in push_dense(dense_vit, "user/vit", model_args=SMALL_VIT, dry_run=True).card
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        push_dense(folder, "user/vit", dry_run=True)


def test_the_command_takes_what_export_takes(checkpoint, tmp_path, capsys):
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    torch.save({"state_dict": state}, tmp_path / "bare.pth")
    kwargs = [*SMALL_VIT_KWARGS, "num_experts=3"]
    for options in ([], ["--moe"]):
        arguments = ["push", str(tmp_path / "bare.pth"), "user/vit", "--dry-run", "--dataset", "digits", *options]
        model = ["--model", "vit_tiny_ewa_moe", "--num-classes", "5", "--model-kwargs", *kwargs]
        assert main([*arguments, "--metrics", "top1=12.5", *model]) == 0
        out = capsys.readouterr().out
        assert "| top-1 accuracy (%) | 12.5 |" in out
        assert "From `bare.pth`." in out
        assert "Stated by the publisher on digits." in out
