"""Compiled training steps on a GPU, CUDA graphs among them: eager mode's, and without a wait.

Then train.py, which compiles, trains and validates.
"""

import copy
import math

import pytest
import torch
from common import without_draws, write_images
from devices import waits
from timm.layers import Mlp
from torch import nn
from train_script import needs_scripts, summary, train

import timm_moe
from timm_moe.layers import MoeMlp, TopKRouter
from timm_moe.layers.grouped import multiplies_by_offsets

NAMES = (
    "top-2, capacity",
    "random partition",
    "top-2, nothing dropped",
    "image-level",
    "shared expert",
    "WideNet",
    "pBE",
)
DROPLESS = ("top-2, nothing dropped", "shared expert")
WAYS = {
    "cpu": dict(backend="aot_eager"),
    "cuda": dict(mode="default"),
    "cuda, as graphs": dict(mode="reduce-overhead"),
}


def in_each_way(names, *cases):
    """Parametrize a test by devices, options and what else it takes; on the CPU by one case."""
    return pytest.mark.parametrize(
        ("device", "options", *names),
        [
            pytest.param(
                *(way.partition(",")[0], options, *case),
                id="-".join((way, *case)),
                marks=[] if way == "cpu" else pytest.mark.gpu,
            )
            for way, options in WAYS.items()
            for case in (cases[:1] if way == "cpu" else cases)
        ],
        indirect=["device"],
    )


@in_each_way(["name"], *((name,) for name in NAMES))
@pytest.mark.ci
def test_compiled_steps_are_those_of_eager_mode(device, options, name):
    torch.compiler.reset()
    eager, model = without_draws(name).to(device), without_draws(name).to(device)
    calls = eager, torch.compile(model, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (eager, model)]

    def backward(number, images):
        torch.manual_seed(0)  # the same partitions
        loss = calls[number](images).square().mean() + timm_moe.auxiliary_loss(
            (eager, model)[number]
        )
        loss.backward()
        return loss.detach().clone()

    # CUDA graphs are recorded in the second step, and replayed from the third on.
    for _ in range(5):
        images = torch.randn(4, 3, 32, 32, device=device)
        losses = [backward(number, images) for number in range(2)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        for (path, actual), expected in zip(
            model.named_parameters(), eager.parameters(), strict=True
        ):
            torch.testing.assert_close(
                actual.grad,
                expected.grad,
                rtol=1e-3,
                atol=1e-4,
                msg=lambda text, path=path: path + text,
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if name not in DROPLESS:
        images = torch.randn(4, 3, 32, 32, device=device)
        with waits(device, 0):
            backward(1, images)


@in_each_way([], ())
@pytest.mark.ci
def test_compiled_layers_without_a_capacity_are_those_of_eager_mode_in_bfloat16(device, options):
    """Compare the way without a wait of the host, where ``grouped_mm`` has kernels."""
    torch.compiler.reset()
    router = TopKRouter(32, 4, 2, capacity_factor=None)
    nn.init.normal_(router.weight)
    eager = MoeMlp(Mlp(32, 64), router, "independent").to(device)
    layers = eager, copy.deepcopy(eager)
    calls = eager, torch.compile(layers[1], **options)

    def outcome(number, x):
        layers[number].zero_grad()
        with torch.autocast(device, torch.bfloat16):
            y = calls[number](x)
        (y.square().mean() + timm_moe.auxiliary_loss(nn.Sequential(layers[number]))).backward()
        return [y.detach().clone(), *(p.grad.clone() for p in layers[number].parameters())]

    for _ in range(4):
        x = torch.randn(4, 16, 32, device=device)
        for expected, actual in zip(outcome(0, x), outcome(1, x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)
    with torch.autocast(device, torch.bfloat16):
        is_grouped = multiplies_by_offsets(x.flatten(0, 1), 64)
    if is_grouped:
        with waits(device, 0):
            outcome(1, x)


@pytest.mark.ci
@pytest.mark.gpu
@needs_scripts
@pytest.mark.parametrize("device", ["cuda"], ids=["cuda, as graphs"], indirect=True)
@pytest.mark.parametrize("name", ["vit_xtiny_ewa_moe", "vit_xtiny_moe"])
def test_timms_training_script_validates_what_it_compiled(device, name, tmp_path):
    images = write_images(tmp_path / "images", {"train": 12, "test": 6})
    kwargs = ["--model-kwargs", "embed_dim=48", "num_heads=3", "patch_size=8"]
    data = ["--model", name, "--num-classes", 3, "--device", device, "--experiment", "run"]
    graphs = ["--torchcompile", "inductor", "--torchcompile-mode", "reduce-overhead"]
    train(tmp_path, images, *data, *kwargs, *graphs, "--amp", "--amp-dtype", "bfloat16")
    rows = summary(tmp_path / "output/train/run")
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert all(
        math.isfinite(float(row[loss])) for row in rows for loss in ("train_loss", "eval_loss")
    )
