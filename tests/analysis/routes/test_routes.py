"""The routes of classes to experts, against the routers' weights applied by hand."""

import csv
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from common import SMALL_VIT_KWARGS, make_model, write_images
from observations import HERE
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from timm_moe import RouterSpec, convert_to_moe, moe_layers
from timm_moe.analysis.data import image_folder
from timm_moe.analysis.routes.results import display_order, plot, table
from timm_moe.analysis.routes.statistics import (
    RouterWatcher,
    Routes,
    collect_routes,
    patch_grid,
    summarize,
    summarize_all,
)
from timm_moe.layers import MoeMlp, TopKRouter
from timm_moe_cli import main

CLASSES = ["apple", "baby", "chair", "dolphin", "elephant"]


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """Write four or five images of each class."""
    folder = write_images(tmp_path_factory.mktemp("data"), {"val": 5}, CLASSES)
    for name in CLASSES[::2]:
        (folder / "val" / name / "4.png").unlink()
    return folder


def routes_of(model, splits):
    return collect_routes(model, image_folder(splits), HERE)


@pytest.mark.parametrize(
    ("name", "options", "unit"),
    [
        ("vit_tiny_moe", dict(num_experts=4, top_k=2), "token"),
        ("vit_tiny_moe", dict(num_experts=3, eval_capacity_factor=0.5), "token"),
        ("vimoe_s14", dict(num_experts=6, moe_layers="1,3"), "image"),
    ],
)
def test_shares_are_those_of_the_largest_logits(splits, name, options, unit):
    model = make_model(name, **options)
    inputs = {path: [] for path in moe_layers(model)}
    handles = [
        layer.router.register_forward_pre_hook(
            lambda _, args, path=path: inputs[path].append(args[0])
        )
        for path, layer in moe_layers(model).items()
    ]
    all_routes = routes_of(model, splits)
    for handle in handles:
        handle.remove()
    top_k, experts = options.get("top_k", 1), options["num_experts"]
    assert [routes.layer for routes in all_routes] == ["blocks.1.mlp", "blocks.3.mlp"]
    for routes in all_routes:
        router = moe_layers(model)[routes.layer].router
        x = torch.cat(inputs[routes.layer])
        x = x[:, :1] if unit == "image" else x
        chosen = (x @ router.weight.T).topk(top_k).indices.flatten(1)
        expected = torch.zeros(5, experts, dtype=torch.double)
        for label, experts_of_image in zip(routes.labels, chosen, strict=True):
            for expert in experts_of_image:
                expected[label, expert] += 1
        assert routes.classes == CLASSES
        assert routes.top_k == top_k
        torch.testing.assert_close(routes.share_CE(), expected / expected.sum(1, keepdim=True))
        different = np.mean([len(set(row.tolist())) for row in chosen])
        summary = summarize(routes, 0.1)
        assert summary["experts_per_image"] == pytest.approx(different)
        assert summary["load"] == pytest.approx((expected.sum(0) / expected.sum()).tolist())
        assert summary["mean_largest_share"] == pytest.approx(
            routes.share_CE().max(1).values.mean().item()
        )
        assert router.eval_capacity_factor == options.get("eval_capacity_factor")
        assert not router._forward_hooks


def test_capacities_are_off_so_that_routes_do_not_depend_on_the_batch(splits):
    model = make_model("vit_tiny_moe", num_experts=3, eval_capacity_factor=0.5)
    images = image_folder(splits)
    by_one, in_batches = (
        collect_routes(model, images, replace(HERE, batch_size=size)) for size in (1, 7)
    )
    for one, other in zip(by_one, in_batches, strict=True):
        assert torch.equal(one.counts, other.counts)
    assert {layer.router.eval_capacity_factor for layer in moe_layers(model).values()} == {0.5}


