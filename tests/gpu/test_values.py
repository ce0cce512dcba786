"""Values and gradients of every layer and router on a GPU: the CPU's."""

import copy
from itertools import product

import pytest
import torch
from devices import NETWORKS, WIDTH, equal_slots, values_and_gradients
from torch import nn

from timm_moe.layers import (
    EnsembleRouter,
    EwaMlp,
    ImageRouter,
    MoeMlp,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    SharedExpertMlp,
    TilingRouter,
    TopKRouter,
)
from timm_moe.layers.grouped import grouped_linear, runs_of

TOLERANCE = {
    torch.float64: dict(rtol=1e-9, atol=1e-11),
    torch.float32: dict(rtol=1e-4, atol=1e-5),
    torch.float16: dict(rtol=1e-2, atol=1e-2),
    torch.bfloat16: dict(rtol=3e-2, atol=3e-2),
}
ROUTERS = {
    "top-k": (TopKRouter, dict(batch_priority=True)),
    "image-level": (ImageRouter, {}),
    "pBE": (EnsembleRouter, dict(ensemble_size=2)),
    "tiling": (TilingRouter, dict(ensemble_size=2)),
    "partitioning": (PartitionedRouter, dict(ensemble_size=2)),
    "multi-head": (MultiHeadRouter, {}),
}
LOSSES = {"importance": 0.1, "load": 0.2, "balance": 0.3, "balance_top_k": 0.4}


def layers(kind, network):
    """Yield expert layers of a kind, each with a batch.

    Batches have whole and partial parts, too few rows, none, or dropped choices.
    """
    if kind == "random partition":
        for batch, rows in ((2, 6), (2, 7), (1, 3), (0, 7)):
            yield (
                EwaMlp(NETWORKS[network](), RandomPartition(4), "independent"),
                torch.randn(batch, rows, WIDTH),
            )
        return
    router, options = ROUTERS["image-level" if kind == "shared expert" else kind]
    layer = SharedExpertMlp if kind == "shared expert" else MoeMlp
    options = dict(noise_std=1.0, capacity_multiple=1, loss_weights=LOSSES, **options)
    for capacity_factor, group_images, batch, rows in (
        (None, None, 4, 7),
        (1.0, None, 4, 7),
        (0.5, 1, 2, 9),
    ):
        made = router(
            WIDTH, 4, 2, capacity_factor=capacity_factor, group_images=group_images, **options
        )
        nn.init.normal_(made.weight)
        yield (
            layer(NETWORKS[network](), made, 4, "independent"),
            torch.randn(2 * batch, rows, WIDTH),
        )


@pytest.fixture
def draws_of_the_cpu(monkeypatch):
    """Draw on the CPU, so that all devices draw the same."""
    randperm, randn = torch.randperm, torch.randn
    monkeypatch.setattr(torch, "randperm", lambda number, device=None: randperm(number).to(device))
    monkeypatch.setattr(
        torch, "randn_like", lambda x, **_: randn(x.shape, dtype=x.dtype).to(x.device)
    )


CASES = [
    *product(
        ["random partition", *ROUTERS, "shared expert"],
        NETWORKS,
        [torch.float64, torch.float32],
    )
]


@pytest.mark.usefixtures("draws_of_the_cpu")
@pytest.mark.parametrize(
    ("device", "kind", "network", "dtype"),
    [
        ("cpu", *CASES[0]),  # tests/layers/test_equal_slots.py has the others
        *(pytest.param("cuda", *case, marks=pytest.mark.gpu) for case in CASES),
    ],
    indirect=["device"],
)
def test_values_and_gradients_are_those_of_a_cpu(device, kind, network, dtype):
    for layer, x in layers(kind, network):
        layer, x = layer.to(dtype), x.to(dtype)
        with equal_slots(False):
            expected = values_and_gradients(copy.deepcopy(layer), x)
        actual = values_and_gradients(layer.to(device), x.to(device))
        for name, value in expected.items():
            assert actual[name].device.type == device
            torch.testing.assert_close(
                actual[name].cpu(),
                value,
                **TOLERANCE[dtype],
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("top_k", [1, 2])
def test_outputs_under_autocast_have_the_type_of_a_dense_networks(device, top_k):
    network = NETWORKS["Mlp"]()
    router = TopKRouter(WIDTH, 4, top_k, capacity_factor=1.0)
    layer = MoeMlp(network, router).to(device)
    x = torch.randn(2, 5, WIDTH, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert layer(x).dtype == network.to(device)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("end_device", ["cpu", "device"])
@pytest.mark.parametrize("width", [16, 12])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.first_case
def test_products_of_runs_are_those_of_a_cpu(device, dtype, width, end_device):
    """With widths of 16 and 8, ``grouped_mm`` multiplies where the GPU has kernels for it."""
    end = torch.tensor([4, 4, 13])
    x, weight, bias = torch.randn(16, width), torch.randn(3, 8, width), torch.randn(3, 8)
    results = []
    for place in ("cpu", device):
        tensors = [
            tensor.to(place, dtype, copy=True).requires_grad_() for tensor in (x, weight, bias)
        ]
        y = grouped_linear(
            *tensors, runs_of(end.to(place if end_device == "device" else "cpu"), tensors[0], 8)
        )
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y))
        results.append([tensor.cpu() for tensor in (y, *(tensor.grad for tensor in tensors))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE[dtype])


def test_partitions_are_equal_parts_drawn_by_the_device_each_time(device):
    partition, x = RandomPartition(4), torch.empty(1000, 2, device=device)
    first, second = partition(x).experts().flatten(), partition(x).experts().flatten()
    assert first.device.type == device
    assert first.bincount().tolist() == second.bincount().tolist() == 4 * [250]
    assert 150 < (first == second).sum() < 350  # 250 on average, with a standard deviation of 14
    torch.manual_seed(0)
    third = partition(x).experts()
    torch.manual_seed(0)
    assert torch.equal(partition(x).experts(), third)
