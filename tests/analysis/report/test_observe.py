"""The observation of a model, and the sentences on it.

It is compared with the routers' weights applied by hand.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from common import SMALL_VIT, OnDevice, make_model
from observations import HERE, observed
from PIL import Image
from torch import nn

import timm_moe
from timm_moe.analysis.data import image_folder
from timm_moe.analysis.evaluation import evaluate
from timm_moe.analysis.fewshot import Folder, fewshot
from timm_moe.analysis.report import write_report
from timm_moe.analysis.report.observe import SHOWN, SUREST
from timm_moe.analysis.report.sections.routing import routing_section
from timm_moe.analysis.report.sections.similarity import expert_similarity, similarity_section
from timm_moe.analysis.routes.statistics import collect_routes
from timm_moe.layers import routing_to
from timm_moe.training.epoch_log import relative_distance_to_mean


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_moe", dict(top_k=2)),
        ("vimoe_s14", {}),
        ("vmoe_pbe_s32", dict(num_experts=4)),
        ("widenet_b", dict(depth=2)),
    ],
)
@pytest.mark.first_case
def test_it_sees_what_evaluate_and_routes_do(name, options, splits):
    model = make_model(name, **{**SMALL_VIT, **options})
    images, other = image_folder(splits), image_folder(splits, "other")
    seen = observed(model, splits, other)
    expected = evaluate([model], images, other, inference=HERE)
    assert seen.figures == pytest.approx(expected, nan_ok=True)
    assert len(seen.confidence) == 20
    assert len(seen.ood_confidence) == 10
    assert (seen.predicted != seen.labels).double().mean().item() == pytest.approx(
        expected["error"]
    )
    for layer, routes in zip(seen.layers, collect_routes(model, images, HERE), strict=True):
        assert layer.name == routes.layer
        assert torch.equal(layer.routes.counts, routes.counts)
        assert layer.routes.load().sum().item() == pytest.approx(1)
        assert layer.grid == (4, 4)
        assert (
            layer.expert_SMP.shape
            == layer.gate_SMP.shape
            == (min(SHOWN, 20), layer.routes.members, 16)
        )


def test_patches_and_experts_are_those_of_the_routers(splits):
    model = make_model(top_k=1, capacity_factor=None)
    model.pretrained_cfg["crop_pct"] = 1.0
    seen = observed(model, splits)
    files = [name for name, _ in image_folder(splits).reader.samples]
    images = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file in files])
    assert torch.equal(seen.shown_pixels, images[seen.shown].permute(0, 3, 1, 2))
    inputs = {}
    for path, layer in timm_moe.moe_layers(model).items():
        layer.router.register_forward_pre_hook(
            lambda _, given, path=path: inputs.setdefault(path, given[0])
        )
    with torch.no_grad():
        model((images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
    first, _ = seen.layers
    gates = {
        path: (inputs[path] @ layer.router.weight.T).softmax(2)
        for path, layer in timm_moe.moe_layers(model).items()
    }
    gate_BN, expert_BN = gates[first.name].max(2)
    assert torch.equal(first.expert_SMP[:, 0], expert_BN[seen.shown, 1:])
    torch.testing.assert_close(first.gate_SMP[:, 0], gate_BN[seen.shown, 1:], rtol=1e-4, atol=1e-4)
    for expert, patches in enumerate(first.surest):
        best = (
            torch.where(expert_BN[:, 1:] == expert, gate_BN[:, 1:], -1)
            .amax(1)
            .sort(descending=True)
            .values
        )
        best = best[best >= 0][:SUREST]
        torch.testing.assert_close(
            torch.tensor([patch.gate for patch in patches]), best, rtol=1e-4, atol=1e-4
        )
        assert all(patch.pixels.shape == (3, 24, 24) for patch in patches)
    entropy = torch.special.entr(gates[first.name]).sum(2).flatten() / torch.tensor(4.0).log()
    assert torch.equal(first.entropy, torch.histc(entropy, 20, 0, 1))


def test_nearly_even_gates_are_counted(splits):
    """Their entropy may round to more than the highest."""
    model = make_model(num_experts=8, capacity_factor=None)
    for layer in timm_moe.moe_layers(model).values():
        layer.router.weight.data.mul_(3e-5)
    for layer in observed(model, splits).layers:
        assert layer.entropy.sum() == layer.entropy[-1] == 20 * 17


def test_a_gate_is_that_of_the_choice(splits):
    """The largest probability is another expert's where a bias helped to choose."""
    model = make_model(balance="bias", capacity_factor=None)
    for layer in timm_moe.moe_layers(model).values():
        layer.router.balancing_bias.steps[3] = 9000
    for layer in observed(model, splits).layers:
        assert (layer.expert_SMP == 3).all()
        assert 0 < layer.gate_SMP.min() < 0.25  # of four, the largest is more than that


def test_every_head_has_its_own_gate(splits):
    layer = observed(
        make_model("vmoe_pbe_s32", num_experts=4, ensemble="multi_head", top_k=2), splits
    ).layers[-1]
    first, second = layer.gate_SMP.unbind(1)
    assert (first >= second).all()
    assert (first + second <= 1).all()
    assert (second <= 0.5).all()


