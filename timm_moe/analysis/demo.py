"""The demonstration ``timm-moe demo``.

It trains a dense ViT and its EWA counterpart on scikit-learn's digits, exports the latter and
compares both.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import Tensor, nn
from tqdm import tqdm

from ..console import show
from ..export import export_dense
from ..files import check_folder
from ..training.averaging import ExpertWeightAveraging
from .colours import COLOURS

BATCH_SIZE = 64
#: Picture of the accuracies.
PLOT = "training.png"
#: Images in [-1, 1] with one channel.
GREY = dict(input_size=(1, 8, 8), mean=(0.5,), std=(0.5,))
SMALL_VIT: dict[str, Any] = dict(
    pretrained_cfg_overlay=GREY,
    img_size=8,
    patch_size=2,
    in_chans=1,
    num_classes=10,
    embed_dim=64,
    depth=4,
    num_heads=4,
    mlp_ratio=2,
)

#: Runs in a process of its own, which must not import timm_moe.
RELOAD = """
import sys, numpy, timm, torch
folder, images, outputs = sys.argv[1:]
model = timm.create_model("local-dir:" + folder, pretrained=True).eval()
assert "timm_moe" not in sys.modules
with torch.inference_mode():
    numpy.save(outputs, model(torch.from_numpy(numpy.load(images))).numpy())
print(type(model).__module__ + "." + type(model).__name__)
"""


@dataclass
class Run:
    """Model in training and its measurements."""

    name: str
    model: nn.Module
    epochs: int
    steps_per_epoch: int
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    share_rates: list[float] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.optimizer = create_optimizer_v2(self.model, opt="adamw", lr=2e-3, weight_decay=0.05)
        # The scheduler also starts the averaging of the experts: timm_moe hooks into timm's
        # factory.
        self.scheduler, _ = create_scheduler_v2(
            self.optimizer,
            num_epochs=self.epochs,
            warmup_epochs=2,
            updates_per_epoch=self.steps_per_epoch,
        )
        self.averaging = ExpertWeightAveraging.of(self.optimizer)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch of images (B, 1, 8, 8) with labels (B,), and measure the step."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.step_times.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.share_rates.append(self.averaging.share_rate if self.averaging else 0.0)


def run_demo(output: str, epochs: int) -> None:
    """Train for some epochs, export to a folder, reload, plot and report.

    Raises:
        ValueError: if there are no epochs.
        RuntimeError: if the exported model does not predict the same.
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}.")
    folder = Path(output)
    check_folder(folder, (PLOT,), overwrite=True)
    folder.mkdir(parents=True, exist_ok=True)
    train_set, test_set = load_images()

    torch.set_num_threads(1)  # small models only lose time to a second thread
    torch.manual_seed(0)
    steps = len(train_set[1]) // BATCH_SIZE
    dense = Run("dense", timm.create_model("vit_tiny_patch16_224", **SMALL_VIT), epochs, steps)
    ewa = Run("EWA", timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT), epochs, steps)
    train([dense, ewa], train_set, test_set)

    export = export_dense(ewa.model, folder / "exported", overwrite=True)
    stock_class, outputs = reload_without_plugin(export.path, test_set[0])
    plot([dense, ewa], folder / PLOT)
    _show_comparison(dense, ewa, export.parameters)

    with torch.inference_mode():
        expected = ewa.model.eval()(test_set[0])
    same = int((outputs.argmax(1) == expected.argmax(1)).sum())
    show(
        "",
        f"Plain timm, without timm_moe, loaded {export.path} as {stock_class}:",
        f"  {same} of {len(outputs)} predictions are the same, "
        f"largest difference of an output {(outputs - expected).abs().max().item():.3g}",
    )
    show("", f"Exported model: {export.path}", f"Plot:           {folder / PLOT}")
    if same != len(outputs):
        raise RuntimeError("The exported model does not predict what the trained one does.")


def _show_comparison(dense: Run, ewa: Run, exported_parameters: int) -> None:
    """Print the accuracy, size and speed of both models."""
    runs = (dense, ewa)
    parameters = [sum(parameter.numel() for parameter in run.model.parameters()) for run in runs]
    rows = [
        ("", dense.name, ewa.name),
        ("accuracy, 500 test images", *(f"{run.accuracies[-1]:.1f} %" for run in runs)),
        ("parameters in training", *(f"{number:,}" for number in parameters)),
        ("parameters after export", f"{parameters[0]:,}", f"{exported_parameters:,}"),
        ("time per training step", *(f"{median(run.step_times) * 1e3:.1f} ms" for run in runs)),
    ]
    show("", *(f"{label:<28}{first:>14}{second:>14}" for label, first, second in rows))
    show(
        "",
        "One seed on toy data: a point more or less is noise. Real images: docs/results.md in the "
        "repository.",
    )


