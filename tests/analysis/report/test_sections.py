"""The sentences of a report's sections, of made-up observations."""

from dataclasses import replace

import pytest
import torch
from observations import layer_of, seen_as, with_two_members

from timm_moe.analysis.info import measure
from timm_moe.analysis.report import charts
from timm_moe.analysis.report.sections.classifier import classifier_section
from timm_moe.analysis.report.sections.model import model_section
from timm_moe.analysis.report.sections.patches import _shaded
from timm_moe.analysis.report.sections.routing import routing_section
from timm_moe.export.history import History
from timm_moe.models.registered import weightless_model


def test_dead_experts_are_named():
    told = routing_section(seen_as([layer_of([50, 1, 49, 0], dropped=7)])).parts[0].text
    assert told == (
        "Chosen for less than a tenth of an even share: blocks.1.mlp: 1, 3. This counts 100 "
        "choices in evaluation. 7 of them found no place and were dropped. The dashed line is an "
        "even share."
    )
    told = routing_section(seen_as([layer_of([30, 20, 25, 25])])).parts[0].text
    assert told == (
        "None has less than a tenth of an even share. The least chosen, expert 1 of blocks.1.mlp, "
        "has 80% of it. This counts 100 choices in evaluation. None of them was dropped. The "
        "dashed line is an even share."
    )
    members = with_two_members(layer_of([30, 20, 25, 25]))
    assert "gets 50% at most" in routing_section(seen_as([members])).parts[1].text
    by_image = replace(layer_of([30, 20, 25, 25]), by_image=True)
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
        (
            [0.4, 0.5, 0.6],
            [0, 0, 0],
            "Under-confident on average: confidence 50.0%, accuracy 100.0%",
        ),
        (
            [0.5, 0.5],
            [0, 1],
            "Neither over- nor under-confident on average, as far as 2 images can tell",
        ),
        (
            [0.9, 0.9, 0.8],
            [0, 1, 1],
            "Neither over- nor under-confident on average, as far as 3 images can tell",
        ),
        ([0.9], [1], "Neither over- nor under-confident on average, as far as 1 images can tell"),
    ],
)
def test_over_confidence_is_told(confidence, predicted, verdict):
    parts = {
        part.title: part
        for part in classifier_section({"m": seen_as([], confidence, predicted)}).parts
    }
    assert parts["Is it as sure as it is right?"].text.startswith(verdict)


def preference(counts, labels, name="blocks.1.mlp"):
    """The sentences on how the classes of so many images are spread over the experts."""
    layer = layer_of(counts, labels=labels, classes=("cat", "dog"), name=name)
    return routing_section(seen_as([layer])).parts[1].text


def test_how_much_experts_prefer_classes_is_told():
    labels = [0, 1] * 50
    told = preference([[9, 0], [0, 9]] * 50, labels)
    assert told.startswith(
        "Strong preferences. In blocks.1.mlp the class of an image says 100% of which expert is "
    )
    assert (
        "The largest share in blocks.1.mlp: expert 0 gets 100% of cat; an even share is 50%."
        in told
    )
    assert preference([[8, 1], [1, 8]] * 50, labels).startswith("Strong preferences.")
    assert preference([[7, 3], [3, 7]] * 50, labels).startswith("Clear preferences.")
    assert preference([[6, 4], [4, 6]] * 50, labels).startswith("Weak preferences.")
    assert preference([[5, 4], [5, 4]] * 50, labels).startswith("No preference beyond chance.")
    # All on one expert.
    assert preference([[9, 0], [9, 0]] * 50, labels).startswith("No preference beyond chance.")
    # three images say 58 % of nothing: each has an expert, and one of them a class, to itself
    assert preference([[9, 0, 0], [0, 9, 0], [0, 0, 9]], [0, 0, 1]).startswith(
        "No preference beyond chance."
    )


def test_the_heaviest_patch_is_the_brightest_and_one_without_weight_dark():
    pixels = torch.full((3, 4, 4), 200, dtype=torch.uint8)
    assert _shaded(pixels, torch.zeros(2, 2)).eq(30).all()
    shaded = _shaded(pixels, torch.tensor([[0.0, 0.4], [0.2, 0.4]]))
    for corner in (shaded[:, ::2, ::2], shaded[:, 1::2, 1::2]):
        assert corner.tolist() == [[[30, 200], [115, 200]]] * 3


