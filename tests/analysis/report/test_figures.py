"""The figures in the charts, tables and pictures of a report, of made-up observations."""

import base64
import io
from dataclasses import replace

import pytest
import torch
from common import make_model
from observations import HERE, layer_of, seen_as, with_two_members
from PIL import Image

from timm_moe.analysis.data import image_folder
from timm_moe.analysis.report.observe import LayerObservation, Patch
from timm_moe.analysis.report.sections import similarity
from timm_moe.analysis.report.sections.classifier import classifier_section
from timm_moe.analysis.report.sections.patches import _caption, _sheet
from timm_moe.analysis.report.sections.routing import routing_section
from timm_moe.analysis.report.sections.run import Run, run_of_model, run_section
from timm_moe.analysis.report.sections.similarity import ExpertSimilarity, similarity_section


def by_title(section):
    return {part.title: part for part in section.parts}


def test_every_model_has_its_own_column_and_rows():
    one, two = seen_as([], [0.9] * 2, [0, 1]), seen_as([], [0.6] * 2, [1, 1])
    two.figures.update(nll=0.7, members=2, pairwise_kl=0.3)
    parts = by_title(classifier_section({"a": one, "b": two}))
    table = {row[0]: row[1:] for row in parts["The figures"].table}
    assert (table[""], table["NLL"]) == (["a", "b"], ["0.1000", "0.7000"])
    assert table["KL, earlier from later"] == ["", "0.3000"]
    confused = parts["Which classes are confused most?"].table
    assert confused[1:] == [["a", "cat", "dog", "2", "50%"], ["b", "cat", "dog", "2", "100%"]]
    values = parts["How sure is it?"].chart["data"]["values"]
    assert {row["images"] for row in values} == {"a, these images", "b, these images"}


def test_charts_of_confidence_have_the_figures_of_their_bins():
    seen = replace(
        seen_as([], [0.81, 0.86, 0.72], [0, 1, 0]), ood_confidence=torch.tensor([0.1, 0.1])
    )
    parts = by_title(classifier_section({"m": seen}))
    _, points = parts["Is it as sure as it is right?"].chart["layer"]
    rows = [
        {name: pytest.approx(value) for name, value in row.items() if name != "model"}
        for row in points["data"]["values"]
    ]
    assert rows == [
        {"confidence": 0.72, "accuracy": 1.0, "images": 1},
        {"confidence": 0.835, "accuracy": 0.5, "images": 2},
    ]
    values = parts["How sure is it?"].chart["data"]["values"]
    shares = {
        (row["images"], round(row["value"], 3)): row["share"] for row in values if row["share"]
    }
    assert shares == {
        ("these images", 0.725): pytest.approx(1 / 3),
        ("these images", 0.825): pytest.approx(1 / 3),
        ("these images", 0.875): pytest.approx(1 / 3),
        ("other data", 0.125): 1,
    }


def test_the_interval_of_the_calibration_is_in_points():
    seen = seen_as([], [0.9, 0.9, 0.8] * 9, [0, 1, 1] * 9)
    told = by_title(classifier_section({"m": seen}))["Is it as sure as it is right?"]
    right = (seen.predicted == seen.labels).double()
    half = 196 * (seen.confidence.double() - right).std().item() / 27**0.5
    assert f"±{half:.1f}), expected calibration error 0.100" in told.text


def test_a_difference_below_the_tolerance_is_no_over_confidence():
    told = by_title(classifier_section({"m": seen_as([], [0.995] * 9, [0] * 9)}))
    assert told["Is it as sure as it is right?"].text.startswith("Neither")


