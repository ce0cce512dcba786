"""The report: what it says against what is so, and the page in a real browser."""

import json
import sys

import numpy as np
import pytest
import timm
import torch
from common import SMALL_VIT
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import timm_moe.report
from timm_moe.analysis.data import Inference, image_folder, load_classifiers
from timm_moe.analysis.evaluation import evaluate
from timm_moe.analysis.routes import collect_routes
from timm_moe.export.history import History
from timm_moe.info import measure, weightless_model
from timm_moe.report import write_report
from timm_moe.report.alike import likeness
from timm_moe.report.observe import SHOWN, SUREST, LayerObservation, Observation, Patch, observe
from timm_moe.report.page import page
from timm_moe.report.sections import (
    alike_section,
    classifier_section,
    model_section,
    routing_section,
    run_section,
)
from timm_moe.training.epoch_log import FILE, relative_distance_to_mean
from timm_moe_cli import main

HERE = Inference(batch_size=7, workers=0, device="cpu")
#: A folder may have any name.
CLASSES = ["apple", "baby", "<script><b>chair", "dolphin", 'elephant "grey"']


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for split, number in (("val", 4), ("other", 2)):
        for label, name in enumerate(CLASSES):
            place = folder / split / name.replace("/", "")
            place.mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, 90, (32, 32, 3)) + 30 * label
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{index}.png")
    return folder


def make_model(name="vit_tiny_moe", **options):
    model = timm.create_model(name, **{**SMALL_VIT, **options}).eval()
    nn.init.normal_(model.head.weight, std=0.3)
    for layer in timm_moe.moe_layers(model).values():
        if hasattr(layer.router, "weight"):
            nn.init.normal_(layer.router.weight)
    return model


def observed(model, data, ood=None):
    images = image_folder(data)
    (model,) = load_classifiers([model], images, inference=HERE)
    return observe(model, "model", images, ood, HERE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_moe", dict(top_k=2)),
        ("vimoe_s14", {}),
        ("vmoe_pbe_s32", dict(num_experts=4)),
        ("widenet_b", dict(depth=2)),
        ("vmoe_mimo_s32", dict(num_experts=4)),
    ],
)
def test_it_sees_what_evaluate_and_routes_do(name, options, data):
    model = make_model(name, **{**SMALL_VIT, **options})
    images, other = image_folder(data), image_folder(data, "other")
    seen = observed(model, data, other)
    expected = evaluate([model], images, other, inference=HERE)
    assert seen.figures == pytest.approx(expected, nan_ok=True)
    assert len(seen.confidence) == 20
    assert len(seen.ood_confidence) == 10
    assert (seen.predicted != seen.labels).double().mean().item() == pytest.approx(expected["error"])
    for layer, routes in zip(seen.layers, collect_routes(model, images, HERE), strict=True):
        assert layer.name == routes.layer
        assert torch.equal(layer.count_IE, routes.count_IE)
        assert layer.load.sum().item() == pytest.approx(1)
        assert layer.grid == (4, 4)
        assert layer.expert_SMP.shape == layer.gate_SMP.shape == (min(SHOWN, 20), layer.members, 16)


