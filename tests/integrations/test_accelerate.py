"""Accelerate.

The example resumes as if it had never stopped. Accumulated gradients hold the routers' losses.
"""

import runpy
import shutil

import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from common import EXAMPLES, SMALL_VIT
from processes import run_script
from torch import nn

from timm_moe import (
    ExpertWeightAveraging,
    add_router_losses,
    auxiliary_loss,
    export_dense,
    start_averaging,
    to_dense,
)

pytestmark = [pytest.mark.ci]


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate's state is that of the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("name", ["vit_tiny_ewa_moe", "vmoe_s32"])
def test_the_example_resumes_exactly(name, tmp_path, monkeypatch, capsys):
    """On 150 images, whose five batches end amid an accumulation."""
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "accelerate_loop.py"))["main"]
    train_set, test_set = main.__globals__["load_images"]()
    main.__globals__["load_images"] = lambda: (
        tuple(tensor[:150] for tensor in train_set),
        test_set,
    )
    main(3, name)
    whole = capsys.readouterr().out.splitlines()
    weights = {file: file.read_bytes() for file in sorted(tmp_path.glob("run/*/model.safetensors"))}
    assert [file.parent.name for file in weights] == ["epoch_1", "epoch_2", "epoch_3", "exported"]
    for folder in ("epoch_2", "epoch_3", "exported"):
        shutil.rmtree(tmp_path / "run" / folder)
    AcceleratorState._reset_state(reset_partial_state=True)
    main(3, name)
    assert capsys.readouterr().out.splitlines() == whole[2:]
    assert all(file.read_bytes() == content for file, content in weights.items())
    assert ("'ewa/share_rate': 0.3" in whole[5]) == (name == "vit_tiny_ewa_moe")
    assert ("balance" in whole[5] or "importance" in whole[5]) == (name == "vmoe_s32")


def test_the_example(tmp_path):
    done = run_script(EXAMPLES / "accelerate_loop.py", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/exported/model.safetensors").is_file()


@pytest.fixture
def accelerator():
    return Accelerator(gradient_accumulation_steps=2, cpu=True)


def test_accumulated_gradients_are_the_mean_with_the_losses_of_each_batch(accelerator, images):
    model = timm.create_model("vmoe_s32", num_experts=4, moe_layers="last-2", **SMALL_VIT)
    labels = torch.arange(6) % 5
    batches = [(images[:4], labels[:4]), (images[4:], labels[4:])]
    expected = []
    torch.manual_seed(1)  # of the routers' noise
    for x, y in batches:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        auxiliary = auxiliary_loss(model)
        assert auxiliary > 0
        (loss + auxiliary).backward()
        expected.append({name: parameter.grad for name, parameter in model.named_parameters()})
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(1)
    for x, y in batches:
        with accelerator.accumulate(prepared):
            accelerator.backward(
                add_router_losses(prepared, nn.functional.cross_entropy(prepared(x), y))
            )
            optimizer.step()
    for name, parameter in model.named_parameters():
        mean = (expected[0][name] + expected[1][name]) / 2
        assert torch.allclose(parameter.grad, mean, rtol=1e-4, atol=1e-7), name


def test_averaging_follows_the_steps_that_are_taken(accelerator, images, ewa_vit):
    """Also by an optimizer without a checkpoint of its own, from a count that is told."""
    model, optimizer = accelerator.prepare(ewa_vit, torch.optim.AdamW(ewa_vit.parameters()))
    averaging = start_averaging(model, optimizer, total_updates=10, updates=4)
    for x in images.split(1)[:4]:
        with accelerator.accumulate(model):
            accelerator.backward(add_router_losses(model, model(x).sum()))
            optimizer.step()
            optimizer.zero_grad()
    assert averaging.updates == 6
    assert averaging.share_rate == pytest.approx(0.3 * 6 / 10)
    assert ExpertWeightAveraging.of(optimizer) is averaging


def test_a_model_prepared_for_mixed_precision_is_exported(images, ewa_vit, tmp_path):
    """Accelerate puts autocast around its forward, for good.

    The written model computes without it.
    """
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.unwrap_model(accelerator.prepare(ewa_vit)).eval()
    assert export_dense(model, tmp_path / "vit").largest_difference < 1e-6
    stock = timm.create_model(f"local-dir:{tmp_path / 'vit'}", pretrained=True).eval()
    assert torch.equal(to_dense(model)(images), stock(images))
    assert not torch.equal(model(images), stock(images))  # it is as it was
