"""Publishing on a Hub: the real client of huggingface_hub against a server on the loopback."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
import timm
import torch
from common import SMALL_VIT
from hub_client import READ_TOKEN, TOKEN, client_environment, front_matter, output_of
from huggingface_hub.errors import OfflineModeIsEnabled
from PIL import Image
from processes import free_port
from safetensors.torch import load_file, save_file

import timm_moe
from timm_moe.export.export import export_moe
from timm_moe.export.hub import asking_the_hub
from timm_moe.export.push import push_dense

LOAD = """
import gc, importlib.abc, os, sys
gc.disable()
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
    folder = Path(snapshot_download(repo_id, revision=revision or None))
    result = {
        "class": type(model).__name__,
        "files": sorted(path.name for path in folder.iterdir()),
        "tensors": model.state_dict(),
        "output": output,
    }
    torch.save(result, file)
assert ("timm_moe" in sys.modules) == (sys.argv[1] == "package")
os._exit(0)  # skips the interpreter's own end, which takes a second
"""


@pytest.fixture
def checkpoint(checkpoints):
    return checkpoints["vit_tiny_ewa_moe"]


def load(server, folder, environment, *names):
    """Models that another process gets from the Hub by name.

    Its environment has the package or is plain.
    """
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


def assert_same(loaded, model):
    expected = model.state_dict()
    assert loaded["tensors"].keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded["tensors"].items())
    assert torch.equal(loaded["output"], output_of(model))


def assert_plain(server, checkpoint, folder, weights_by_name):
    """Assert that timm alone loads these names as stock models.

    They have the weights of the checkpoint.
    """
    expert = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, num_experts=3)
    state = torch.load(checkpoint, weights_only=False)
    loaded = load(server, folder, "plain", *weights_by_name)
    for result, weights in zip(loaded, weights_by_name.values(), strict=True):
        expert.load_state_dict(state[weights])
        assert result["class"] == "VisionTransformer"
        assert result["files"] == [
            ".gitattributes",
            "README.md",
            "config.json",
            "model.safetensors",
        ]
        assert_same(result, timm_moe.to_dense(expert))


@pytest.mark.ci
def test_plain_timm_loads_what_was_pushed(hub, server, checkpoint, tmp_path):
    out = hub.push(checkpoint, "user/vit")
    assert 'Load it with timm.create_model("hf-hub:user/vit", pretrained=True).' in out
    assert_plain(server, checkpoint, tmp_path, {"hf-hub:user/vit": "state_dict"})


@pytest.mark.ci
def test_branches_pull_requests_and_ema_weights(hub, server, checkpoint, tmp_path):
    hub.push(checkpoint, "user/vit")
    hub.push(checkpoint, "user/ema", "--use-ema", "--private")
    hub.push(checkpoint, "user/vit", "--use-ema", "--revision", "ema")
    out = hub.push(checkpoint, "user/ema", "--create-pr")
    assert f"{server.url}/user/ema/discussions/1" in out
    assert '"hf-hub:user/ema@refs/pr/1"' in out
    hub.push(checkpoint, "user/ema", "--revision", "refs/pr/1", "--license", "mit")
    assert server.messages("user/ema", "refs/pr/1") == ["Add model"] * 3 + ["initial commit"]
    weights = {"hf-hub:user/vit": "state_dict", "hf-hub:user/ema": "state_dict_ema"}
    weights |= {"hf-hub:user/vit@ema": "state_dict_ema", "hf-hub:user/ema@refs/pr/1": "state_dict"}
    assert_plain(server, checkpoint, tmp_path, weights)
    assert (
        server.messages("user/vit")
        == server.messages("user/ema")
        == ["Add model", "initial commit"]
    )
    # It began at main.
    assert server.messages("user/vit", "ema") == ["Add model", "Add model", "initial commit"]
    assert [server.repositories[name].private for name in ("user/vit", "user/ema")] == [False, True]
    # The same weights are stored once.
    assert sum(method == "PUT" for method, _, _ in server.requests) == 2


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
        assert [metric["value"] for metric in metrics] == [51.25, 2.5]


def test_a_repository_is_exported(hub, checkpoint, tmp_path):
    hub.push(checkpoint, "user/vit", "--moe")
    status, _, err = hub.run("export", "hf-hub:user/vit", tmp_path / "from_hub")
    assert status == 0, err
    timm_moe.export_dense(checkpoint, tmp_path / "from_file")
    exported = [
        load_file(tmp_path / name / "model.safetensors") for name in ("from_hub", "from_file")
    ]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())


def test_a_folder_that_was_exported_is_uploaded_as_it_is(hub, server, checkpoint, tmp_path):
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
def test_a_folder_of_experts_is_published_as_a_checkpoint_is(hub, server, checkpoints, tmp_path):
    """Dense, or with --moe with its experts; its README.md is the card of the experts."""
    for name, checkpoint in checkpoints.items():
        folder = export_moe(checkpoint, tmp_path / name)
        (folder / "README.md").write_text("Mine.")
        hub.push(folder, f"user/{name}", "--moe")
        pushed = server.files(f"user/{name}")
        for file in ("README.md", "config.json", "model.safetensors"):
            assert pushed[file] == (folder / file).read_bytes()
        assert server.messages(f"user/{name}") == ["Add model", "initial commit"]
        hub.push(folder, f"user/{name}", "--revision", "dense")
        pushed = server.files(f"user/{name}", "dense")
        assert json.loads(pushed["config.json"])["architecture"] == "vit_tiny_patch16_224"
        assert pushed["README.md"] != b"Mine."
        _, _, told = hub.run("push", folder, "a/b", "--dry-run", "--use-ema")
        assert "is about its experts, so it is not uploaded" in told
        assert "has one kind of weights" in told
        assert "of 5 classes, not 3" in hub.refused(folder, "a/b", "--num-classes", "3")
    dense = timm_moe.export_dense(checkpoint, tmp_path / "dense").path
    assert "has no expert layers" in hub.refused(dense, "user/vit", "--method", "svd")
    assert "leave out --moe" in hub.refused(dense, "user/vit", "--moe")


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
    assert (
        json.loads((tmp_path / "again/config.json").read_text())["pretrained_cfg"]["license"]
        == "cc-by-nc-4.0"
    )


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


def test_of_other_weights_only_the_order_of_the_classes_is_published(
    checkpoint, hub, server, tmp_path
):
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "head.bias": weights["head.bias"] + 1}, folder / "model.safetensors")
    recorded = json.loads((folder / "config.json").read_text())["timm_moe"]
    hub.push(folder, "user/vit")
    stated = json.loads(server.files("user/vit")["config.json"])["timm_moe"]
    assert stated.pop("weights") != recorded["weights"]
    assert stated == {"file": "vit", "numbering": recorded["numbering"]}


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
    assert "There are 4 names" in sentence


def test_nothing_new_is_no_commit(hub, server, checkpoint):
    assert "/user/vit/commit/" in hub.push(checkpoint, "user/vit")
    hub.push(checkpoint, "user/vit", "--revision", "other", "--license", "mit")
    for options in ([], ["--create-pr"], ["--revision", "other", "--license", "mit"]):
        out = hub.push(checkpoint, "user/vit", *options)
        assert (
            f"Nothing changed: {server.url}/user/vit has these very files already, so nothing was "
            "uploaded." in out
        )
        assert not re.search("commit/|discussions|in one commit", out)
    assert server.repositories["user/vit"].revisions.keys() == {"main", "other"}
    assert server.messages("user/vit") == ["Add model", "initial commit"]
    assert server.messages("user/vit", "other") == ["Add model", "Add model", "initial commit"]
    assert "/user/vit/commit/" in hub.push(checkpoint, "user/vit", "--license", "mit")


def test_what_would_change_the_model_does_not_stay_beside_the_model(hub, server, checkpoint):
    repository = server.create("user/vit")
    names = (
        "adapter_config.json",
        "adapter_model.safetensors",
        "preprocessor_config.json",
        "processor_config.json",
        "notes.txt",
    )
    parent = repository.revisions["main"]
    repository.add_commit("main", parent, "Adapter", dict.fromkeys(names, server.keep_blob(b"{}")))
    hub.push(checkpoint, "user/vit")
    assert sorted(server.files("user/vit")) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "notes.txt",
    ]


def test_what_the_client_says_comes_once_and_without_bars(hub, server, checkpoint):
    _, _, first = hub.run("push", checkpoint, "user/vit")
    _, _, second = hub.run("push", checkpoint, "user/vit")
    assert "No files have been modified" in second
    for text in (first, second):
        lines = text.splitlines()
        assert len(set(lines)) == len(lines), text
        assert not re.search(r"\r|\d%|B/s", text)


# --- what goes wrong


def test_who_may_not_push(hub, server, checkpoint):
    assert "run hf auth login, or" in hub.refused(checkpoint, "user/vit", token=None)
    assert not server.requests
    assert "does not know your token" in hub.refused(checkpoint, "user/vit", token="hf_wrongSecret")
    assert "may only read" in hub.refused(checkpoint, "user/vit", token=READ_TOKEN)
    assert "characters that no token has" in hub.refused(checkpoint, "user/vit", token="hf_Sécret")
    (hub.folder / "token").write_text(TOKEN)  # as hf auth login leaves it
    assert "write to other/vit" in hub.refused(checkpoint, "other/vit", token=None)
    (hub.folder / "token").unlink()
    server.create("other/vit")
    assert "write to other/vit" in hub.refused(checkpoint, "other/vit")
    assert server.messages("other/vit") == ["initial commit"]
    hub.push(checkpoint, "other/vit", "--create-pr")  # anybody may propose a change
    assert server.requests[-1][1] == "/api/models/other/vit/commit/main?create_pr=1"
    assert server.messages("other/vit") == ["initial commit"]
    assert server.messages("other/vit", "refs/pr/1") == ["Add model", "initial commit"]


def test_where_nothing_can_be_pushed(hub, server, checkpoint):
    server.create("user/data", "dataset")
    sentence = hub.refused(checkpoint, "user/data")
    assert "user/data is taken" in sentence
    assert "You already created this dataset" in sentence
    server.create("user/public")
    assert "user/public is there already" in hub.refused(checkpoint, "user/public", "--private")
    assert server.messages("user/public") == ["initial commit"]
    sentence = hub.refused(checkpoint, "user/vit", "--license", "my-own")
    assert 'README.md: "license" must be one of [apache-2.0, ...], got my-own' in sentence
    assert "user/vit" not in server.repositories
    server.faults.quota = 1000
    assert "user/vit: Private repository storage" in hub.refused(checkpoint, "user/vit")
    server.faults.answers = {"commit": [402]}
    server.faults.quota = float("inf")
    assert "does not let you write to user/vit: " in hub.refused(checkpoint, "user/vit")
    assert server.messages("user/vit") == ["initial commit"]


def test_the_client_tries_again_after_server_errors(hub, server, checkpoint):
    server.faults.answers = {
        step: [503] for step in ("preupload", "lfs_batch", "upload", "lfs_verify")
    }
    server.faults.answers["upload"] = [500]
    hub.push(checkpoint, "user/vit")
    assert not any(server.faults.answers.values())
    assert server.messages("user/vit") == ["Add model", "initial commit"]


def test_server_errors_that_stay(hub, server, checkpoint):
    server.create("user/vit")
    faults = {"whoami": [500], "validate_yaml": [429], "preupload": [502] * 6, "commit": [500]}
    for step, statuses in faults.items():
        server.faults.answers = {step: [*statuses]}
        sentence = hub.refused(checkpoint, "user/vit")
        assert f"The Hub failed ({statuses[0]}: " in sentence
        assert server.messages("user/vit") == ["initial commit"]
    hub.push(checkpoint, "user/vit")


def test_a_client_that_was_told_to_stay_offline():
    """To try again, as after other errors of connections, would not help."""
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set"), asking_the_hub():
        raise OfflineModeIsEnabled("Cannot reach the Hub.")


def test_a_connection_that_breaks_in_the_upload(hub, server, checkpoint):
    server.create("user/vit")
    server.faults.cuts = 6  # the client tries five times more
    assert "cannot be reached" in hub.refused(checkpoint, "user/vit")
    assert server.faults.cuts == 0
    assert set(server.files("user/vit")) == {".gitattributes"}
    server.faults.cuts = 1
    hub.push(checkpoint, "user/vit")
    assert server.messages("user/vit") == ["Add model", "initial commit"]
    assert len(server.files("user/vit")) == 4


@pytest.mark.parametrize(
    "step", ["commit", "preupload", "create", "branch", "validate_yaml", "lfs_batch", "upload"]
)
@pytest.mark.first_case
def test_a_hub_that_accepts_and_does_not_answer(hub, server, checkpoint, step):
    server.faults.silent = (step,)
    begin = time.monotonic()
    sentence = hub.refused(checkpoint, "user/vit", "--revision", "new", patience=0.2)
    assert time.monotonic() - begin < 15
    assert f"The Hub at {server.url} does not answer" in sentence
    assert "0.2 seconds" in sentence
    assert re.search(r"and \d+ in all", sentence)
    server.faults.silent = ()
    hub.push(checkpoint, "user/vit", "--revision", "new")  # nothing of it stays
    assert server.messages("user/vit", "new") == ["Add model", "initial commit"]


def test_no_network(hub, checkpoint):
    url = f"http://127.0.0.1:{free_port()}"
    _, out, _ = hub.run("push", checkpoint, "user/vit", "--dry-run", token=None, url=url)
    assert f"Dry run; a push would upload to {url}/user/vit:" in out
    begin = time.monotonic()
    sentence = hub.refused(checkpoint, "user/vit", url=url)
    assert time.monotonic() - begin + hub.paused < 5
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
    assert all(
        f"{len(files[name]):,} bytes" in out
        for name in ("README.md", "config.json", "model.safetensors")
    )


def test_the_check_comes_first(hub, server, checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    content["state_dict"]["head.weight"][0, 0] = float("nan")
    torch.save(content, tmp_path / "nan.pth.tar")
    for options in ([], ["--moe"]):
        assert "head.weight holds NaN" in hub.refused(
            tmp_path / "nan.pth.tar", "user/vit", *options
        )
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    weights = load_file(folder / "model.safetensors")
    weights["head.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "head.weight holds NaN" in hub.refused(folder, "user/vit")
    os.truncate(folder / "model.safetensors", 1000)
    assert "vit cannot be created" in hub.refused(folder, "user/vit")
    (folder / "README.md").symlink_to(hub.folder / "token")
    assert "README.md leads out of" in hub.refused(folder, "user/vit")
    assert [path for _, path, _ in server.requests] == ["/api/whoami-v2"] * 5