def test_images_that_are_dropped_are_counted_as_images(splits):
    model = make_model("vimoe_s14", eval_capacity_factor=0.5)
    for layer in timm_moe.moe_layers(model).values():
        nn.init.zeros_(layer.router.weight)  # all images choose the first expert
    for layer in observed(model, splits).layers:
        assert 0 < layer.dropped < 20


def test_the_model_goes_on_as_it_was(splits, tmp_path):
    model = make_model("vit_tiny_ewa_moe").train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    images = image_folder(splits)
    folder = Folder("splits", images, images)
    for run in (
        lambda: evaluate([model], images, inference=HERE),
        lambda: fewshot([model], [folder], [1], 1, inference=HERE),
        lambda: write_report([model], images, tmp_path, inference=HERE),
    ):
        run()
        assert [module.training for module in model.modules()] == modes


def test_a_device_without_float64(splits):
    model = make_model()
    expected = observed(model, splits)
    for layer in timm_moe.moe_layers(model).values():
        probabilities = layer.router.probabilities
        layer.router.probabilities = lambda x, probabilities=probabilities: probabilities(
            x
        ).as_subclass(OnDevice)
    for layer, same in zip(observed(model, splits).layers, expected.layers, strict=True):
        assert torch.equal(layer.entropy, same.entropy)


def test_a_full_expert_does_not_hide_that_the_others_are_idle(splits):
    model = make_model(top_k=1, capacity_factor=1.0, eval_capacity_factor=1.0)
    for layer in timm_moe.moe_layers(model).values():
        nn.init.zeros_(layer.router.weight)  # all rows choose the first expert
    seen = observed(model, splits)
    assert seen.layers[0].routes.load().tolist() == [1, 0, 0, 0]
    assert seen.layers[0].dropped > 200
    assert seen.layers[0].expert_SMP.max() == 4  # of a patch that was dropped
    told = routing_section(seen).parts[0].text
    assert "blocks.1.mlp: 1, 2, 3" in told
    assert "of them found no place" in told


def test_a_choice_that_a_row_does_not_make_is_no_dropped_one(splits):
    model = make_model(top_k=2, capacity_factor=None)
    for layer in timm_moe.moe_layers(model).values():
        forward = layer.router.forward

        def first_only(x, forward=forward, number=layer.num_experts):
            routing = forward(x)
            expert_TK = routing.experts()
            is_chosen_TK = torch.zeros_like(expert_TK, dtype=torch.bool)
            is_chosen_TK[:, 0] = True
            return routing_to(expert_TK, routing.gates, number, is_chosen_TK)

        layer.router.forward = first_only
    seen = observed(model, splits)
    for layer in seen.layers:
        assert layer.dropped == 0
        assert int(layer.routes.counts.sum()) == 20 * 17
    assert "None of them was dropped" in routing_section(seen).parts[0].text


def test_every_member_of_an_ensemble_has_its_patches(splits):
    seen = observed(make_model("vmoe_pbe_s32", num_experts=4), splits)
    layer = seen.layers[0]
    assert all(layer.surest)
    own = [layer.expert_SMP[:, member].unique().tolist() for member in range(2)]
    assert max(own[0]) < 2 <= min(own[1])
    shown = routing_section(seen).parts[2].routes["layers"]
    assert [given["name"] for given in shown[:2]] == [
        f"{layer.name}, member 1",
        f"{layer.name}, member 2",
    ]
    assert shown[1]["expert"] == layer.expert_SMP[:, 1].tolist()


def test_a_model_of_bfloat16_is_reported(splits, tmp_path):
    model = make_model("vit_tiny_moe", moe_layers="3").bfloat16()
    assert write_report([model], image_folder(splits), tmp_path, inference=HERE).exists()


def test_experts_are_compared_on_all_of_the_images_whatever_the_batch(splits, ewa_vit):
    images, model = image_folder(splits), ewa_vit.eval()
    by_one, together = (
        expert_similarity(model, images, replace(HERE, batch_size=size)) for size in (1, 16)
    )
    for one, other in zip(by_one, together, strict=True):
        torch.testing.assert_close(one.outputs_EE, other.outputs_EE)


def test_experts_that_are_alike_are_called_so(splits, ewa_vit):
    images = image_folder(splits)
    model = ewa_vit.eval()
    for layer in timm_moe.moe_layers(model).values():
        for _, stacked in layer.named_expert_parameters():
            stacked.data[:] = stacked.data[:1].clone()
    alike = expert_similarity(model, images, HERE)
    assert [layer.layer for layer in alike] == list(timm_moe.moe_layers(model))
    for layer in alike:
        torch.testing.assert_close(layer.weights_EE, torch.ones(4, 4))
        torch.testing.assert_close(layer.outputs_EE, torch.ones(4, 4))
    changed = timm_moe.moe_layers(model)["blocks.1.mlp"]
    for _, stacked in changed.named_expert_parameters():
        stacked.data[3] = torch.randn_like(stacked[3])
    first = expert_similarity(model, images, HERE)[0]
    assert first.weights_EE[0, 3] < 0.5
    assert first.outputs_EE[0, 3] < 0.9
    assert first.spread == relative_distance_to_mean(changed) > 0.1
    (part,) = similarity_section([first]).parts
    assert f"blocks.1.mlp {first.spread:.3g}" in part.text
