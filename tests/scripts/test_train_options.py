"""Pairs of train.py's options: for each two options, each two of their values meet in some run.

The runs are small and in this process, with timm's public objects put together as train.py does it.
Where TIMM_SCRIPTS is set (see test_train_script.py), the unmodified script runs too.
"""

import argparse
from contextlib import nullcontext
from itertools import combinations, product

import numpy as np
import pytest
import timm
import timm.optim  # whose factories are taken from it at each call, as train.py finds them
import timm.scheduler
import torch
from common import OPTIONS
from processes import torchrun
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.task import ClassificationTask
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler
from torch import nn
from train_script import needs_scripts, summary, train

from timm_moe import export_dense, moe_layers
from timm_moe.analysis import data
from timm_moe.analysis.evaluation import evaluate

LEARNING_RATES = {
    "adamw": 2e-3,
    "sgd": 0.05,
    "lamb": 0.01,
    "lion": 3e-4,
    "muon": 5e-3,
    "lookahead_adamw": 2e-3,
}
CHOICES = {
    "opt": list(LEARNING_RATES),
    "amp": [None, "float16", "bfloat16"],
    "loss": ["label smoothing", "mixup", "cutmix, bce"],
    "grad_accum_steps": [1, 2],
    "model_ema": [False, True],
    "clip_grad": [None, 1.0],
    "layer_decay": [None, 0.9],
    "grad_checkpointing": [False, True],
    "drop_path": [None, 0.1],
    "resume": [False, True],
}


def pairwise(options):
    """Choose few settings in which all pairs of two options' values occur."""
    values = [(name, value) for name in options for value in options[name]]
    missing = {pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0]}
    settings = []
    while missing:
        setting = dict(min(missing, key=lambda pair: [values.index(value) for value in pair]))
        for name in options:
            if name not in setting:
                setting[name] = max(
                    options[name],
                    key=lambda value: sum(
                        {*pair} <= {*setting.items(), (name, value)} for pair in missing
                    ),
                )
        missing -= {pair for pair in missing if {*pair} <= setting.items()}
        settings.append(setting)
    return settings


def words(setting):
    return ", ".join(
        name if value is True else f"{name} {value}" for name, value in setting.items() if value
    )


def test_pairwise_is_what_it_says():
    settings = pairwise(CHOICES)
    for first, second in combinations(CHOICES, 2):
        assert {(s[first], s[second]) for s in settings} == {
            *product(CHOICES[first], CHOICES[second])
        }
    assert len(settings) <= 24  # 6 x 3 at least


def spread(state_dict):
    """Return the largest deviation of an expert from the mean of its layer, over all layers."""
    return max(
        (w - w.mean(0)).abs().max().item()
        for name, w in state_dict.items()
        if ".mlp." in name and w.ndim == 3
    )


# --- in this process

CLASSES, BATCH, MICRO_BATCHES, EPOCHS = 3, 6, 4, 3
FULL = 0.75  # of 4 experts: a last averaging at this rate makes them equal