def test_watching_noisy_routers_changes_nothing_and_sees_the_choices_that_were_made():
    options = dict(num_experts=4, moe_layers="1,3", ensemble="tiling", noise_std=8.0)
    model = make_model("vmoe_pbe_s32", **options, eval_capacity_factor=0.3)
    x = torch.randn(4, 3, 32, 32)

    def run():
        torch.manual_seed(0)
        with torch.inference_mode():
            return model(x), torch.randn(1)

    alone, next_draw = run()
    with RouterWatcher(moe_layers(model)) as watcher:
        watched, draw = run()
        calls = watcher.end_batch(torch.zeros(4, dtype=torch.long))
    assert torch.equal(watched, alone)
    assert torch.equal(draw, next_draw)
    for call in calls:
        is_kept = call.kept_TK != 4
        assert not is_kept.all()
        assert torch.equal(call.chosen_TK[is_kept], call.kept_TK[is_kept])


@pytest.mark.parametrize(
    ("name", "size", "grid"),
    [
        (
            "swin_tiny_patch4_window7_224",
            dict(img_size=(64, 96), embed_dim=24, window_size=2),
            (16, 24),
        ),
        (
            "vit_tiny",
            dict(img_size=(32, 32), patch_size=(4, 16), embed_dim=24, num_heads=2, depth=2),
            (8, 2),
        ),
        ("gcvit_xxtiny", dict(img_size=64, window_size=2), (16, 16)),  # (B, H, W, D)
        ("nest_tiny", dict(img_size=64), None),
        ("hiera_tiny_224", dict(img_size=(64, 64), embed_dim=24), None),
    ],
)
@pytest.mark.first_case
def test_patches_have_a_grid_where_they_are_row_by_row(name, size, grid):
    model = timm.create_model(f"{name}_ewa_moe", router="top_k", num_classes=5, **size).eval()
    path, layer = next(iter(moe_layers(model).items()))
    seen = []
    layer.router.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    images = size["img_size"] if isinstance(size["img_size"], tuple) else (size["img_size"],) * 2
    model(torch.randn(2, 3, *images))
    assert patch_grid(model, seen[0], images) == grid, path


def test_pixels_that_are_apart_are_no_members(tmp_path):
    model = timm.create_model("mobilevit_xxs_ewa_moe", router="top_k", num_classes=5, img_size=64)
    folder = write_images(tmp_path, {"val": 2}, CLASSES)
    for routes in collect_routes(model, image_folder(folder), HERE):
        assert routes.members == 1
        assert routes.counts.sum(2).unique().numel() == 1  # each image has as many rows


def test_a_layer_that_is_called_twice_has_two_panels(splits):
    model = make_model(moe_layers="1,2")
    model.blocks[3].mlp = model.blocks[1].mlp
    all_routes = routes_of(model, splits)
    assert [routes.layer for routes in all_routes] == [
        "blocks.1.mlp (call 1)",
        "blocks.2.mlp",
        "blocks.1.mlp (call 2)",
    ]
    assert not torch.equal(all_routes[0].counts, all_routes[2].counts)
    assert summarize_all(all_routes, 0.1)["routing_degree"] == 4**3


def test_classes_without_images_are_left_out(splits, tmp_path):
    (tmp_path / "classes.txt").write_text("\n".join(["nothing", *CLASSES]))
    images = image_folder(splits, class_map=str(tmp_path / "classes.txt"))
    (first, _) = collect_routes(make_model(num_classes=6), images, HERE)
    assert first.classes == CLASSES
    torch.testing.assert_close(first.share_CE().sum(1), torch.ones(5, dtype=torch.double))


def counted(count_IME, labels):
    names = [str(label) for label in sorted(set(labels))]
    return Routes("layer", 1, count_IME.shape[2], count_IME, torch.tensor(labels), names)


def made_up(expert_of_image, experts, labels):
    return counted(
        nn.functional.one_hot(torch.tensor(expert_of_image), experts).int().unsqueeze(1), labels
    )


def mutual_information(count_CE):
    return counted(count_CE.unsqueeze(1), [*range(len(count_CE))]).mutual_information()


def test_mutual_information():
    assert mutual_information(torch.eye(8)) == pytest.approx(math.log(8))
    assert mutual_information(torch.ones(5, 1) * torch.rand(1, 4)) == pytest.approx(0, abs=1e-7)
    joint = torch.tensor([[3.0, 1.0], [0.0, 4.0]]).double()
    by_hand = 3 / 8 * math.log(2) + 1 / 8 * math.log(2 / 5) + 4 / 8 * math.log(8 / 5)
    assert mutual_information(joint) == pytest.approx(by_hand)


