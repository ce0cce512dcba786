"""The catalogue of studies.

Every training can be run, and the additions to train.py do what they say.
"""

import importlib.util
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from timm.utils import ParseKwargs
from tiny_study import DENSE, EWA, small_study
from train_script import SCRIPTS, needs_scripts

from studies import callbacks, candidates, corruptions, images
from studies.catalogue import STUDIES
from studies.deploy import Export, LatestAverage
from studies.runs import Place, Run
from studies.study import Arm
from studies.weight_average import main as write_average
from timm_moe import ExpertWeightAveraging, moe_layers
from timm_moe.analysis.data import image_folder
from timm_moe.analysis.info import evaluation_cost
from timm_moe.convert.expert_layers import parameters
from timm_moe.models.registered import weightless_model


def test_corruptions_are_the_same_for_every_model_and_of_the_stated_strength(folder):
    clean = image_folder(folder / "all", "test").reader
    deviations = []
    for name, corruption in corruptions.CORRUPTIONS.items():
        reader = corruptions.CorruptedReader(clean, corruption)
        first, again = (
            [np.asarray(Image.open(reader[index][0])) for index in (0, 6, 7)] for _ in range(2)
        )
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
        assert [reader[index][1] for index in (0, 7)] == [clean[index][1] for index in (0, 7)]
        if name.startswith("noise"):
            # Each image has its own, also two that are nearly of one brightness.
            assert np.ptp(first[2].astype(int) - first[1]) > 1
            deviations.append(first[2].std())
    assert deviations[0] == pytest.approx(0.04 * 255, rel=0.3)
    assert deviations[1] == pytest.approx(0.08 * 255, rel=0.3)
    pixels = np.repeat(np.tile(np.arange(0, 192, 3, dtype=np.uint8), (8, 1))[..., None], 3, 2)
    ramp = Image.fromarray(pixels)
    for factor in (0.5, 0.25):
        assert np.std(corruptions.contrast(factor)(ramp)) == pytest.approx(
            np.std(ramp) * factor, rel=0.05
        )
    edge = Image.fromarray(200 * (pixels > 96).astype(np.uint8))
    mild, strong = (len(np.unique(corruptions.blur(deviation)(edge))) for deviation in (0.6, 1.0))
    assert 2 < mild < strong
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    mild, strong = (
        np.abs(np.asarray(corruptions.jpeg(quality)(Image.fromarray(noise))) - 1.0 * noise).mean()
        for quality in (65, 40)
    )
    assert 0 < mild < strong


@pytest.mark.parametrize(
    ("arms", "told"),
    [
        (
            (Arm("a", DENSE), Arm("b", replace(DENSE, options=("--drop-path", "0.9")))),
            "Two trainings .*dense",
        ),
        ((Arm("a", EWA, beside=(replace(EWA, draw=1),)),), "Two trainings .*ewa"),
        ((Arm("rate x4", DENSE), Arm("rate X4", DENSE)), "rate X4 .*: rate-x4 "),
        ((Arm("Train", DENSE),), "Train .*: train "),
        ((Arm("uses start", DENSE),), "uses start .*: uses-start "),
        ((Arm("a", DENSE), Arm("a", EWA)), "^a .*: a "),
    ],
)
def test_names_that_make_one_of_two_are_refused(arms, told):
    with pytest.raises(ValueError, match=told):
        small_study(*arms)


def test_a_training_with_an_average_hands_on_its_own_weights():
    """timm's --initial-checkpoint takes the average from a checkpoint that has both."""
    sizes = [size for study in STUDIES.values() for size in study.sizes.values()]
    uses = [(size, use) for size in sizes for training in size.trainings() for use in training.uses]
    assert uses
    for size, use in uses:
        options = (*size.options, *use.training.options)
        assert isinstance(use.deployment, Export) or "--model-ema" not in options, use.training.name


def test_what_a_study_states_can_be_run(folder):
    for study in STUDIES.values():
        arms = [{arm.name for arm in size.arms} for size in study.sizes.values()]
        assert all(any(set(pair) <= of_size for of_size in arms) for pair in study.pairs)
        for size in study.sizes.values():
            names = [arm.name for arm in size.arms]
            assert len(set(names)) == len(names)
            place = Place(Path("scripts"), folder, dict.fromkeys(size.images, images.Part(2, "")))
            for training in size.trainings():
                run = Run(study, size, training, 0, place)
                assert run.progress() == 0
                names = [callback.partition("=")[0] for callback in training.callback.split()]
                assert set(names) <= set(callbacks.CALLBACKS)
                assert run.stated()
                used = {use.name: Path("used") for use in training.uses}
                assert "{" not in " ".join(run._train_command(used))


