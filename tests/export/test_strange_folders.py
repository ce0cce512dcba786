"""Folders of strangers.

Links lead out of them, and numbers are not finite.
"""

import os
import shutil

import pytest
import timm
import torch
from common import OPTIONS, edit
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

import timm_moe
from timm_moe.export import push as push_module
from timm_moe.export.export import export_moe
from timm_moe.export.push import push_dense, push_moe

SECRET = "hf_TokenOfTheUser"


@pytest.fixture
def home(tmp_path):
    """The user's own files: a token, and a private model."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(SECRET)
    model = timm.create_model("vit_tiny_ewa_moe", num_classes=5, **OPTIONS)
    save_for_hf(model, str(home / "private"), model_args=OPTIONS, safe_serialization=True)
    return home


@pytest.fixture
def stranger(ewa_vit, tmp_path):
    """A folder that was downloaded."""
    save_for_hf(ewa_vit, str(tmp_path / "stranger"), model_args=OPTIONS, safe_serialization=True)
    edit(tmp_path / "stranger", lambda config: config["model_args"].pop("num_classes", None))
    return tmp_path / "stranger"


def link(file, target):
    file.unlink(missing_ok=True)
    file.symlink_to(target)


def chain(folder, home):
    link(folder / "weights.txt", home / "token")
    link(folder / "README.md", "weights.txt")


def through_a_folder(folder, home):
    (folder / "docs").symlink_to(home)
    link(folder / "README.md", "docs/token")


def nested(folder, home):
    (folder / "a/b").mkdir(parents=True)
    link(folder / "README.md", "a/b/../../../home/token")


def of_another_repository(folder, home):
    """Lay out both as in the Hub's cache."""
    other = folder.parent / "models--user--other/blobs"
    other.mkdir(parents=True)
    (other / "0123").write_text(SECRET)
    link(folder / "README.md", other / "0123")


LINKS = {
    "the token": lambda folder, home: link(folder / "README.md", home / "token"),
    "dots": lambda folder, home: link(folder / "README.md", "../home/token"),
    "a chain": chain,
    "through a folder": through_a_folder,
    "nested": nested,
    "a folder": lambda folder, home: link(folder / "README.md", home),
    "a folder beside": lambda folder, home: link(folder / "examples", home),
    "not there yet": lambda folder, home: link(folder / "README.md", home / "later"),
    "another repository": of_another_repository,
    "the config": lambda folder, home: link(folder / "config.json", home / "private/config.json"),
    "the weights": lambda folder, home: link(
        folder / "model.safetensors", home / "private/model.safetensors"
    ),
}
PUSHES = {
    "push_dense": push_dense,
    "push_moe": push_moe,
    "a student": lambda *arguments, **options: push_dense(*arguments, method="sum", **options),
}


@pytest.mark.parametrize("push", PUSHES)
@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.first_case
def test_what_leads_out_of_a_folder_is_refused_before_it_is_read(
    stranger, home, monkeypatch, kind, push
):
    LINKS[kind](stranger, home)
    monkeypatch.setattr(
        push_module, "opened", lambda *arguments, **options: pytest.fail("it is read")
    )
    with pytest.raises(ValueError, match=r"leads out of .*stranger") as caught:
        PUSHES[push](f"local-dir:{stranger}", "user/vit", dry_run=True)
    assert SECRET not in str(caught.value)
    assert any(file.name in str(caught.value) for file in stranger.iterdir() if file.is_symlink())


def test_links_inside_a_folder_and_to_it_are_followed(stranger, tmp_path):
    (stranger / "files").mkdir()
    (stranger / "files/card.md").write_text("Mine.")
    (stranger / "model.safetensors").rename(stranger / "files/weights")
    link(stranger / "README.md", "files/card.md")
    link(stranger / "model.safetensors", stranger / "files/weights")
    link(tmp_path / "latest", stranger)
    for folder in (stranger, tmp_path / "latest", f"{stranger}/../latest"):
        assert push_moe(folder, "user/vit", dry_run=True).card == "Mine."


