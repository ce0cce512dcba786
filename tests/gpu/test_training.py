"""Training on a GPU.

Tested are the memory of an EWA step, a step that is captured, DistributedDataParallel, and timm's
train.py with mixed precision.
"""

import copy
import math
import weakref

import pytest
import timm
import torch
from common import SMALL_VIT, family, write_images
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_script import needs_scripts, summary, train

import timm_moe


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that operators make, and their peak."""

    now = peak = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        known = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if torch.is_tensor(tensor)
        }
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        return result

    def _change(self, number):
        self.now += number
        self.peak = max(self.peak, self.now)


def peak_memory(device, work):
    """Bytes at the peak of some work beyond those before."""
    if device == "cpu":
        with Memory() as memory:
            work()
        return memory.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("batch", [64, 63])  # experts of equally many rows, and of not
def test_an_ewa_step_takes_no_more_memory_than_its_gradients_and_a_fiftieth(device, batch):
    peaks, sizes = [], []
    for name in ("vit_tiny_patch16_224", "vit_tiny_ewa_moe"):
        model = timm.create_model(name, **SMALL_VIT).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if name == "vit_tiny_ewa_moe":
            timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=9)
        images = torch.randn(batch, 3, 32, 32, device=device)

        def step(model=model, optimizer=optimizer, images=images):
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # makes the state of the optimizer
        peaks.append(peak_memory(device, step))
        sizes.append(sum(parameter.nbytes for parameter in model.parameters()))
    assert peaks[0] > 4 * sizes[0]  # activations, above all
    assert peaks[1] <= 1.02 * peaks[0] + sizes[1] - sizes[0]


def test_a_captured_step_averages_at_the_rate_of_each_update(device):
    """On a CPU the step is called instead of replayed, by an optimizer that lets it be captured."""
    models = [family("random partition").to(device) for _ in range(2)]
    averagings, steps = [], []
    for model, is_captured in zip(models, (False, True), strict=True):
        kind = torch.optim.AdamW if device == "cuda" else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=1e-2)
        optimizer.param_groups[0]["capturable"] = is_captured
        averagings.append(
            timm_moe.ExpertWeightAveraging(model, optimizer, 0.3, "linear", total_updates=5)
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        steps.append(optimizer.step)
    for update in range(5):
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            gradient = torch.randn_like(parameters[0])
            for parameter in parameters:
                parameter.grad.copy_(gradient)
        if update == 1 and device == "cuda":  # after a step that makes the optimizer's state
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                steps[1]()
            steps[1] = graph.replay
        for step in steps:
            step()
        assert [averaging.updates for averaging in averagings] == [update + 1] * 2
        for expected, actual in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without torch.distributed"
)
@pytest.mark.parametrize("name", ["vit_tiny_ewa_moe", "vit_tiny_moe", "widenet_b"])
@pytest.mark.first_case
def test_one_process_of_distributed_data_parallel(device, name):
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend, store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        alone = timm.create_model(name, **SMALL_VIT).to(device)
        model = copy.deepcopy(alone)
        wrapped = DistributedDataParallel(model, device_ids=[0] if device == "cuda" else None)
        for call, own in ((alone, alone), (wrapped, model)):
            optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
            timm_moe.ExpertWeightAveraging(own, optimizer, total_updates=3)
            torch.manual_seed(0)
            for _ in range(3):
                images, targets = (
                    torch.randn(4, 3, 32, 32, device=device),
                    torch.randint(5, (4,), device=device),
                )
                loss = nn.functional.cross_entropy(call(images), targets) + timm_moe.auxiliary_loss(
                    own
                )
                loss.backward()
                assert all(parameter.grad is not None for parameter in own.parameters())
                optimizer.step()
                optimizer.zero_grad()
        for (path, actual), expected in zip(
            model.named_parameters(), alone.parameters(), strict=True
        ):
            torch.testing.assert_close(
                actual, expected, rtol=1e-3, atol=1e-5, msg=lambda text, path=path: path + text
            )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.ci
@needs_scripts
@pytest.mark.parametrize(
    "options", [["--amp"], ["--amp", "--amp-dtype", "bfloat16"]], ids=["float16", "bfloat16"]
)
@pytest.mark.parametrize("name", ["vit_xtiny_ewa_moe", "vit_xtiny_moe"])
def test_timms_training_script_in_mixed_precision(device, name, options, tmp_path):
    images = write_images(tmp_path / "images", {"train": 12, "test": 6})
    kwargs = ["--model-kwargs", "embed_dim=48", "num_heads=3", "patch_size=8"]
    data = ["--model", name, "--num-classes", 3, "--device", device, "--experiment", "run"]
    log = train(tmp_path, images, *data, *kwargs, *options)
    assert log.count("EWA: averaging the 4 experts") == (name == "vit_xtiny_ewa_moe")
    rows = summary(tmp_path / "output/train/run")
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert all(
        math.isfinite(float(row[loss])) for row in rows for loss in ("train_loss", "eval_loss")
    )