@pytest.mark.ci
@pytest.mark.parametrize("size", STUDIES["routers"].sizes.values(), ids=STUDIES["routers"].sizes)
def test_compared_routers_cost_and_hold_the_same(size):
    parser = ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", action=ParseKwargs)
    macs, held = {}, {}
    for arm in size.arms:
        kwargs = (
            parser.parse_args(["--model-kwargs", *size.kwargs, *arm.training.kwargs]).model_kwargs
            or {}
        )
        model = weightless_model(size.models[arm.training.model], **kwargs)
        macs[arm.name], held[arm.name] = evaluation_cost(model).macs, parameters(model)
    assert macs == dict.fromkeys(macs, pytest.approx(macs["dense"], rel=0.05))
    del held["dense"]
    assert held == dict.fromkeys(held, pytest.approx(held["top-1 of 8"], rel=0.05))


@pytest.mark.parametrize("size", STUDIES["students"].sizes.values(), ids=STUDIES["students"].sizes)
def test_a_teacher_sees_the_images_that_its_student_sees(size):
    """timm normalizes them by the student's config, then converts them to the teacher's."""
    taught = [training for training in size.trainings() if "--kd-model-name" in training.options]
    assert taught
    for training in taught:
        student = timm.get_pretrained_cfg(size.models[training.model])
        (teacher,) = [use.deployment for use in training.uses if use.name == "teacher"]
        for option, values in {"--mean": student.mean, "--std": student.std}.items():
            begin = teacher.options.index(option) + 1
            assert teacher.options[begin : begin + 3] == tuple(map(str, values))


@pytest.mark.ci
@needs_scripts
def test_train_py_takes_the_options_and_timm_makes_the_models(folder):
    parser = load_script("train.py").parser
    made = set()
    for study in STUDIES.values():
        for size in study.sizes.values():
            place = Place(Path("scripts"), folder, dict.fromkeys(size.images, images.Part(20, "")))
            for training in size.trainings():
                command = Run(study, size, training, 0, place)._train_command(
                    {use.name: Path() for use in training.uses}
                )
                args = parser.parse_args(command[command.index("scripts/train.py") + 1 :])
                key = (args.model, str(args.model_kwargs))
                if key not in made:
                    made.add(key)
                    with torch.device("meta"):
                        timm.create_model(args.model, num_classes=20, **args.model_kwargs)