def test_charts_and_the_table_of_routing_have_the_figures_of_each_layer():
    labels, classes = [0, 1], ("cat", "dog")
    weak = layer_of([[6, 4], [4, 6]], labels=labels, classes=classes, name="a")
    strong = layer_of([[8, 1, 1, 0], [0, 0, 2, 8]], labels=labels, classes=classes, name="b")
    strong.entropy = torch.arange(20.0)
    seen = seen_as([weak, strong], classes=("ant", "cat", "dog"))
    parts = by_title(routing_section(seen))
    died = parts["Did any expert die?"]
    assert [(row["layer"], row["share"]) for row in died.chart["data"]["values"]] == [
        *(("a", 0.5), ("a", 0.5)),
        *(("b", 0.4), ("b", 0.05), ("b", 0.15), ("b", 0.4)),
    ]
    assert "dashed" not in died.text  # an even share is another one in each layer
    routes = parts["Which expert sees which class?"].routes
    assert routes["classes"] == classes
    assert routes["layers"] == [
        {"name": "a", "share": [[60, 40], [40, 60]], "even": 50},
        {"name": "b", "share": [[80, 10, 10, 0], [0, 0, 20, 80]], "even": 25},
    ]
    assert "In b the class of an image" in parts["Which expert sees which class?"].text
    rows = parts["How sure are the routers?"].chart["data"]["values"]
    assert [row["share"] for row in rows if row["layer"] == "b"] == pytest.approx(
        (strong.entropy / 190).tolist()
    )
    assert rows[0]["value"] == 0.025


def test_the_least_chosen_expert_of_all_layers_is_named():
    layers = [layer_of([30, 20, 25, 25], name="a"), layer_of([25, 25, 24, 26], name="b")]
    told = routing_section(seen_as(layers)).parts[0].text
    assert "The least chosen, expert 1 of a, has 80% of it." in told


def test_choices_of_whole_images_are_those_of_each_member():
    layer = replace(with_two_members(layer_of([8, 4, 2, 2], top_k=3)), by_image=True)
    assert "This counts 6 choices in" in routing_section(seen_as([layer])).parts[0].text


def test_patches_are_shown_with_their_own_gates_and_labels():
    layer = with_two_members(layer_of([1, 1]))
    layer.gate_SMP[:, 1] = 0.25
    seen = seen_as([layer], predicted=(1,))
    (part,) = [p for p in routing_section(seen).parts if p.title.startswith("Which patches go")]
    assert [drawn["gate"] for drawn in part.routes["layers"]] == [[[50] * 4], [[25] * 4]]
    assert part.routes["labels"] == ["cat, predicted dog"]
    pixels = torch.zeros(3, 2, 2)
    patches = [Patch(0.9, pixels, 0), Patch(0.4, pixels, 1)]
    assert _caption(patches, ["cat", "dog"]) == "gates 0.40 to 0.90; of cat, dog"


def test_a_row_of_a_sheet_is_an_expert():
    dark = torch.zeros(3, 4, 4, dtype=torch.uint8)
    data = _sheet([[dark, dark], []]).partition(",")[2]
    sheet = Image.open(io.BytesIO(base64.b64decode(data))).convert("L")
    cells = [[sheet.getpixel((24 + 48 * x, 24 + 48 * y)) < 128 for x in (0, 1)] for y in (0, 1)]
    assert cells == [[True, True], [False, False]]


