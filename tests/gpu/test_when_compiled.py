"""Compiled training steps on a GPU, CUDA graphs among them: eager mode's, and without a wait."""

import pytest
import torch
from common import without_draws
from devices import waits

import timm_moe

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


@pytest.mark.parametrize(
    ("device", "options"),
    [
        pytest.param(
            way.partition(",")[0], options, id=way, marks=[] if way == "cpu" else pytest.mark.gpu
        )
        for way, options in WAYS.items()
    ],
    indirect=["device"],
)
@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
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