def test_the_classs_information_is_the_mutual_information_over_the_entropy_of_the_expert():
    joint = np.array([[0.3, 0.1], [0.2, 0.4]])
    own = np.outer(joint.sum(1), joint.sum(0))
    expert = joint.sum(0)
    expected = (joint * np.log(joint / own)).sum() / -(expert * np.log(expert)).sum()
    assert counted(
        torch.tensor([[[30, 10]], [[20, 40]]]), [0, 1]
    ).class_information() == pytest.approx(expected)
    # of two members with experts of their own, to which the class says all and nothing
    members = counted(
        torch.tensor([[[9, 0, 0, 0], [0, 0, 5, 4]], [[0, 9, 0, 0], [0, 0, 5, 4]]]), [0, 1]
    )
    nothing = -(5 / 9 * np.log(5 / 9) + 4 / 9 * np.log(4 / 9))
    expected = np.log(2) / (np.log(2) + nothing)
    assert members.class_information() == pytest.approx(expected)


def test_the_class_decides_experts_of_uneven_loads_too():
    labels = [0] * 8 + [1, 2]
    assert made_up(labels, 3, labels).class_information() == pytest.approx(1)


def test_mutual_information_by_chance_is_that_of_a_router_that_ignores_classes():
    random = np.random.default_rng(0)
    labels = [label for label in range(20) for _ in range(10)]
    routes = made_up(random.integers(0, 4, 200).tolist(), 4, labels)
    summary = summarize(routes, 0.05)
    entropy = summary["mutual_information"] / summary["normalized"]
    information, chance = (
        routes.mutual_information(),
        entropy * routes.class_information_by_chance(),
    )
    # The bias of the estimate, (C - 1)(E - 1) / 2n.
    assert chance == pytest.approx(19 * 3 / (2 * 200), rel=0.3)
    assert abs(information - chance) < 0.05
    assert not summary["kept"]


def of_patches(experts_IP, labels_IP):
    counts = nn.functional.one_hot(torch.tensor(experts_IP), 4).unsqueeze(2)
    return Routes("layer", 1, 4, counts, torch.tensor(labels_IP), ["a", "b", "c", "d", "e"])


def test_by_chance_the_patches_of_an_image_stay_together():
    """Patches say no more of the classes than their images, where these go anywhere."""
    random = np.random.default_rng(0)
    experts = random.integers(0, 4, 30).tolist()
    images = made_up(experts, 4, [number % 5 for number in range(30)])
    patches = of_patches(
        [16 * [expert] for expert in experts], [16 * [number % 5] for number in range(30)]
    )
    assert patches.class_information() == pytest.approx(images.class_information())
    chance = patches.class_information_by_chance()
    assert chance == pytest.approx(images.class_information_by_chance())
    assert abs(patches.class_information() - chance) < 0.05


def test_a_patch_without_a_class_may_have_one_by_chance():
    """Places of patches that have no class move with their image."""
    labels, experts = [[-1, 0, 1], [0, 0, 1]], [[0, 1, 2], [1, 1, 2]]
    here, there = of_patches(experts, labels), of_patches(experts, labels[::-1])
    assert here.class_information() == pytest.approx(1)
    assert there.class_information() < 0.9
    possible = [
        (number * here.class_information() + (10 - number) * there.class_information()) / 10
        for number in range(1, 10)
    ]
    assert any(here.class_information_by_chance() == pytest.approx(value) for value in possible)


def test_which_layers_are_kept():
    labels = [0, 0, 0, 0, 1, 1, 1, 1]
    same = made_up([0] * 8, 2, labels)
    apart = made_up(labels, 2, labels)
    single = made_up([0] * 8, 1, labels)
    summary = summarize_all([same, apart, single], 0.25)
    assert [layer["kept"] for layer in summary["layers"]] == [False, True, False]
    assert [layer["normalized"] for layer in summary["layers"]] == pytest.approx([0, 1, 0])
    assert (summary["routing_degree"], summary["routing_degree_of_kept"]) == (4, 2)
    assert summary["experts_per_image"] == 3