def test_around_a_patch_are_its_neighbours():
    seen = LayerObservation(False, (2, 5), [])
    pixels = torch.arange(2 * 5).view(2, 5).repeat_interleave(4, 0).repeat_interleave(4, 1)
    around = seen._around(pixels.expand(3, 8, 20), 8)  # row 1, column 3
    assert around[0, ::4, ::4].tolist() == [[2, 3, 4], [7, 8, 9]]
    seen = LayerObservation(False, (5, 4), [])
    pixels = torch.arange(20).view(5, 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
    around = seen._around(pixels.expand(3, 20, 16), 8)  # row 2, column 0
    assert around[0, ::4, ::4].tolist() == [[4, 5, 6], [8, 9, 10], [12, 13, 14]]


def test_the_surest_patches_are_of_their_own_images():
    seen = LayerObservation(False, (1, 2), [[], []])
    gates = torch.tensor([[[0.6, 0.1]], [[0.2, 0.9]]])
    pixels = torch.arange(2, dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 4, 8)
    for first in (0, 10):
        seen._add_surest(torch.zeros(2, 1, 2), gates - first / 100, pixels, torch.tensor([4, 7]))
    found = [(round(p.gate, 2), int(p.pixels.max()), p.label) for p in seen.surest[0]]
    assert found == [(0.9, 1, 7), (0.8, 1, 7), (0.6, 0, 4), (0.5, 0, 4)]
    assert seen.surest[1] == []


def test_cosines_of_weights_and_outputs_are_shown_as_such():
    weights, outputs = torch.tensor([[1, 0.2], [0.2, 1]]), torch.tensor([[1, 0.7], [0.7, 1]])
    (part,) = similarity_section([ExpertSimilarity("a", weights, outputs, None)]).parts
    rows = part.chart["data"]["values"]
    assert [
        (row["of"], round(row["value"], 3)) for row in rows if row["expert"] < row["other"]
    ] == [
        ("weights, a", 0.2),
        ("outputs, a", 0.7),
    ]


def test_experts_are_compared_on_images_of_all_classes(splits, monkeypatch):
    seen, chosen = [], similarity.chosen
    monkeypatch.setattr(similarity, "IMAGES", 5)
    monkeypatch.setattr(
        similarity, "chosen", lambda images, some: seen.extend(some) or chosen(images, some)
    )
    similarity.expert_similarity(make_model().eval(), image_folder(splits), HERE)
    assert seen == [0, 4, 8, 12, 16]  # one of each class


def test_experts_are_compared_on_rows_of_all_images(splits, monkeypatch):
    rows, output = [], similarity._output
    monkeypatch.setattr(similarity, "IMAGES", 5)
    monkeypatch.setattr(similarity, "ROWS", 50)
    monkeypatch.setattr(
        similarity, "_output", lambda *args: rows.append(len(args[2])) or output(*args)
    )
    similarity.expert_similarity(make_model().eval(), image_folder(splits), HERE)
    assert set(rows) == {43}  # every second one of 17 tokens of 5 images


def test_figures_of_a_run_are_those_of_their_layers_and_epochs():
    def layer(load, dropped, spread):
        return {"load": load, "dropped": dropped, "spread": spread, "losses": {"z": dropped}}

    epochs = [
        {
            "epoch": 0,
            "share_rate": 0.3,
            "layers": {"a": layer([0.5] * 2, 0.4, 1.0), "b": layer([0.09] + [0.13] * 7, 0.2, 0.5)},
        },
        {
            "epoch": 1,
            "share_rate": 0.0,
            "layers": {"a": layer([0.5] * 2, 0.1, 0.7), "b": layer([0.09] + [0.13] * 7, 0.2, 0.5)},
        },
    ]
    parts = by_title(run_section(Run(epochs=epochs)))
    assert "none had less than a tenth" in parts["Is every expert used in training?"].text
    assert "up to 20.0% of a layer's" in parts["How many choices found no place?"].text
    spread = parts["Did the experts come together?"].text
    assert spread.startswith("They came closer to each other. Averaging was on.")
    assert "was 0.75 after epoch 0 and 0.6 after epoch 1" in spread
    rates = parts["How much are the experts averaged?"].chart["data"]["values"]
    assert [row["value"] for row in rates] == [0.3, 0.0]
    losses = parts["What did the routers' losses do?"].chart["data"]["values"]
    assert [(row["layer"], row["loss"], row["value"]) for row in losses[:2]] == [
        ("a", "z", 0.4),
        ("b", "z", 0.2),
    ]
    for title in ("Is every expert used in training?", "How many choices found no place?"):
        assert parts[title].chart["encoding"]["y"]["axis"]["format"] == "%"


def test_an_epoch_with_a_layer_that_the_model_lacks_is_left_out():
    epochs = [{"epoch": 0, "share_rate": 0.3, "layers": {"blocks.1.mlp": {}, "blocks.2.mlp": {}}}]
    assert run_of_model(Run(epochs=epochs), make_model("vit_tiny_ewa_moe")).epochs == []