def test_patches_experts_and_pairs_are_those_of_the_routers(data):
    model = make_model(top_k=1, capacity_factor=None)
    model.pretrained_cfg["crop_pct"] = 1.0
    seen = observed(model, data)
    files = [name for name, _ in image_folder(data).reader.samples]
    images = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file in files])
    assert torch.equal(seen.shown_pixels, images[seen.shown].permute(0, 3, 1, 2))
    inputs = {}
    for path, layer in timm_moe.moe_layers(model).items():
        layer.router.register_forward_pre_hook(lambda _, given, path=path: inputs.setdefault(path, given[0]))
    with torch.no_grad():
        model((images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
    first, second = seen.layers
    gates = {
        path: (inputs[path] @ layer.router.weight.T).softmax(2) for path, layer in timm_moe.moe_layers(model).items()
    }
    gate_BN, expert_BN = gates[first.name].max(2)
    assert torch.equal(first.expert_SMP[:, 0], expert_BN[seen.shown, 1:])
    torch.testing.assert_close(first.gate_SMP[:, 0], gate_BN[seen.shown, 1:], rtol=1e-4, atol=1e-4)
    pairs = torch.zeros(4, 4, dtype=torch.long)
    for here, there in zip(expert_BN.flatten(), gates[second.name].argmax(2).flatten(), strict=True):
        pairs[here, there] += 1
    assert torch.equal(first.next_EE, pairs)
    assert second.next_EE is None
    for expert, patches in enumerate(first.surest):
        best = torch.where(expert_BN[:, 1:] == expert, gate_BN[:, 1:], -1).amax(1).sort(descending=True).values
        best = best[best >= 0][:SUREST]
        torch.testing.assert_close(torch.tensor([patch.gate for patch in patches]), best, rtol=1e-4, atol=1e-4)
        assert all(patch.pixels.shape == (3, 24, 24) for patch in patches)
    entropy = torch.special.entr(gates[first.name]).sum(2).flatten() / torch.tensor(4.0).log()
    assert torch.equal(first.entropy, torch.histc(entropy, 20, 0, 1))


def test_a_full_expert_does_not_hide_that_the_others_are_idle(data):
    model = make_model(top_k=1, capacity_factor=1.0, eval_capacity_factor=1.0)
    for layer in timm_moe.moe_layers(model).values():
        nn.init.zeros_(layer.router.weight)  # all rows choose the first expert
    seen = observed(model, data)
    assert seen.layers[0].load.tolist() == [1, 0, 0, 0]
    assert seen.layers[0].dropped > 200
    assert seen.layers[0].expert_SMP.max() == 4  # of a patch that was dropped
    told = routing_section(seen).parts[0].text
    assert "blocks.1.mlp: 1, 2, 3" in told
    assert "of them found no place" in told


def test_every_member_of_an_ensemble_has_its_patches(data):
    seen = observed(make_model("vmoe_pbe_s32", num_experts=4), data)
    layer = seen.layers[0]
    assert all(layer.surest)
    own = [layer.expert_SMP[:, member].unique().tolist() for member in range(2)]
    assert max(own[0]) < 2 <= min(own[1])
    shown = routing_section(seen).parts[2].routes["layers"]
    assert [given["name"] for given in shown[:2]] == [f"{layer.name}, member 1", f"{layer.name}, member 2"]
    assert shown[1]["expert"] == layer.expert_SMP[:, 1].tolist()


def test_experts_that_are_alike_are_called_so(data, ewa_vit):
    images = image_folder(data)
    model = ewa_vit.eval()
    for layer in timm_moe.moe_layers(model).values():
        for _, stacked in layer.named_expert_parameters():
            stacked.data[:] = stacked.data[:1].clone()
    alike = likeness(model, images, HERE)
    assert [layer.layer for layer in alike] == list(timm_moe.moe_layers(model))
    for layer in alike:
        torch.testing.assert_close(layer.weights_EE, torch.ones(4, 4))
        torch.testing.assert_close(layer.outputs_EE, torch.ones(4, 4))
    changed = timm_moe.moe_layers(model)["blocks.1.mlp"]
    for _, stacked in changed.named_expert_parameters():
        stacked.data[3] = torch.randn_like(stacked[3])
    first = likeness(model, images, HERE)[0]
    assert first.weights_EE[0, 3] < 0.5
    assert first.outputs_EE[0, 3] < 0.9
    assert first.spread == relative_distance_to_mean(changed) > 0.1
    (part,) = alike_section([first]).parts
    assert f"blocks.1.mlp {first.spread:.3g}" in part.text


def layer_of(load, dropped=0, experts=None):
    experts = experts or len(load)
    return LayerObservation(
        name="blocks.1.mlp",
        experts=experts,
        top_k=1,
        by_image=False,
        count_IME=torch.tensor([[load]]),
        dropped=dropped,
        entropy=torch.ones(20),
        grid=(2, 2),
        expert_SMP=torch.zeros(1, 1, 4, dtype=torch.long),
        gate_SMP=torch.full((1, 1, 4), 0.5),
        surest=[[Patch(0.5, torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] for _ in range(experts)],
    )


def with_two_members(layer):
    layer.count_IME = layer.count_IME.repeat(1, 2, 1)
    layer.expert_SMP, layer.gate_SMP = layer.expert_SMP.repeat(1, 2, 1), layer.gate_SMP.repeat(1, 2, 1)


def seen_as(layers, confidence=(0.9,), predicted=(0,), classes=("cat", "dog")):
    labels = torch.zeros(len(confidence), dtype=torch.long)
    return Observation(
        classes=list(classes),
        labels=labels,
        predicted=torch.tensor(predicted),
        confidence=torch.tensor(confidence),
        ood_confidence=None,
        figures={"images": len(confidence), "members": 1, "nll": 0.1, "error": 0.0, "ece": 0.1, "brier": 0.1},
        layers=layers,
        shown=[0],
        shown_pixels=torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
    )


def test_dead_experts_are_named():
    told = routing_section(seen_as([layer_of([50, 1, 49, 0], dropped=7)])).parts[0].text
    assert told == (
        "Chosen for less than a tenth of an even share: blocks.1.mlp: 1, 3. This counts 100 choices in evaluation. 7 "
        "of them found no place and were dropped. The dashed line is an even share."
    )
    told = routing_section(seen_as([layer_of([30, 20, 25, 25])])).parts[0].text
    assert told == (
        "None has less than a tenth of an even share. The least chosen, expert 1 of blocks.1.mlp, has 80% of it. This "
        "counts 100 choices in evaluation. None of them was dropped. The dashed line is an even share."
    )
    members = layer_of([30, 20, 25, 25])
    with_two_members(members)
    assert "gets 50% at most" in routing_section(seen_as([members])).parts[1].text
    by_image = layer_of([30, 20, 25, 25])
    by_image.by_image = True
    assert "This counts 1 choices in" in routing_section(seen_as([by_image])).parts[0].text
    assert routing_section(seen_as([])) is None


@pytest.mark.parametrize(
    ("confidence", "predicted", "verdict"),
    [
        (
            [0.9, 0.9, 0.8] * 9,
            [0, 1, 1] * 9,
            "Over-confident on average: confidence 86.7%, accuracy 33.3%, difference +53.3",
        ),
        ([0.4, 0.5, 0.6], [0, 0, 0], "Under-confident on average: confidence 50.0%, accuracy 100.0%"),
        ([0.5, 0.5], [0, 1], "Neither over- nor under-confident on average, as far as 2 images can tell"),
        ([0.9, 0.9, 0.8], [0, 1, 1], "Neither over- nor under-confident on average, as far as 3 images can tell"),
        ([0.9], [1], "Neither over- nor under-confident on average, as far as 1 images can tell"),
    ],
)
def test_over_confidence_is_told(confidence, predicted, verdict):
    parts = {part.title: part for part in classifier_section({"m": seen_as([], confidence, predicted)}).parts}
    assert parts["Is it as sure as it is right?"].text.startswith(verdict)


def preference(counts, labels, name="blocks.1.mlp"):
    """What the page says of how the classes of so many images are spread over the experts."""
    layer = layer_of(counts[0])
    layer.count_IME, layer.name = torch.tensor(counts).unsqueeze(1), name
    seen = seen_as([layer], [0.9] * len(labels), [0] * len(labels))
    seen.labels[:] = torch.tensor(labels)
    return routing_section(seen).parts[1].text


def test_how_much_experts_prefer_classes_is_told():
    labels = [0, 1] * 50
    told = preference([[9, 0], [0, 9]] * 50, labels)
    assert told.startswith("Strong preferences. In blocks.1.mlp the class of an image says 100% of which expert is ")
    assert "The largest share in blocks.1.mlp: expert 0 gets 100% of cat; an even share is 50%." in told
    assert preference([[8, 1], [1, 8]] * 50, labels).startswith("Strong preferences.")
    assert preference([[7, 3], [3, 7]] * 50, labels).startswith("Clear preferences.")
    assert preference([[6, 4], [4, 6]] * 50, labels).startswith("Weak preferences.")
    assert preference([[5, 4], [5, 4]] * 50, labels).startswith("No preference beyond chance.")
    assert preference([[9, 0], [9, 0]] * 50, labels).startswith("No preference beyond chance.")  # all on one expert
    # three images say 58 % of nothing: each has an expert, and one of them a class, to itself
    assert preference([[9, 0, 0], [0, 9, 0], [0, 0, 9]], [0, 0, 1]).startswith("No preference beyond chance.")


def test_the_classs_information_is_the_mutual_information():
    layer = layer_of([0, 0])
    layer.count_IME = torch.tensor([[[30, 10]], [[20, 40]]])
    joint = np.array([[0.3, 0.1], [0.2, 0.4]])
    own = np.outer(joint.sum(1), joint.sum(0))
    expert = joint.sum(0)
    expected = (joint * np.log(joint / own)).sum() / -(expert * np.log(expert)).sum()
    assert layer.class_information(torch.tensor([0, 1]), 2) == pytest.approx(expected)
    # of two members with experts of their own, to which the class says all and nothing
    layer.experts, layer.count_IME = 4, torch.tensor([[[9, 0, 0, 0], [0, 0, 5, 4]], [[0, 9, 0, 0], [0, 0, 5, 4]]])
    nothing = -(5 / 9 * np.log(5 / 9) + 4 / 9 * np.log(4 / 9))
    expected = np.log(2) / (np.log(2) + nothing)
    assert layer.class_information(torch.tensor([0, 1]), 2) == pytest.approx(expected)


def test_accuracy_stands_beside_the_error():
    table = classifier_section({"m": seen_as([])}).parts[0].table
    assert [row for row in table if row[0] in ("error", "top-1 accuracy")] == [
        ["error", "0.00%"],
        ["top-1 accuracy", "100.00%"],
    ]


@pytest.mark.parametrize(("top_k", "told"), [(1, "its only choice"), (2, "the first of its 2 choices")])
def test_what_a_patch_without_colour_is(top_k, told):
    layer = layer_of([1, 1])
    layer.top_k = top_k
    with_two_members(layer)
    texts = []
    for expert in (0, 2):
        layer.expert_SMP[:] = expert
        (part,) = [part for part in routing_section(seen_as([layer])).parts if "patches go" in part.title]
        texts.append(part.text)
    assert "without colour" not in texts[0]
    assert f"Of a patch without colour, {told} found no place and was dropped." in texts[1]
    assert all("the list has each one's choices" in text for text in texts)


def test_members_shared_experts_and_ema_are_named():
    def told(name, history=History(), **options):  # noqa: B008
        model = weightless_model(name, **options)
        return model_section(model, measure(weightless_model(name, **options), name), history).parts

    _, size = told("vmoe_pbe_s32", num_experts=4)
    assert ["members", "2; member 1 has experts 0 to 1, member 2 has experts 2 to 3"] in size.table
    assert "a shared expert, which every token passes through, in blocks." in told("vimoe_s14_shared")[0].text
    assert "shared expert" not in told("vimoe_s14")[0].text
    assert "No router chooses" in told("vit_tiny_ewa_moe")[0].text
    assert "A router chooses one expert for each token." in told("vit_tiny_moe", top_k=1)[0].text
    assert "A router chooses 2 experts for each token." in told("vmoe_s32", top_k=2)[0].text
    assert "for each image; all of its tokens go there" in told("vimoe_s14")[0].text
    assert "learned weights fuse" in told("vit_tiny_ewa_moe", router="fused")[0].text
    assert "an ensemble of 2 members in one" in told("vmoe_pbe_s32", num_experts=4)[0].text
    assert "no expert layers" in told("vit_be_s32")[0].text
    origin = told("vit_tiny_moe", History("last.pth.tar", ema=True))[-1]
    assert ["weights", "the EMA weights of the checkpoint"] in origin.table


def test_the_most_confused_classes_come_first():
    seen = seen_as([], [0.5] * 5, [1, 1, 2, 0, 1], ("cat", "dog", "owl"))
    table = classifier_section({"m": seen}).parts[-1].table
    assert table[1:] == [["cat", "dog", "5", "60%"], ["cat", "owl", "5", "20%"]]


def test_the_run_tells_whether_experts_came_together(tmp_path):
    assert run_section(None) is None
    assert run_section(tmp_path) is None
    (tmp_path / "summary.csv").write_text(
        "epoch,train_loss,eval_loss,eval_top1,lr\n0,2.0,1.5,40,0.1\n1,1.0,1.2,60,0.1\n1,1.0,1.3,58,0.1\n2,nan,1.4,,0\n"
    )
    epochs = [
        {"epoch": epoch, "share_rate": 0.1, "layers": {"a": {"spread": 0.4 / (1 + epoch)}, "b": {"spread": None}}}
        for epoch in range(3)
    ]
    (tmp_path / FILE).write_text(json.dumps({"epochs": epochs}))
    parts = parts_of(tmp_path)
    told = parts["Did the experts come together?"].text
    assert told.startswith("They came closer to each other. Averaging was on. Their distance from their mean was 0.4 ")
    assert "0.4 after epoch 0 and 0.133 after epoch 2, on average over the layers" in told
    assert parts["Does the loss still fall?"].text == (
        "The evaluation loss was lowest in epoch 1: 1.3. In the last epoch, 2, it was 1.4. The training loss is that "
        "of augmented images, with label smoothing and the routers' losses in it. "
        "Left out: epoch 2, where it was not a finite number. The run may have diverged there."
    )
    assert parts["How accurate was it in each epoch?"].text.startswith("Top-1 ended at 58.00 %; the best was 58.00 %")
    (tmp_path / FILE).write_text("[")
    with pytest.raises(ValueError, match="is damaged"):
        run_section(tmp_path)


def test_what_the_routers_did_in_training_is_told(tmp_path):
    loads = [[0.3, 0.3, 0.4], [0.02, 0.48, 0.5]]
    layers = [{"spread": 1.0, "losses": {"balance": 1.1}, "load": load, "dropped": 0.25} for load in loads]
    epochs = [{"epoch": epoch, "share_rate": None, "layers": {"a": layer}} for epoch, layer in enumerate(layers)]
    (tmp_path / FILE).write_text(json.dumps({"epochs": epochs}))
    parts = parts_of(tmp_path)
    told = parts["Is every expert used in training?"].text
    assert told.startswith("In the last epoch, 1, these had less than a tenth of an even share: expert 0 of a.")
    assert "up to 25.0% of a layer's choices were dropped" in parts["How many choices found no place?"].text
    (tmp_path / FILE).write_text(json.dumps({"epochs": epochs[:1]}))
    told = parts_of(tmp_path)["Is every expert used in training?"].text
    assert told.startswith("In the last epoch, 0, none had less than a tenth of an even share.")


def parts_of(folder):
    return {part.title: part for part in run_section(folder).parts}


def write_epochs(folder, spreads, share_rate=0.1, first=0):
    epochs = [
        {"epoch": epoch, "share_rate": share_rate, "layers": {"a": {"spread": value}}}
        for epoch, value in enumerate(spreads, first)
    ]
    (folder / FILE).write_text(json.dumps({"epochs": epochs}))


@pytest.mark.parametrize(
    ("spreads", "verdict"),
    [
        ([0.02, 0.02], "They were together all along."),
        ([1.5, 0.01], "They came together."),
        ([1.5, 1.5], "They did not: their distance hardly changed."),
        ([1.0, 1.5], "They moved apart."),
        ([1.0], "They are not together."),
    ],
)
def test_whether_experts_are_together_is_judged_by_where_they_end(spreads, verdict, tmp_path):
    write_epochs(tmp_path, spreads, first=3)
    told = parts_of(tmp_path)["Did the experts come together?"].text
    assert told.startswith(f"{verdict} Averaging was on.")
    assert f"{spreads[0]:.3g} after epoch 3" in told


def test_without_averaging_there_is_no_verdict(tmp_path):
    for rate, told in ((None, "Nothing averaged the experts. "), (0.0, "experts (the share rate was 0). ")):
        write_epochs(tmp_path, [1.5, 1.4], rate)
        parts = parts_of(tmp_path)
        assert "Did the experts come together?" not in parts
        assert told in parts["How far apart are the experts in training?"].text
        assert parts["How far apart are the experts in training?"].text.startswith("Their distance hardly changed.")


def test_a_run_that_diverged_has_a_report(tmp_path):
    (tmp_path / "summary.csv").write_text(
        "epoch,train_loss,eval_loss,eval_top1,eval_top5\n5,2,1.5,nan,90\n6,nan,nan,nan,80\n7,nan,nan,nan,80\n9,inf,,,\n"
    )
    layers = [{"spread": 1.0, "losses": {"balance": 1.0}, "load": [0.5, 0.5], "dropped": 0.1}]
    layers += [{"spread": None, "losses": {"balance": None}, "load": [0.0, None], "dropped": None}]
    epochs = [{"epoch": epoch, "share_rate": None, "layers": {"a": layer}} for epoch, layer in enumerate(layers)]
    (tmp_path / FILE).write_text(json.dumps({"epochs": epochs}))
    parts = parts_of(tmp_path)
    lost = "where it was not a finite number. The run may have diverged there."
    told = parts["Does the loss still fall?"].text
    assert told.startswith("The evaluation loss was lowest in the last epoch, 5: 1.5. The training loss is that of ")
    assert told.endswith(f"in it. Left out: epochs 6 to 7 and 9, {lost}")
    assert parts["How accurate was it in each epoch?"].text == f"Left out: epochs 5 to 7, {lost}"
    assert parts["What did the routers' losses do?"].text.endswith(f"1 for balance. Left out: epoch 1, {lost}")
    (tmp_path / "summary.csv").write_text("epoch,train_loss\n0,nan\n")
    assert parts_of(tmp_path)["Does the loss still fall?"].chart is None
    (tmp_path / "summary.csv").write_bytes(b"epoch\xff")
    with pytest.raises(ValueError, match=r"summary\.csv is damaged"):
        run_section(tmp_path)


def test_top_5_of_five_classes_is_left_out(tmp_path):
    (tmp_path / "summary.csv").write_text("epoch,eval_top1,eval_top5\n0,40,100\n")
    for classes, series in ((5, {"top-1"}), (6, {"top-1", "top-5"})):
        (part,) = run_section(tmp_path, classes).parts
        assert {row["accuracy"] for row in part.chart["data"]["values"]} == series


def test_a_damaged_run_is_told_before_the_images_are_seen(data, tmp_path, monkeypatch):
    (tmp_path / FILE).write_text('{"epochs": [{"epoch": 0}]}')
    (tmp_path / "last.pth.tar").touch()
    monkeypatch.setattr(timm_moe.report, "load_classifiers", lambda *_: pytest.fail("The model was loaded."))
    with pytest.raises(ValueError, match=f"{FILE} is damaged"):
        write_report([tmp_path / "last.pth.tar"], image_folder(data), tmp_path / "out")


SITTING = [
    ("twins_svt_small_ewa_moe", {}, 18, 9, "blocks.0.1.mlp"),
    ("cait_xxs24_224_ewa_moe", {}, 26, 13, "blocks_token_only.1.mlp"),
    ("tnt_s_patch16_224_ewa_moe", {}, 24, 12, "blocks.3.mlp"),
    ("pit_xs_32_ewa_moe", {}, 12, 6, "transformers.0.blocks.1.mlp"),
    ("widenet_b", dict(depth=3), 3, 3, "block 2"),
    ("vit_tiny_moe", {}, 12, 6, "block 1"),
]


@pytest.mark.parametrize(("name", "options", "networks", "places", "box"), SITTING)
def test_every_feed_forward_network_is_drawn_where_it_is(name, options, networks, places, box):
    model = weightless_model(name, **options)
    part = model_section(model, measure(weightless_model(name, **options), name), History()).parts[0]
    drawn = part.routes["blocks"]
    assert len({block["name"] for block in drawn}) == len(drawn) == networks
    assert sum(block["experts"] > 0 for block in drawn) == places
    assert part.text.startswith(f"{places} of {networks} feed-forward networks hold ")
    assert next(block["experts"] for block in drawn if block["name"] == box) > 0
    assert ("They share one expert layer" in part.text) == (name == "widenet_b")


@pytest.mark.ci
def test_a_thousand_classes_stay_below_ten_megabytes(tmp_path):
    classes = [f"class number {number}" for number in range(1000)]
    generator = torch.Generator().manual_seed(0)
    layers = []
    for number in range(12):
        layer = layer_of([0], experts=32)
        layer.name = f"blocks.{number}.mlp"
        layer.count_IME = torch.randint(50, (2000, 1, 32), generator=generator)
        layer.grid = (14, 14)
        layer.expert_SMP = torch.randint(32, (SHOWN, 1, 196), generator=generator)
        layer.gate_SMP = torch.rand(SHOWN, 1, 196, generator=generator)
        layer.next_EE = torch.randint(99, (32, 32), generator=generator) if number < 11 else None
        layer.surest = [
            [
                Patch(0.5, torch.randint(256, (3, 48, 48), generator=generator).byte(), 0)  # noise packs worst
                for _ in range(SUREST)
            ]
            for _ in range(32)
        ]
        layers.append(layer)
    seen = seen_as(layers, [0.5] * 2000, [3] * 2000, classes)
    seen.labels[:] = torch.arange(2000) % 1000
    seen.shown[:] = range(SHOWN)
    seen = Observation(
        **{**vars(seen), "shown_pixels": torch.randint(256, (SHOWN, 3, 224, 224), generator=generator).byte()}
    )
    text = page("Title", "", [{"": routing_section(seen)}, {"": classifier_section({"m": seen})}])
    assert len(text) < 10 * 2**20


@pytest.fixture(scope="module")
def report(data, tmp_path_factory):
    """The page of two models, of which one was trained by timm's loop."""
    folder = tmp_path_factory.mktemp("report")
    torch.manual_seed(0)
    images = image_folder(data)
    models = [make_model("vit_tiny_moe", num_experts=4), make_model("vmoe_pbe_s32", num_experts=4)]
    return write_report(models, images, folder / "page", image_folder(data, "other"), inference=HERE)


def test_nothing_of_a_name_becomes_code(report):
    text = report.read_text()
    assert "<script><b>" not in text
    assert "&lt;script&gt;&lt;b&gt;chair" in text
    assert "\\u003cscript>\\u003cb>chair" in text


def test_the_command(data, tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    kwargs = [f"{name}={value}" for name, value in SMALL_VIT.items() if name != "num_classes"]
    save_file(make_model().state_dict(), tmp_path / "a.safetensors")
    save_file(make_model().state_dict(), tmp_path / "b.safetensors")
    sources = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    options = ["--data-dir", str(data), "-j", "0", "--device", "cpu", "--model", "vit_tiny_moe", "--num-classes", "5"]
    options += ["--model-kwargs", *kwargs, "--img-size", "32"]
    assert main(["report", *sources, *options, str(tmp_path / "out")]) == 0
    assert "open it in a browser" in capsys.readouterr().out
    text = (tmp_path / "out/index.html").read_text()
    for name in ("a.safetensors", "b.safetensors"):
        assert f"<h4>{name}</h4>" in text
    assert "<h1>What the experts do: vit_tiny_moe</h1>" in text
    assert f"on 20 images of 5 classes in {data.name}/val" in text
    assert main(["report", sources[0], str(tmp_path / "out"), *options]) == 1
    assert "index.html exists; pass --overwrite" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", sources[0], *options, str(tmp_path / "out"), "--overwritten"])
    assert "unrecognized arguments" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "altair", None)
    for name in [name for name in sys.modules if name.startswith("timm_moe.report")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report", sources[0], *options, "--overwrite", str(tmp_path / "other")]) == 1
    assert "The report needs altair: pip install 'timm_moe[report]'" in capsys.readouterr().err


# --- in a browser

#: Elements that are wider than their part, where nothing around them scrolls.
STICKING_OUT = """
const out = (inner, part) => inner.right > part.right + 1 || inner.left < part.left - 1;
return [...document.querySelectorAll(".part *")]
  .filter((inner) => !inner.ownerSVGElement && !inner.parentElement.closest(".scroll") && inner.offsetParent !== null)
  .filter((inner) => out(inner.getBoundingClientRect(), inner.closest(".part").getBoundingClientRect()))
  .map((inner) => inner.outerHTML.slice(0, 150));
"""


def opened(browser, report, width=1200):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")
    browser.get(f"file://{report}")
    browser.execute_async_script("window.drawn.then(() => arguments[0]())")
    return lambda selector: browser.find_elements("css selector", selector)


@pytest.mark.ci
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_opens_whole_without_an_error_or_a_request(browser, report, width):
    find = opened(browser, report, width)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    headings = [heading.text for heading in find("h2")]
    assert headings == ["The model", "Who goes where", "How alike are the experts?", "The classifier"]
    left, right = (figure.rect for figure in find("#routing-2 figure"))
    assert (left["y"] == right["y"]) == (left["x"] != right["x"]) == (width > 1000)  # side by side where there is room
    labels = [label.get_attribute("textContent") for label in find(".role-axis-label text")]
    assert labels
    assert not any("e+" in label for label in labels)
    assert len(find(".chart svg")) == len(find(".chart")) > 5
    assert all(chart.size["width"] > 200 for chart in find(".chart svg"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(STICKING_OUT) == []
    links = [link.get_attribute("href").partition("#")[2] for link in find("nav a")]
    assert all(find(f"[id='{link}']") for link in links)


@pytest.mark.ci
def test_tables_are_sorted_and_searched_and_layers_chosen_by_keyboard(browser, report):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    find = opened(browser, report)
    table = "#routing-2-1 "

    def column(number):
        return [int(row.find_elements("css selector", "td")[number].text) for row in find(table + "tbody tr")]

    for expert in (2, 0):
        button = find(table + "thead button")[expert + 1]
        button.send_keys(Keys.ENTER)
        assert column(expert) == sorted(column(expert), reverse=True)
        assert find(table + "thead th")[expert + 1].get_attribute("aria-sort") == "descending"
        assert browser.switch_to.active_element.text == str(expert)
        browser.switch_to.active_element.send_keys(Keys.ENTER)
        assert column(expert) == sorted(column(expert))
        assert find(table + "thead th")[expert + 1].get_attribute("aria-sort") == "ascending"
    shown = [row.text for row in find(table + "tbody tr")]
    Select(find(table + "select")[0]).select_by_index(0)
    assert [row.text for row in find(table + "tbody tr")] != shown
    find(table + "input")[0].send_keys("DOL")
    assert [row.text for row in find(table + "tbody th")] == ["dolphin"]
    patches = "#routing-3-1 "

    def colours():
        return [mark.get_attribute("fill") for mark in find(patches + "rect")]

    before = colours()
    assert len(before) == SHOWN * 16
    Select(find(patches + "select")[0]).select_by_index(0)
    assert colours() != before
    assert all(mark.is_displayed() for mark in find(patches + "rect"))
    find(patches + "input")[0].send_keys(Keys.SPACE)
    assert not any(mark.is_displayed() for mark in find(patches + "rect"))


@pytest.mark.ci
def test_the_bars_are_those_of_the_layer_that_is_chosen(browser, report):
    from selenium.webdriver.support.ui import Select

    find = opened(browser, report)

    def shares():
        """Told to screen readers, of the first model."""
        labels = [bar.get_attribute("aria-label") for bar in find("#routing-1-1 .mark-rect path")]
        return [float(label.rpartition(": ")[2].removesuffix("%")) for label in labels]

    both = []
    for layer in range(2):
        Select(find("#routing-1-1 select")[0]).select_by_index(layer)
        both.append(shares())
        assert len(both[-1]) == 4
        assert sum(both[-1]) == pytest.approx(100, abs=0.3)
    assert both[0] != both[1]
    assert len(find("#routing-1-1 .role-mark.mark-rule line")) == 1


@pytest.mark.ci
@pytest.mark.parametrize("dark", [False, True])
def test_everyone_can_read_it(browser, report, dark):
    from axe_core_python.selenium import Axe

    find = opened(browser, report)
    if (find("html")[0].get_attribute("data-theme") == "dark") != dark:
        find("#theme")[0].click()
    assert find("html")[0].get_attribute("data-theme") == ("dark" if dark else "light")
    found = Axe().run(browser)["violations"]
    assert [(violation["id"], violation["nodes"][0]["html"]) for violation in found] == []