def colored_images():
    """Make noise in a color for each class."""
    x = torch.randn(BATCH * MICRO_BATCHES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % CLASSES
    x[torch.arange(len(x)), y] += 1
    return x, y


class Training:
    """A small version of train.py's main function."""

    def __init__(self, folder, setting, resume=None):
        torch.manual_seed(0)
        self.setting, self.amp = setting, setting["amp"] and getattr(torch, setting["amp"])
        kwargs = dict(OPTIONS, share_rate=FULL)
        args = argparse.Namespace(
            model="vit_tiny_ewa_moe",
            num_classes=CLASSES,
            model_kwargs=kwargs,
            opt=setting["opt"],
            weight_decay=0.05,
            lr=LEARNING_RATES[setting["opt"]],
            momentum=0.9,
            layer_decay=setting["layer_decay"],
            img_size=32,
        )
        options = dict(kwargs, num_classes=CLASSES, drop_path_rate=setting["drop_path"])
        self.model = timm.create_model(
            args.model, **{name: v for name, v in options.items() if v is not None}
        )
        self.model.set_grad_checkpointing(setting["grad_checkpointing"])
        self.mixup, criterion = self._loss(setting["loss"])
        self.task = ClassificationTask(
            self.model, criterion, device=torch.device("cpu"), verbose=False
        )
        self.optimizer = timm.optim.create_optimizer_v2(
            self.model, **timm.optim.optimizer_kwargs(cfg=args)
        )
        self.scaler = NativeScaler(device="cpu") if self.amp is torch.float16 else None
        epoch = 0
        if resume:
            epoch = timm.models.resume_checkpoint(
                self.model, str(resume), self.optimizer, self.scaler, log_info=False
            )
        self.ema = ModelEmaV3(self.model, decay=0.5) if setting["model_ema"] else None
        if resume and self.ema:
            timm.models.load_checkpoint(self.ema.module, str(resume), use_ema=True)
        self.updates_per_epoch = MICRO_BATCHES // setting["grad_accum_steps"]
        self.scheduler, _ = timm.scheduler.create_scheduler_v2(
            self.optimizer,
            num_epochs=EPOCHS,
            warmup_epochs=0,
            updates_per_epoch=self.updates_per_epoch,
        )
        if epoch:
            self.scheduler.step(epoch)
        self.saver = CheckpointSaver(
            self.model,
            self.optimizer,
            args=args,
            model_ema=self.ema,
            amp_scaler=self.scaler,
            checkpoint_dir=str(folder),
            recovery_dir=str(folder),
        )
        self.first_epoch = epoch
        self.images, self.labels = colored_images()

    @staticmethod
    def _loss(name):
        if name == "label smoothing":
            return None, LabelSmoothingCrossEntropy(0.1)
        if name == "mixup":
            return Mixup(mixup_alpha=0.2, num_classes=CLASSES), SoftTargetCrossEntropy()
        return Mixup(mixup_alpha=0, cutmix_alpha=0.5, num_classes=CLASSES), BinaryCrossEntropy()

    def run(self):
        for epoch in range(self.first_epoch, EPOCHS):
            self.model.train()
            for micro_batch in range(MICRO_BATCHES):
                torch.manual_seed(100 * epoch + micro_batch)
                np.random.seed(100 * epoch + micro_batch)
                self._train(epoch, micro_batch)
            self.saver.save_checkpoint(epoch, metric=epoch)
            self.scheduler.step(epoch + 1, 0.0)
        return self

    def _train(self, epoch, micro_batch):
        steps = self.setting["grad_accum_steps"]
        x, y = self.images[micro_batch::MICRO_BATCHES], self.labels[micro_batch::MICRO_BATCHES]
        if self.mixup:
            x, y = self.mixup(x.clone(), y)
        with torch.autocast("cpu", self.amp) if self.amp else nullcontext():
            loss = self.task(x, y)["loss"] / steps
        needs_update = (micro_batch + 1) % steps == 0
        clip = dict(clip_grad=self.setting["clip_grad"], parameters=self.model.parameters())
        if self.scaler:
            self.scaler(loss, self.optimizer, need_update=needs_update, **clip)
        else:
            loss.backward()
            if needs_update and clip["clip_grad"]:
                nn.utils.clip_grad_norm_(clip["parameters"], clip["clip_grad"])
            if needs_update:
                self.optimizer.step()
        if needs_update:
            self.optimizer.zero_grad()
            if self.ema:
                self.ema.update(self.model)
            self.scheduler.step_update(epoch * self.updates_per_epoch + (micro_batch + 1) // steps)

    @torch.no_grad()
    def loss(self):
        """Measure the loss of the experts' mean on the images without augmentation."""
        return nn.functional.cross_entropy(self.model.eval()(self.images), self.labels).item()


#: `.ci/run` has the others too.
FIRST = pairwise(CHOICES)[1::6]


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(s, marks=[] if s in FIRST else pytest.mark.ci, id=words(s))
        for s in pairwise(CHOICES)
    ],
)
@pytest.mark.first_case
def test_in_process(tmp_path, setting):
    for name in ("whole", "resumed", "untrained"):
        (tmp_path / name).mkdir()
    whole = Training(tmp_path / "whole", setting).run()
    assert whole.loss() < 0.98 * Training(tmp_path / "untrained", setting).loss()

    updates = EPOCHS * whole.updates_per_epoch
    checkpoint = torch.load(tmp_path / "whole/last.pth.tar", weights_only=False)
    counted = checkpoint["optimizer"]["param_groups"][0]["ewa_updates"]
    # Where the scaler skips.
    assert counted == updates or (setting["amp"] == "float16" and counted > updates / 2)
    first = torch.load(tmp_path / "whole/checkpoint-0.pth.tar", weights_only=False)
    assert spread(first["state_dict"]) > 1e-4
    if counted == updates:
        assert spread(checkpoint["state_dict"]) < 1e-6

    export = export_dense(
        tmp_path / "whole/last.pth.tar", tmp_path / "dense", use_ema=setting["model_ema"]
    )
    evaluated = whole.ema.module if whole.ema else whole.model
    dense = timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()
    assert not moe_layers(dense)
    with torch.no_grad():
        torch.testing.assert_close(dense(whole.images), evaluated.eval()(whole.images))

    if setting["resume"]:
        resumed = Training(
            tmp_path / "resumed", setting, resume=tmp_path / "whole/checkpoint-0.pth.tar"
        ).run()
        for name, expected in whole.model.state_dict().items():
            torch.testing.assert_close(
                resumed.model.state_dict()[name], expected, rtol=0, atol=0, msg=name
            )


# --- train.py itself