def test_order_of_display():
    share_CE = torch.tensor([[0.1, 0.9], [0.6, 0.4], [0.3, 0.7], [0.8, 0.2]])
    assert display_order(share_CE) == [3, 1, 0, 2]


def test_small_heat_maps_have_numbers(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    written = []
    monkeypatch.setattr(Axes, "text", lambda self, x, y, text, **look: written.append(text))
    plot([made_up([0, 1, 1], 4, [0, 1, 2])], tmp_path / "a.png")
    assert sorted(written) == sorted(3 * ["100%"] + 9 * ["0%"])
    written.clear()
    plot([made_up([0, 1, 1], 16, [0, 1, 2])], tmp_path / "b.png")
    assert written == []


@pytest.mark.parametrize(("layers", "classes", "experts"), [(13, 10, 16), (1, 2, 1), (2, 1000, 8)])
@pytest.mark.first_case
def test_plots_of_all_sizes(tmp_path, layers, classes, experts):
    pytest.importorskip("matplotlib")
    routes = made_up([label % experts for label in range(classes)], experts, list(range(classes)))
    plot([routes] * layers, tmp_path / "a.png")
    width, height = Image.open(tmp_path / "a.png").size
    assert 300 < width < 3300
    assert 300 < height < 3300


def command(folder, model, name, splits, *options):
    save_file(model.state_dict(), folder / "a.safetensors")
    spec = ["--model", name, "--num-classes", "5", "--model-kwargs", *SMALL_VIT_KWARGS]
    return [
        *("routes", str(folder / "a.safetensors"), "--data-dir", str(splits), str(folder / "out")),
        *("-j", "0", "--device", "cpu", *options, *spec),
    ]


def test_the_command(splits, tmp_path, capsys):
    model = make_model()
    arguments = command(tmp_path, model, "vit_tiny_moe", splits, "--threshold", "-1")
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "routing degree 16" in out
    assert (
        "layers worth keeping in an efficient ViMoE: blocks.1.mlp, blocks.3.mlp; routing degree 16"
        in out
    )
    written = json.loads((tmp_path / "out/routes.json").read_text())
    assert [layer["kept"] for layer in written["layers"]] == [True, True]
    assert f"{written['layers'][0]['mutual_information']:.3f} nats" in out
    assert set(written["versions"]) == {"timm_moe", "timm", "torch"}
    with open(tmp_path / "out/routes.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["share"]) for row in rows if row["layer"] == "blocks.3.mlp"] == pytest.approx(
        routes_of(model, splits)[1].share_CE().flatten().tolist(), rel=1e-6
    )
    assert {row["class"] for row in rows} == set(CLASSES)
    assert sorted(path.name for path in (tmp_path / "out").iterdir())[:2] == [
        "routes.csv",
        "routes.json",
    ]
    assert main(arguments) == 1
    assert "exists; pass --overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0


def test_without_matplotlib_all_but_the_plot_is_written(splits, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(command(tmp_path, make_model(), "vit_tiny_moe", splits)) == 0
    assert "pip install 'timm_moe[evaluate]'" in caplog.text
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "routes.csv",
        "routes.json",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "vit_tiny_patch16_224",
            "This VisionTransformer has no expert layers, so nothing is routed.",
        ),
        ("vit_tiny_ewa_moe", "No token of this model chooses its experts"),
    ],
)
def test_models_without_routers(splits, tmp_path, monkeypatch, capsys, name, message):
    arguments = command(tmp_path, make_model(name), name, splits)
    monkeypatch.setattr(
        timm.models.VisionTransformer, "forward", lambda *_: pytest.fail("The model was run.")
    )
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class RoutedInTraining(MoeMlp):
    """Layer that is one dense network in evaluation, where its router is not called."""

    deploys_dense = True

    def compute(self, x, routing):
        return super().compute(x, routing) if self.training else self.run_mean(x)


