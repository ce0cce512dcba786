"""Searches for a batch size or a learning rate.

Training runs several times, at times until memory runs out.
"""

import logging

import pytest
import timm
import torch
from common import SMALL_VIT
from foreign_loop import Classifier, Images, lightning_classifier
from torch import nn
from torch.utils.data import DataLoader

from timm_moe import ExpertWeightAveraging, moe_layers
from timm_moe.callbacks import add_router_losses, start_averaging

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]

MODELS = {
    "ewa": dict(model_name="vit_tiny_ewa_moe", share_rate=0.75, share_schedule="constant"),
    "routed": dict(model_name="vit_tiny_moe"),
}


def create(kind, most_images, forwards_before=0):
    """A model that runs out of memory on more images than these.

    It does so amid a forward, after some forwards.
    """
    torch.manual_seed(0)
    model = timm.create_model(**MODELS[kind], **SMALL_VIT)
    sizes = model.sizes = []

    def run_out(module, args):
        sizes.append(len(args[0]))
        if sizes[-1] > most_images and len(sizes) > forwards_before:
            raise RuntimeError("CUDA out of memory.")  # accelerate and Lightning read the message

    model.blocks[3].register_forward_pre_hook(run_out)
    return model


def assert_trained_in_silence(model, caplog):
    """Assert that the experts were averaged, and that no warning says otherwise.

    The warnings are of experts that nothing averages, and of losses that nobody added.
    """
    ours = [record for record in caplog.records if record.name.startswith("timm_moe")]
    assert [record.message for record in ours if record.levelno >= logging.WARNING] == []
    for layer in moe_layers(model).values():
        for _, stacked in layer.named_expert_parameters():
            assert layer.share_rate == 0 or (stacked - stacked.mean(0)).abs().max() < 1e-6


@pytest.fixture
def trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from timm_moe.integrations.transformers import ExpertCallback

    def make(model, **options):
        args = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=16,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            auto_find_batch_size=True,
            save_strategy="no",
            **options,
        )
        return transformers.Trainer(
            Classifier(model), args, train_dataset=Images(32), callbacks=[ExpertCallback()]
        )

    return make


@pytest.mark.parametrize("kind", MODELS)
def test_auto_find_batch_size(trainer, kind, caplog):
    """It runs out in the second step, so that the first one's count is there.

    Other trials run out in the first step.
    """
    model = create(kind, most_images=6, forwards_before=1)
    run = trainer(model)
    run.train()
    assert run.state.global_step == 4
    assert model.sizes[:2] == [16, 16]
    assert max(model.sizes[-4:]) <= 6
    assert_trained_in_silence(model, caplog)
    assert ExpertWeightAveraging.of(run.optimizer) is None
    assert kind == "routed" or {
        int(group["ewa_updates"]) for group in run.optimizer.param_groups
    } == {4}


@pytest.mark.parametrize("kind", MODELS)
def test_accelerates_search_with_an_optimizer_from_outside(kind, caplog):
    utils = pytest.importorskip("accelerate.utils")
    model = create(kind, most_images=4).train()
    optimizer = torch.optim.AdamW(model.parameters())

    @utils.find_executable_batch_size(starting_batch_size=16)
    def train(batch_size):
        averaging = start_averaging(model, optimizer, 32 // batch_size)
        for batch in DataLoader(Images(32), batch_size):
            outputs = model(batch["pixel_values"])
            add_router_losses(
                model, nn.functional.cross_entropy(outputs, batch["labels"])
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size, averaging

    batch_size, averaging = train()
    assert batch_size <= 4
    assert_trained_in_silence(model, caplog)
    assert kind == "routed" or averaging.updates == 32 // batch_size


@pytest.fixture
def lightning_run(tmp_path):
    lightning = pytest.importorskip("lightning")
    from timm_moe.integrations.lightning import ExpertCallback

    def make(kind, most_images, *callbacks):
        module = lightning_classifier(create(kind, most_images))
        module.batch_size, module.lr = 2, 1e-3
        module.train_dataloader = lambda: DataLoader(Images(32), module.batch_size)
        module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=module.lr)
        quiet = dict(
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            devices=1,
        )
        fit = lightning.Trainer(
            max_epochs=2,
            default_root_dir=tmp_path,
            callbacks=[*callbacks, ExpertCallback()],
            **quiet,
        )
        return module, fit

    return make


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
def test_lightnings_tuner(lightning_run, kind, search, caplog):
    from lightning.pytorch.tuner import Tuner

    module, fit = lightning_run(kind, 8)
    if search == "lr_find":
        Tuner(fit).lr_find(module, num_training=12, min_lr=1e-5, max_lr=1e-3)
    else:
        assert Tuner(fit).scale_batch_size(module, mode="power") == 8
    assert not {"training_step", "on_train_start"} & set(vars(module))
    assert ExpertWeightAveraging.of(fit.optimizers[0]) is None
    assert_fits(module, fit, caplog)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "search", ["learning rate", "batch size", "learning rate, in the second epoch"]
)
def test_lightnings_callbacks(lightning_run, kind, search, caplog):
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

    class Later(LearningRateFinder):
        def on_fit_start(self, trainer, pl_module):
            pass

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1 and trainer.callbacks[0] is self:
                self.lr_find(trainer, pl_module)

    finder = dict(
        zip(("learning rate", "batch size"), (LearningRateFinder, BatchSizeFinder), strict=True)
    )
    options = {} if search == "batch size" else dict(num_training_steps=12, max_lr=1e-3)
    module, fit = lightning_run(kind, 8, finder.get(search, Later)(**options))
    assert_fits(module, fit, caplog)


def assert_fits(module, fit, caplog):
    """The training after a search counts and averages from its own start to its own end."""
    fit.fit(module)
    assert fit.global_step == 64 // module.batch_size
    assert_trained_in_silence(module, caplog)
    optimizer = fit.optimizers[0]
    assert ExpertWeightAveraging.of(optimizer) is None
    assert optimizer.param_groups[0].get("ewa_updates") in (None, fit.global_step)
    assert not {"training_step", "on_train_start"} & set(vars(module))