SCRIPT_OPTIONS = {**CHOICES, "torchcompile": [None, "aot_eager"]}
LOSSES = {
    "label smoothing": [],
    "mixup": ["--mixup", "0.2"],
    "cutmix, bce": ["--cutmix", "0.5", "--bce-loss"],
}
MODEL = ["--model", "vit_xtiny_ewa_moe", "--num-classes", CLASSES]
MODEL += [
    "--model-kwargs",
    "depth=4",
    "embed_dim=48",
    "num_heads=3",
    "patch_size=8",
    f"share_rate={FULL}",
]


def arguments(setting):
    options = [
        *MODEL,
        *LOSSES[setting["loss"]],
        "--opt",
        setting["opt"],
        "--lr",
        LEARNING_RATES[setting["opt"]],
    ]
    options += ["--model-ema-decay", 0.5, "--weight-decay", 0.05]
    if setting["amp"]:
        options += ["--amp", "--amp-dtype", setting["amp"]]
    for name in setting:
        if name not in ("amp", "loss", "opt", "resume") and setting[name]:
            options += [
                f"--{name.replace('_', '-')}",
                *([] if setting[name] is True else [setting[name]]),
            ]
    return options


@pytest.mark.ci  # the default suite has them in this process
@needs_scripts
@pytest.mark.parametrize("setting", pairwise(SCRIPT_OPTIONS), ids=words)
def test_script(images, tmp_path, setting):
    log = train(tmp_path, images, *arguments(setting), "--experiment", "a", epochs=EPOCHS)
    assert log.count("EWA: averaging the 4 experts of 2 layers") == 1
    folder, measured = tmp_path / "output/train/a", summary(tmp_path / "output/train/a")
    assert float(measured[-1]["eval_loss"]) < float(measured[0]["eval_loss"]) < 1.4
    assert float(measured[-1]["eval_top1"]) > 60
    _check_averaged(folder / "last.pth.tar", setting, images)
    assert (
        spread(torch.load(folder / "checkpoint-0.pth.tar", weights_only=False)["state_dict"]) > 1e-4
    )

    export = export_dense(folder / "last.pth.tar", tmp_path / "dense", use_ema=setting["model_ema"])
    inference = data.Inference(batch_size=13, workers=0, device="cpu")
    result = evaluate(
        [f"local-dir:{export.path}"], data.image_folder(images, "test"), inference=inference
    )
    error = 100 - float(measured[-1]["eval_top1"])
    # 2.6: one image.
    assert 100 * result["error"] == pytest.approx(error, abs=2.6 if setting["amp"] else 1e-3)

    if setting["resume"]:
        first = folder / "checkpoint-0.pth.tar"
        train(
            tmp_path,
            images,
            *arguments(setting),
            "--experiment",
            "b",
            "--resume",
            first,
            epochs=EPOCHS,
        )
        assert [row["epoch"] for row in summary(tmp_path / "output/train/b")] == ["1", "2"]
        _check_averaged(tmp_path / "output/train/b/last.pth.tar", setting, images)


def _check_averaged(path, setting, images):
    checkpoint = torch.load(path, weights_only=False)
    batches = len(list((images / "train").rglob("*.png"))) // 12
    updates = EPOCHS * -(-batches // setting["grad_accum_steps"])
    counted = checkpoint["optimizer"]["param_groups"][0]["ewa_updates"]
    assert counted == updates or (setting["amp"] == "float16" and counted > updates / 2)
    assert counted < updates or spread(checkpoint["state_dict"]) < 1e-6


#: timm hands ``device_ids`` to DDP, which refuses them on CPUs. Nothing else of the script is
#: changed.
ON_CPUS = """
import runpy, sys
from timm.task import ClassificationTask
prepare = ClassificationTask.prepare_distributed
ClassificationTask.prepare_distributed = (
    lambda self, device_ids=None, **options: prepare(self, **options)
)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs_scripts
@pytest.mark.ci  # tests/training/test_ddp.py has a quick one
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--model-ema"], id="ema"),
        pytest.param(["--amp", "--amp-dtype", "bfloat16", "--grad-accum-steps", 2], id="amp"),
    ],
)
def test_script_in_two_processes(images, tmp_path, options):
    (tmp_path / "on_cpus.py").write_text(ON_CPUS)
    launcher = [*torchrun(2), str(tmp_path / "on_cpus.py")]
    options = [*MODEL, *options, "--model-ema-decay", 0.5, "--experiment", "a", "-b", 6]  # of each
    log = train(tmp_path, images, *options, launcher=launcher, GLOO_SOCKET_IFNAME="lo")
    assert log.count("EWA: averaging") == 1  # one process speaks
    folder, measured = tmp_path / "output/train/a", summary(tmp_path / "output/train/a")
    assert float(measured[-1]["eval_loss"]) < float(measured[0]["eval_loss"])
    checkpoint = torch.load(folder / "last.pth.tar", weights_only=False)
    batches = 12 if "--model-ema" in options else 6
    assert checkpoint["optimizer"]["param_groups"][0]["ewa_updates"] == batches
    assert spread(checkpoint["state_dict"]) < 1e-6
    assert export_dense(folder / "last.pth.tar", tmp_path / "dense").exact
