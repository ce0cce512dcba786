"""Ensembles inside one model in Hugging Face's Trainer.

Each member's output is compared with its image's label.
"""

import logging

import pytest
import torch
from common import OPTIONS
from torch import nn
from torch.nn import functional as F

import studies.rivals  # noqa: F401  (registers the models)
import timm_moe

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from timm_moe.integrations.transformers import ExpertCallback  # noqa: E402

pytestmark = [pytest.mark.ci]

EXPERTS = dict(num_experts=4, moe_layers="last-2", aux_loss_weight=0.0)
NAMES = {"vmoe_pbe_s32": EXPERTS, "vit_be_s32": {}, "vit_mimo_s32": {}, "vmoe_mimo_s32": EXPERTS}


def wrapped(name):
    """A model in transformers' wrapper."""
    torch.manual_seed(0)
    config = transformers.TimmWrapperConfig(
        architecture=name, model_args={**OPTIONS, **NAMES[name]}, num_labels=5
    )
    model = transformers.TimmWrapperForImageClassification(config)
    nn.init.normal_(model.timm_model.head.weight)
    return model


def smoothed(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=0.2)


def mean_loss(outputs, labels, num_items_in_batch):
    return F.cross_entropy(outputs["logits"], labels)


def summed_loss(outputs, labels, num_items_in_batch):
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def members_loss(outputs, labels, num_items_in_batch):
    return timm_moe.MemberLoss(nn.CrossEntropyLoss())(outputs["logits"], labels)


WAYS = {
    "the model": (F.cross_entropy, {}),
    "label smoothing": (smoothed, dict(label_smoothing_factor=0.2)),
    "a mean": (F.cross_entropy, dict(compute_loss_func=mean_loss)),
    "a sum": (F.cross_entropy, dict(compute_loss_func=summed_loss)),
    "a loss of members": (F.cross_entropy, dict(compute_loss_func=members_loss)),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "the model") for name in NAMES),
        *(("vit_be_s32", way) for way in WAYS if way != "the model"),
    ],
)
def test_the_loss_is_the_mean_of_the_members(name, way, tmp_path, caplog):
    model = wrapped(name)
    criterion, options = WAYS[way]
    seen = []

    model.timm_model.register_forward_hook(lambda _, x, output: seen.append((x[0], output)))
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = [{"pixel_values": image, "labels": index % 5} for index, image in enumerate(images)]
    args = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=6,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        label_smoothing_factor=options.get("label_smoothing_factor", 0.0),
    )
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[ExpertCallback()],
        compute_loss_func=options.get("compute_loss_func"),
    )
    losses = trainer.compute_loss_func, trainer.label_smoother, model.loss_function
    with caplog.at_level(logging.WARNING, "timm_moe"):
        trainer.train()
    ((shown, logits),) = seen
    labels = torch.tensor(
        [int((images == image).flatten(1).all(1).nonzero()) % 5 for image in shown]
    )
    assert logits.shape == (6, 2, 5)
    each = [criterion(of_member, labels) for of_member in logits.unbind(1)]
    expected = torch.stack(each).mean().item()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert not caplog.records
    assert (trainer.compute_loss_func, trainer.label_smoother, model.loss_function) == losses
    assert trainer.evaluate()["eval_loss"] > 0
    assert seen[-1][1].shape == (6, 5)