def test_accuracy_stands_beside_the_error():
    table = classifier_section({"m": seen_as([])}).parts[0].table
    assert [row for row in table if row[0] in ("error", "top-1 accuracy")] == [
        ["top-1 accuracy", "100.00%"],
        ["error", "0.00%"],
    ]


@pytest.mark.parametrize(
    ("top_k", "told"), [(1, "its only choice"), (2, "the first of its 2 choices")]
)
def test_what_a_patch_without_colour_is(top_k, told):
    layer = with_two_members(layer_of([1, 1], top_k=top_k))
    texts = []
    for expert in (0, 2):
        layer.expert_SMP[:] = expert
        (part,) = [
            part for part in routing_section(seen_as([layer])).parts if "patches go" in part.title
        ]
        texts.append(part.text)
    assert "without colour" not in texts[0]
    assert f"Of a patch without colour, {told} found no place and was dropped." in texts[1]
    assert all("the list has each one's choices" in text for text in texts)


@pytest.mark.ci  # seven models of full size
def test_members_shared_experts_and_ema_are_named():
    def told(name, history=History(), **options):  # noqa: B008
        model = weightless_model(name, **options)
        return model_section(model, measure(weightless_model(name, **options), name), history).parts

    _, size = told("vmoe_pbe_s32", num_experts=4)
    assert ["members", "2; member 1 has experts 0 to 1, member 2 has experts 2 to 3"] in size.table
    assert (
        "a shared expert, which every token passes through, in blocks."
        in told("vimoe_s14_shared")[0].text
    )
    assert "shared expert" not in told("vimoe_s14")[0].text
    assert "No router chooses" in told("vit_tiny_ewa_moe")[0].text
    assert "A router chooses one expert for each token." in told("vit_tiny_moe", top_k=1)[0].text
    assert "A router chooses 2 experts for each token." in told("vmoe_s32", top_k=2)[0].text
    assert "for each image; all of its tokens go there" in told("vimoe_s14")[0].text
    assert "an ensemble of 2 members in one" in told("vmoe_pbe_s32", num_experts=4)[0].text
    assert "no expert layers" in told("vit_xtiny")[0].text
    origin = told("vit_tiny_moe", History("last.pth.tar", ema=True))[-1]
    assert ["weights", "the EMA weights of the checkpoint"] in origin.table


def test_the_most_confused_classes_come_first():
    seen = seen_as([], [0.5] * 5, [1, 1, 2, 0, 1], ("cat", "dog", "owl"))
    table = classifier_section({"m": seen}).parts[-1].table
    assert table[1:] == [["cat", "dog", "5", "60%"], ["cat", "owl", "5", "20%"]]


SITTING = [
    ("twins_svt_small_ewa_moe", dict(depths=(2, 2, 2, 2)), 8, 4, "blocks.0.1.mlp"),
    ("cait_xxs24_224_ewa_moe", dict(depth=6), 8, 4, "blocks_token_only.1.mlp"),
    ("tnt_s_patch16_224_ewa_moe", dict(depth=4), 8, 4, "blocks.3.mlp"),
    ("pit_xs_32_ewa_moe", {}, 12, 6, "transformers.0.blocks.1.mlp"),
    ("widenet_b", dict(depth=3), 3, 3, "block 2"),
    ("vit_tiny_moe", {}, 12, 6, "block 1"),
]


@pytest.mark.parametrize(("name", "options", "networks", "places", "box"), SITTING)
@pytest.mark.first_case
def test_every_feed_forward_network_is_drawn_where_it_is(name, options, networks, places, box):
    model = weightless_model(name, **options)
    part = model_section(model, measure(weightless_model(name, **options), name), History()).parts[
        0
    ]
    drawn = part.routes["blocks"]
    assert len({block["name"] for block in drawn}) == len(drawn) == networks
    assert sum(block["experts"] > 0 for block in drawn) == places
    assert part.text.startswith(f"{places} of {networks} feed-forward networks hold ")
    assert next(block["experts"] for block in drawn if block["name"] == box) > 0
    assert ("They share one expert layer" in part.text) == (name == "widenet_b")


def test_small_heat_maps_have_numbers_and_large_ones_none():
    def marks(experts):
        rows = [
            {"expert": expert, "other": other, "value": 0.5}
            for expert in range(experts)
            for other in range(experts)
        ]
        layers = charts.heatmap(rows).to_dict()["layer"]
        return [layer["mark"]["type"] for layer in layers]

    assert marks(4) == ["rect", "text"]
    assert marks(16) == ["rect"]
