"""The tokens of Soft MoE's slots and of Expert Choice's experts.

They are compared with the routers' weights applied by hand.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import SMALL_VIT_KWARGS, make_model, write_images
from observations import HERE, observed
from PIL import Image
from safetensors.torch import save_file

from timm_moe import convert_to_moe, moe_layers
from timm_moe.analysis.data import image_folder, load_classifiers
from timm_moe.analysis.report.sections.routing import routing_section
from timm_moe.analysis.routes.mixtures import SHOWN_SLOTS, Mixture, collect_mixtures, mixing_layers
from timm_moe.analysis.routes.results import plot_mixtures
from timm_moe.layers import SoftRouter
from timm_moe_cli import main

SOFT = dict(name="soft_moe_s16", num_experts=5, slots_per_expert=2, moe_layers="1,3")
CHOICE = dict(name="vit_tiny_moe", router="expert_choice", num_experts=3, capacity_factor=1.5)


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    return write_images(
        tmp_path_factory.mktemp("data"),
        {"val": 3},
        ["apple", "baby", "chair", "dolphin", "elephant"],
    )


def collected(options, splits):
    """Collect mixtures of a model, and the inputs of its routers by layer, (I, N, D)."""
    model = make_model(**options)
    inputs = {path: [] for path in moe_layers(model)}
    for path, layer in moe_layers(model).items():
        if options is SOFT:
            torch.nn.init.constant_(layer.router.scale, 8)
        layer.router.register_forward_pre_hook(
            lambda _, args, path=path: inputs[path].append(args[0])
        )
    images = image_folder(splits)
    (model,), images = load_classifiers([model], images, inference=HERE)
    mixtures, image = collect_mixtures(model, images, HERE)
    hooks = [len(layer.router._forward_hooks) for layer in moe_layers(model).values()]
    assert hooks == [0, 0]
    return model, mixtures, image, {path: torch.cat(x) for path, x in inputs.items()}


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def perplexity(weights):
    return math.exp(-sum(weight * math.log(weight) for weight in weights))


def test_slots_mix_the_tokens_that_their_weights_say(splits):
    model, mixtures, _, inputs = collected(SOFT, splits)
    assert [mixture.layer for mixture in mixtures] == ["blocks.1.mlp", "blocks.3.mlp"]
    for mixture in mixtures:
        router, x = moe_layers(model)[mixture.layer].router, inputs[mixture.layer].double().numpy()
        slots = router.slots.detach().double().flatten(0, 1).numpy()
        x, slots = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (x, slots))
        logits = 8 * x @ slots.T  # (I, N, S)
        assert logits.shape == (15, 16, 10)
        mixed = np.array(
            [[perplexity(softmax(of_slot)) for of_slot in of_image.T] for of_image in logits]
        )
        combined = [perplexity(softmax(of_token)) for of_image in logits for of_token in of_image]
        summary = mixture.summary()
        assert summary == {
            "layer": mixture.layer,
            "experts": 5,
            "slots": 10,
            "tokens": 16,
            "tokens_per_slot": pytest.approx(mixed.mean(), rel=1e-4),
            "slots_per_token": pytest.approx(np.mean(combined), rel=1e-4),
        }
        assert (
            f"a slot mixes {mixed.mean():.1f} of 16 tokens, a token {np.mean(combined):.1f} of 10"
            in str(mixture)
        )
        sharpest = mixed.mean(0).argsort()[:SHOWN_SLOTS]
        maps = mixture.maps()
        assert list(maps) == [f"expert {slot // 2}, slot {slot % 2}" for slot in sharpest]
        for slot, weights in zip(sharpest, maps.values(), strict=True):
            expected = torch.from_numpy(softmax(logits[0, :, slot]).reshape(1, 4, 4)).float()
            torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_even_and_single_slots():
    router = SoftRouter(8, 5)
    even, single = Mixture("layer", router, (4, 4)), Mixture("layer", router, (4, 4))
    even.add((torch.full((2, 16, 5), 1 / 16), torch.full((2, 16, 5), 1 / 5)), 2, [1])
    single.add(
        (
            torch.eye(16)[:, :5].expand(2, 16, 5),
            torch.eye(5)[torch.arange(16) % 5].expand(2, 16, 5),
        ),
        2,
        [],
    )
    single.add(
        (
            torch.eye(16)[:, :5].expand(2, 16, 5),
            torch.eye(5)[torch.arange(16) % 5].expand(2, 16, 5),
        ),
        2,
        [0],
    )
    for mixture, expected in ((even, (16, 5)), (single, (1, 1))):
        summary = mixture.summary()
        assert (summary["tokens_per_slot"], summary["slots_per_token"]) == pytest.approx(expected)
        # Each with its only slot.
        assert set(mixture.maps()) == {f"expert {expert}" for expert in range(5)}
        assert all(weights.shape == (1, 4, 4) for weights in mixture.maps().values())


def test_patches_have_as_many_experts_as_took_them(splits):
    model, mixtures, _, inputs = collected(CHOICE, splits)
    for mixture in mixtures:
        router, x = moe_layers(model)[mixture.layer].router, inputs[mixture.layer]
        gates = (x @ router.weight.T).softmax(2).detach()
        capacity = round(17 * 1.5 / 3)
        count = torch.zeros(15, 17, dtype=torch.long)
        for image, gate in enumerate(gates):
            for expert in range(3):
                count[image, gate[:, expert].argsort(descending=True)[:capacity]] += 1
        share = [(count == number).double().mean().item() for number in range(4)]
        assert mixture.summary() == {
            "layer": mixture.layer,
            "experts": 3,
            "tokens": 17,
            "share_by_experts": pytest.approx(share),
        }
        assert f"{share[1]:.1%} have 1, " in str(mixture)
        ((name, weights),) = mixture.maps().items()
        assert name == "number of experts"
        assert torch.equal(weights, count[:1, 1:].view(1, 4, 4))  # without the class token


def test_a_layer_that_is_called_twice_is_shown_twice(splits):
    model = make_model(**SOFT)
    model.blocks[3].mlp = model.blocks[1].mlp
    mixtures, _ = collect_mixtures(model, image_folder(splits), HERE)
    assert [mixture.layer for mixture in mixtures] == [
        "blocks.1.mlp (call 1)",
        "blocks.1.mlp (call 2)",
    ]
    assert mixtures[0].summary()["tokens_per_slot"] != mixtures[1].summary()["tokens_per_slot"]


def test_models_whose_tokens_choose_have_routes_instead():
    for options in (SOFT, CHOICE):
        assert list(mixing_layers(make_model(**options))) == ["blocks.1.mlp", "blocks.3.mlp"]
    assert not any(mixing_layers(make_model(name)) for name in ("vit_tiny_moe", "vit_tiny_ewa_moe"))


@pytest.mark.parametrize(
    ("options", "field"), [(SOFT, "tokens_per_slot"), (CHOICE, "share_by_experts")]
)
@pytest.mark.first_case
def test_the_command(options, field, splits, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    save_file(make_model(**options).state_dict(), tmp_path / "a.safetensors")
    kwargs = [f"{name}={value}" for name, value in options.items() if name != "name"]
    arguments = [
        *(
            "routes",
            str(tmp_path / "a.safetensors"),
            "--data-dir",
            str(splits),
            str(tmp_path / "out"),
            "-j",
            "0",
        ),
        *("--device", "cpu", "--model", options["name"], "--num-classes", "5"),
        *("--model-kwargs", *SMALL_VIT_KWARGS, *kwargs),
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "out/routes.json").read_text())
    assert written["images"] == 15
    assert written["image"].endswith("apple/0.png")
    assert [layer["layer"] for layer in written["layers"]] == ["blocks.1.mlp", "blocks.3.mlp"]
    assert all(field in layer and f"{layer['layer']}: " in out for layer in written["layers"])
    width, height = Image.open(tmp_path / "out/routes.png").size
    assert width > 300 < height
    assert not (tmp_path / "out/routes.csv").exists()  # which is about classes


def test_layers_whose_tokens_choose_are_not_left_out_in_silence(
    splits, tmp_path, monkeypatch, caplog
):
    model = make_model("vit_tiny_patch16_224")
    convert_to_moe(model, router="soft", num_experts=2, moe_layers="1")
    convert_to_moe(model, router="top_k", num_experts=2, moe_layers="3")
    monkeypatch.setattr(
        "timm_moe.cli.load_classifiers", lambda sources, images, **_: ([model], images)
    )
    assert main(["routes", "x", "--data-dir", str(splits), str(tmp_path / "out"), "-j", "0"]) == 0
    assert "timm-moe report shows blocks.3.mlp too" in caplog.text


@pytest.mark.parametrize(
    ("options", "title", "rows"),
    [
        (SOFT, "Which patches feed which slot?", SHOWN_SLOTS),
        (CHOICE, "How many experts does a patch go to?", 1),
    ],
)
def test_the_report_shows_them(options, title, rows, splits):
    seen = observed(make_model(**options), splits)
    (part,) = routing_section(seen).parts
    assert part.title == title
    assert all(str(mixture) in part.text for mixture in seen.mixtures)
    assert [layer["name"] for layer in part.routes["layers"]] == ["blocks.1.mlp", "blocks.3.mlp"]
    for layer, mixture in zip(part.routes["layers"], seen.mixtures, strict=True):
        assert layer["rows"] == list(mixture.maps())
        assert len(layer["rows"]) == len(layer["told"]) == rows
        assert layer["columns"] == 12
        assert all(weights.shape == (12, 4, 4) for weights in mixture.maps().values())
    for mixture in seen.mixtures:
        mixture.grid = None
    (part,) = routing_section(seen).parts
    assert part.routes is None
    assert "not patches of an image" in part.text


def test_maps_of_mixtures_are_drawn_as_they_are(tmp_path, drawn):
    weights = torch.arange(6.0).view(1, 2, 3)
    mixtures = [SimpleNamespace(layer=n, maps=lambda: {"slot": weights}) for n in "ab"]
    plot_mixtures(mixtures, torch.zeros(3, 8, 12, dtype=torch.uint8), tmp_path / "a.png")
    axes = drawn[0].axes
    assert [axes[0].get_title(), axes[2].get_title()] == ["a", "b"]
    assert axes[1].images[0].get_array().tolist() == weights[0].tolist()