@pytest.mark.parametrize("shared", [False, True])
def test_a_folder_in_the_hubs_cache(stranger, tmp_path, shared):
    cache = tmp_path / "hub"
    snapshot, blobs = cache / "models--user--vit/snapshots/0123", cache / "models--user--vit/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(stranger.iterdir())):
        blob = blobs / str(number)
        if shared:  # between the repositories of the cache, by hash
            name = f"{number}" * 64
            store = cache / "blobs" / name[:2] / name
            store.parent.mkdir(parents=True)
            shutil.copy(file, store)
            blob.symlink_to(f"../../blobs/{name[:2]}/{name}")
        else:
            shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert push_moe(snapshot, "user/vit", dry_run=True).files.keys() == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    (cache / "models--user--other/blobs").mkdir(parents=True)
    (cache / "models--user--other/blobs/9").write_text(SECRET)
    for target in (
        "../../../models--user--other/blobs/9",
        "../../../blobs/token",
        "../../refs/main",
    ):
        link(snapshot / "README.md", target)
        with pytest.raises(ValueError, match=r"README\.md leads out .*0123"):
            push_moe(snapshot, "user/vit", dry_run=True)


def test_an_error_names_the_folder_that_was_given(stranger):
    os.truncate(stranger / "model.safetensors", 1000)
    with pytest.raises(ValueError, match=f"^local-dir:{stranger} cannot be created"):
        push_moe(stranger, "user/vit", dry_run=True)


@pytest.mark.parametrize("function", [timm_moe.export_dense, export_moe, push_dense, push_moe])
@pytest.mark.first_case
def test_the_table_beside_a_checkpoint(checkpoint, home, tmp_path, function):
    """Measurements are published, so they must lie where the checkpoint lies."""
    content = {**torch.load(checkpoint, weights_only=False), "metric": 50.0}
    content["args"].eval_metric = "top1"
    torch.save(content, checkpoint)
    (home / "summary.csv").write_text("epoch,eval_loss,eval_top1\n1,2.5,50.0\n")
    options = {"dry_run": True} if function in (push_dense, push_moe) else {}
    link(tmp_path / "summary.csv", "home/../last.csv")
    (tmp_path / "last.csv").write_text((home / "summary.csv").read_text())
    function(checkpoint, "out/inside" if options else tmp_path / "inside", **options)
    (tmp_path / "run").mkdir()
    shutil.copy(checkpoint, tmp_path / "run/last.pth.tar")
    link(tmp_path / "run/summary.csv", home / "summary.csv")
    with pytest.raises(ValueError, match=r"summary\.csv leads out .*run"):
        function(
            tmp_path / "run/last.pth.tar",
            "out/outside" if options else tmp_path / "outside",
            **options,
        )
    assert not (tmp_path / "outside").exists()


def test_weights_that_are_not_finite(stranger, ewa_vit, monkeypatch):
    """Refuse them as every export does."""
    dense = timm_moe.export_dense(ewa_vit, stranger.parent / "dense", model_args=OPTIONS).path
    weights = load_file(dense / "model.safetensors")
    weights["head.weight"][0, 0] = float("inf")
    save_file(weights, dense / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        ewa_vit.head.weight[0, 0] = float("inf")
    save_for_hf(ewa_vit, str(stranger), model_args=OPTIONS, safe_serialization=True)
    for folder, pushes in ((stranger, PUSHES.values()), (dense, (push_dense,))):
        for push in pushes:
            with pytest.raises(ValueError, match=r"^head\.weight .*NaN"):
                push(folder, "user/vit", dry_run=True)


def test_outputs_that_are_not_finite(stranger, ewa_vit):
    with torch.no_grad():
        ewa_vit.norm.weight.fill_(1e38)
        ewa_vit.head.weight.fill_(1e38)
    save_for_hf(ewa_vit, str(stranger), model_args=OPTIONS, safe_serialization=True)
    for push in PUSHES.values():
        with pytest.raises(ValueError, match=r"outputs .*NaN"):
            push(stranger, "user/vit", dry_run=True)