def load_script(name):
    spec = importlib.util.spec_from_file_location("script_of_timm", Path(SCRIPTS) / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trainings_of_one_name_in_one_setting_are_the_same(folder):
    stated = {}
    for study in STUDIES.values():
        for size in study.sizes.values():
            for training in size.trainings():
                run = Run(
                    study,
                    size,
                    training,
                    0,
                    Place(Path("scripts"), folder, dict.fromkeys(size.images, images.Part(2, ""))),
                )
                assert (
                    stated.setdefault((size.setting, training.name), run.stated()) == run.stated()
                ), training.name


def test_the_divided_learning_rate_is_that_of_the_networks_that_ewa_converts():
    model = timm.create_model("vit_tiny_patch16_224", depth=4, embed_dim=24, num_heads=2)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    decay = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    callbacks._divide(optimizer, model, "every-2", 4)
    scale = {
        id(parameter): group.get("lr_scale", 1)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for group in optimizer.param_groups:
        assert all(group["weight_decay"] == decay[id(parameter)] for parameter in group["params"])
    for name, parameter in model.named_parameters():
        assert scale[id(parameter)] == (
            0.25 if name.startswith(("blocks.1.mlp.", "blocks.3.mlp.")) else 1
        ), name
    with pytest.raises(ValueError, match="not train all parameters"):
        callbacks._divide(torch.optim.SGD(model.head.parameters(), lr=1e-3), model, "every-2", 4)


def test_the_divided_weights_are_those_of_the_networks_that_ewa_converts():
    model = timm.create_model("vit_tiny_patch16_224", depth=4, embed_dim=24, num_heads=2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    callbacks._divide_weights(model, "every-2", 2)
    for name, parameter in model.named_parameters():
        divisor = 2 if name.startswith(("blocks.1.mlp.", "blocks.3.mlp.")) else 1
        assert torch.equal(parameter * divisor, before[name]), name
        assert parameter.requires_grad


def test_the_latest_average_is_the_mean(tmp_path):
    for epoch in (1, 2, 10):
        torch.save(
            {"epoch": epoch, "state_dict": {"w": torch.tensor([float(epoch)])}},
            tmp_path / f"checkpoint-{epoch}.pth.tar",
        )

    average, _ = LatestAverage(2).commands(tmp_path, tmp_path / "mean")
    write_average(*average[average.index("studies.weight_average") + 1 :])
    assert torch.load(tmp_path / "mean.pth.tar")["state_dict"]["w"].item() == 6
    with pytest.raises(FileNotFoundError, match=r"3 checkpoints .*4 "):
        LatestAverage(4).commands(tmp_path, tmp_path / "mean")


def test_candidates_average_as_they_say():
    model = timm.create_model("vit_tiny_ewa_moe", depth=4, embed_dim=24, num_heads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    candidates.follow("last", model)
    candidates.rate_by_depth(model)
    averaging = ExpertWeightAveraging(model, optimizer, total_updates=20)
    experts = [layer.fc1.weight for layer in moe_layers(model).values()]
    model(torch.randn(1, 3, 224, 224)).sum().backward()
    for step in range(1, 21):
        before = [stacked.detach().clone() for stacked in experts]
        optimizer.step()
        for stacked, old, rate in zip(experts, before, (0.15, 0.3), strict=True):
            beta = rate if step > 18 else 0.0
            expected = torch.lerp(old, old.mean(0, keepdim=True), beta * 4 / 3)
            torch.testing.assert_close(stacked.detach(), expected)
    averaging.remove()
    assert candidates.annealed(1.0, 0.3) == pytest.approx(0.3)
    assert candidates.annealed(0.0, 0.3) == 0
    averaged = [step for step in range(1, 101) if candidates.cyclic(step / 100, 0.3)]
    assert len(averaged) in range(1, 12)
    assert averaged[-1] == 100


def test_every_tenth_step_averages():
    steps = range(1, candidates.UPDATES + 1)
    averaged = [step for step in steps if candidates.every_ten(step / candidates.UPDATES, 0.1)]
    assert averaged == list(range(10, candidates.UPDATES + 1, 10))


def test_experts_drop_the_paths_of_an_image_by_their_own_rates():
    model = timm.create_model(
        "vit_tiny_ewa_moe", depth=2, embed_dim=24, num_heads=2, drop_path_rate=0.3
    ).train()
    layer, block = model.blocks[1].mlp, model.blocks[1]
    assert block.drop_path2.drop_prob == pytest.approx(0.3)
    candidates.drop_path_by_expert(model)
    assert isinstance(block.drop_path2, torch.nn.Identity)
    routings = []
    layer.router.register_forward_hook(lambda router, inputs, routing: routings.append(routing))
    x = torch.randn(4000, 4, 24)
    torch.manual_seed(0)
    dropped = layer(x)
    outputs = [expert(x) for expert in layer.each()]
    kept_BN = dropped.abs().amax(2) > 0
    expert_BN = routings[0].experts().view(4000, 4)
    for expert, rate in enumerate((0.0, 0.2, 0.4, 0.6)):
        is_own_BN = expert_BN == expert
        assert 1 - kept_BN[is_own_BN].float().mean() == pytest.approx(rate, abs=0.03)
        is_kept_BN = kept_BN & is_own_BN
        torch.testing.assert_close(dropped[is_kept_BN], outputs[expert][is_kept_BN] / (1 - rate))
    # The rows of an image that one expert computes are kept or dropped together.
    for expert in range(4):
        is_own_BN = expert_BN == expert
        number_B = (kept_BN & is_own_BN).sum(1)
        assert ((number_B == 0) | (number_B == is_own_BN.sum(1))).all()
    layer.eval()
    assert torch.equal(layer(x[:2]), layer.run_mean(x[:2]))


def test_a_held_rate_stays_where_it_is(monkeypatch):
    monkeypatch.setattr(timm.scheduler, "create_scheduler_v2", timm.scheduler.create_scheduler_v2)
    callbacks.hold_rate("0.75")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    stated = dict(sched="cosine", num_epochs=10, step_on_epochs=False, updates_per_epoch=10)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, **stated)
    rates = []
    for update in range(1, 101):
        scheduler.step_update(num_updates=update)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[73] > rates[74]
    assert set(rates[74:]) == {rates[74]}
    assert rates[74] == pytest.approx(0.1464, abs=1e-3)


@given(images=st.integers(1, 13), rows=st.integers(1, 6), experts=st.integers(1, 5))
def test_whole_images_are_partitioned(images, rows, experts):
    routing = candidates.ImagePartition(experts)(torch.zeros(images, rows, 3))
    assert torch.equal(routing.token_indices.sort().values, torch.arange(images * rows))
    expert_BN = routing.experts().view(images, rows)
    assert (expert_BN == expert_BN[:, :1]).all()
    parts = expert_BN[:, 0].bincount(minlength=experts)
    assert parts.max() - parts.min() <= 1


def test_each_image_is_one_experts():
    model = timm.create_model(
        "vit_tiny_ewa_moe", depth=2, embed_dim=24, num_heads=2, num_experts=3
    ).train()
    candidates.whole_images(model)
    (layer,) = moe_layers(model).values()
    for _, stacked in layer.named_expert_parameters():
        torch.nn.init.normal_(stacked)
    x = torch.randn(6, 4, 24)
    outputs_E = torch.stack([expert(x) for expert in layer.each()])
    alike_EB = (outputs_E - layer(x)).abs().amax((2, 3)) < 1e-4
    assert (alike_EB.sum(0) == 1).all()
    assert (alike_EB.sum(1) == 2).all()