def load_images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Load training and test set of scikit-learn's digits.

    Each is images (N, 1, 8, 8) in [-1, 1] and labels (N,).
    """
    digits = load_digits()
    images = digits.images[:, None].astype(np.float32) / 8 - 1
    parts = train_test_split(
        images, digits.target, test_size=500, random_state=0, stratify=digits.target
    )
    train, test, train_labels, test_labels = map(torch.from_numpy, parts)
    return (train, train_labels), (test, test_labels)


def train(
    runs: list[Run],
    train_set: tuple[Tensor, Tensor],
    test_set: tuple[Tensor, Tensor],
    seed: int = 0,
) -> None:
    """Train all runs on the same batches, one step each in turn."""
    images, labels = train_set
    generator = torch.Generator().manual_seed(seed)
    epochs = runs[0].epochs
    steps = epochs * runs[0].steps_per_epoch
    # A terminal gets a bar, a pipe or a log some lines.
    progress = tqdm(total=steps, unit="step", desc="training", disable=None)
    epochs_of_line = max(epochs // 10, 1)
    for epoch in range(epochs):
        for run in runs:
            run.model.train()
        order = torch.randperm(len(labels), generator=generator)
        for batch in order.split(BATCH_SIZE)[: runs[0].steps_per_epoch]:
            for run in runs:
                run.step(images[batch], labels[batch])
            progress.update()
            losses = {f"loss {run.name}": f"{run.losses[-1]:.3f}" for run in runs[:2]}
            progress.set_postfix(
                {**losses, "share rate": f"{runs[-1].share_rates[-1]:.3f}"}, refresh=False
            )
        for run in runs:
            with torch.inference_mode():
                right = run.model.eval()(test_set[0]).argmax(1) == test_set[1]
            run.accuracies.append(right.float().mean().item() * 100)
            run.scheduler.step(epoch + 1)
        if progress.disable and (epoch + 1) % epochs_of_line == 0:
            accuracies = ", ".join(f"{run.name} {run.accuracies[-1]:.1f} %" for run in runs)
            show(f"Epoch {epoch + 1} of {epochs}: {accuracies} of the test images right")
    progress.close()


def reload_without_plugin(exported: Path, images: Tensor) -> tuple[str, Tensor]:
    """Run the exported model in a new process that does not import timm_moe.

    Returns:
        The path of its class, and its outputs (N, C).
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, outputs = Path(scratch, "images.npy"), Path(scratch, "outputs.npy")
        np.save(inputs, images.numpy())
        command = [sys.executable, "-c", RELOAD, str(exported), str(inputs), str(outputs)]
        environment = {**os.environ, "TIMM_MOE_AUTOLOAD": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"Plain timm could not load {exported}: {done.stderr.strip().splitlines()[-1]}"
            )
        return done.stdout.strip(), torch.from_numpy(np.load(outputs))


def plot(runs: list[Run], file: Path) -> None:
    """Draw loss, accuracy and share rate over training."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle("A small ViT on scikit-learn's digits: dense, and with EWA", fontweight="bold")
    losses, accuracies, rates = figure.subplots(1, 3)
    for run, colour, marker in zip(runs, COLOURS, ".x", strict=False):
        style = dict(label=run.name, color=colour, marker=marker)
        per_epoch = np.array(run.losses).reshape(run.epochs, -1).mean(1)
        losses.plot(range(1, run.epochs + 1), per_epoch, **style)
        accuracies.plot(range(1, run.epochs + 1), run.accuracies, **style)
    steps = np.arange(1, len(runs[-1].share_rates) + 1) / runs[-1].steps_per_epoch
    rates.plot(steps, runs[-1].share_rates, color=COLOURS[1])
    losses.set(
        title="Does the loss fall?",
        xlabel="epoch",
        ylabel="training loss (cross-entropy)",
        yscale="log",
    )
    accuracies.set(
        title="Is one more accurate? (a point is noise)", xlabel="epoch", ylabel="test accuracy (%)"
    )
    rates.set(title="How strongly are the experts averaged?", xlabel="epoch", ylabel="share rate")
    losses.legend()
    accuracies.legend()
    figure.savefig(file, dpi=110)