def test_a_layer_that_routes_in_training_only_has_no_routes(splits):
    spec = RouterSpec(
        "in_training",
        lambda dim, num_experts: TopKRouter(dim, num_experts, 1),
        layer=RoutedInTraining,
        layer_options={},
    )
    model = convert_to_moe(make_model("vit_tiny_patch16_224"), router=spec)
    with pytest.raises(ValueError, match="chooses its experts in evaluation"):
        collect_routes(model, image_folder(splits), HERE)


def test_where_nothing_can_be_written(splits, tmp_path, capsys):
    arguments = ["routes", "missing.pth", "--data-dir", str(splits)]
    (tmp_path / "file").touch()
    assert main([*arguments, str(tmp_path / "file")]) == 1
    assert main([*arguments, str(tmp_path / "file/where")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert "file is a file;" in errors[0]
    assert "file is a file," in errors[1]


def test_rows_of_the_heat_maps_have_the_names_of_their_classes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    named, shown, draw = [], [], Axes.imshow
    monkeypatch.setattr(Axes, "set_yticks", lambda self, at, names, **_: named.extend(names))
    monkeypatch.setattr(
        Axes, "imshow", lambda self, x, **look: shown.append(x.tolist()) or draw(self, x, **look)
    )
    plot([made_up([1, 0, 1], 2, [0, 1, 2])], tmp_path / "a.png")
    assert named == ["1", "0", "2"]
    assert shown == [[[1, 0], [0, 1], [0, 1]]]


def test_routes_in_mixed_precision(splits):
    model = make_model()
    seen = set()
    model.blocks[0].mlp.fc1.register_forward_hook(lambda _, x, y: seen.add(y.dtype))
    collect_routes(model, image_folder(splits), replace(HERE, amp_dtype=torch.bfloat16))
    assert seen == {torch.bfloat16}


def test_the_table_has_each_number_in_its_column():
    layer = {
        "layer": "a",
        "experts": 2,
        "mean_largest_share": 0.8,
        "mutual_information": 0.3,
        "normalized": 0.4,
        "by_chance": 0.1,
        "experts_per_image": 1.5,
        "kept": True,
        "load": [0.25, 0.75],
    }
    summary = {
        "layers": [layer, {**layer, "layer": "b", "kept": False}],
        "images": 9,
        "experts_per_image": 3.0,
        "routing_degree": 4,
        "routing_degree_of_kept": 2,
    }
    _, first, load, second, _, images, *_ = table(summary)
    assert first.split() == ["a", "2", "80.0%", "0.300", "nats", "0.400", "0.100", "1.50", "yes"]
    assert load.split() == ["load,", "%", "25.0", "75.0"]
    assert second.split()[-1] == "no"
    assert images == "images 9, experts of an image in all layers 3.00"


def test_heat_maps_have_the_names_of_their_layers_and_numbers_of_their_rows(tmp_path, drawn):
    counts = torch.tensor([[[1, 3]], [[1, 0]], [[0, 1]]])
    routes = Routes("a", 1, 2, counts, torch.arange(3), ["x", "y", "z"])
    plot([routes, replace(routes, layer="b")], tmp_path / "a.png")
    first, second, *_ = drawn[0].axes
    assert [first.get_title(), second.get_title()] == ["a", "b"]
    numbers = {text.get_position(): text.get_text() for text in first.texts}
    shown = first.images[0].get_array()
    assert numbers == {
        (column, row): f"{shown[row, column]:.0%}" for row in range(3) for column in range(2)
    }
    assert shown.tolist() == [[1, 0], [0, 1], [0.25, 0.75]]


@pytest.mark.parametrize("threshold", ["-1", "1"])
@pytest.mark.first_case
def test_layers_are_kept_by_the_threshold_that_is_stated(splits, tmp_path, threshold):
    stated = f"--threshold={threshold}"
    assert main(command(tmp_path, make_model(), "vit_tiny_moe", splits, stated)) == 0
    layers = json.loads((tmp_path / "out/routes.json").read_text())["layers"]
    assert [layer["kept"] for layer in layers] == [threshold == "-1"] * 2
