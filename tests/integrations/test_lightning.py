"""Lightning's Trainer with ExpertCallback trains what a plain loop would.

It resumes as if it had never stopped.
"""

import copy
import csv
import os
import pickle
import random
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import timm
import torch
from common import EXAMPLES, ROOT, SMALL_VIT
from documents import before_spread_classifier, blocks_of
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from processes import free_port, run_code, run_ranks, run_script
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from timm_moe import (
    ExpertWeightAveraging,
    auxiliary_loss,
    export_dense,
    moe_layers,
    start_averaging,
)
from timm_moe.integrations.lightning import RANDOM_STATES, ExpertCallback
from timm_moe.layers import EwaMlp

EWA = ("vit_tiny_ewa_moe", dict(share_schedule="linear"))
ROUTED = ("vmoe_s32", dict(num_experts=4, moe_layers="last-2"))
BATCH = 4
#: What the callback asks a trainer as a checkpoint is saved.
IDLE = SimpleNamespace(num_training_batches=6, accumulate_grad_batches=1)

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings(
        "ignore:.*does not have many workers",
        "ignore:.*is smaller than the logging interval",
        "ignore:.*LeafSpec",
    ),
]


class Classifier(lightning.LightningModule):
    def __init__(self, name="vit_tiny_ewa_moe", options=None, drop_rate=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.model = timm.create_model(name, drop_rate=drop_rate, **SMALL_VIT, **(options or {}))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, batch_idx):
        self.log("loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(**options):
    generator = torch.Generator().manual_seed(1)
    images, labels = (
        torch.randn(24, 3, 32, 32, generator=generator),
        torch.randint(5, (24,), generator=generator),
    )
    return DataLoader(
        TensorDataset(images, labels), BATCH, **{"generator": torch.Generator(), **options}
    )


def shuffled():
    """In an order that the global generator draws."""
    return loader(shuffle=True, generator=None)


def trainer(*callbacks, library=lightning, callback=True, **options):
    quiet = dict(
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1
    )
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **quiet, **options}
    return library.Trainer(
        callbacks=[*callbacks, *([ExpertCallback()] if callback else [])], **options
    )


def largest_difference(model, other):
    others = other.state_dict()
    return max(
        (tensor - others[name]).abs().max().item() for name, tensor in model.state_dict().items()
    )


class Seed(lightning.Callback):
    def on_train_start(self, *_):
        torch.manual_seed(3)


def plain_loop(module, accumulated, after_step=lambda: None):
    """What the callback stands for, written out: two epochs."""
    optimizer = module.configure_optimizers()
    if any(isinstance(layer, EwaMlp) for layer in moe_layers(module).values()):
        ExpertWeightAveraging(module.model, optimizer, total_updates=12 // accumulated)
    torch.manual_seed(3)
    for number, batch in enumerate([batch for _ in range(2) for batch in loader()], start=1):
        loss = module.training_step(batch, 0) + auxiliary_loss(module.model)
        (loss / accumulated).backward()
        if number % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
            after_step()


@pytest.mark.parametrize(("name", "options"), [EWA, ROUTED], ids=["ewa", "routed"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_fit_is_the_plain_loop(name, options, accumulated, tmp_path):
    reference, module = Classifier(name, options).train(), Classifier(name, options)
    plain_loop(reference, accumulated)
    fit = trainer(Seed(), accumulate_grad_batches=accumulated, logger=CSVLogger(tmp_path))
    fit.fit(module, loader())
    assert largest_difference(module, reference) == 0.0
    with open(f"{fit.logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [0, 1]
    if name == EWA[0]:
        assert [float(row["ewa/share_rate"]) for row in rows] == pytest.approx([0.15, 0.3])
    else:
        assert all(1 >= float(row["router/model.blocks.3.mlp/load_max"]) >= 0.25 for row in rows)


class Variant(Classifier):
    """Its training_step returns what another function makes of the batch."""

    def __init__(self, returned, name=ROUTED[0], options=ROUTED[1]):
        super().__init__(name, options)
        self.returned = returned

    def training_step(self, batch, batch_idx):
        return self.returned(self, batch, batch_idx)


def loss_of(module, batch):
    return nn.functional.cross_entropy(module.model(batch[0]), batch[1])


def in_a_dict(module, batch, batch_idx):
    return {"loss": loss_of(module, batch), "more": batch_idx}


def its_own(module, batch, batch_idx):
    return loss_of(module, batch) + auxiliary_loss(module.model)


@pytest.mark.parametrize("returned", [in_a_dict, its_own])
def test_router_losses_are_added_once(returned):
    reference, module = Classifier(*ROUTED).train(), Variant(returned)
    plain_loop(reference, 1)
    trainer(Seed()).fit(module, loader())
    assert largest_difference(module, reference) == 0.0


def test_what_a_step_returns_beside_its_loss_reaches_the_hooks():
    class Hooked(Variant):
        def on_train_start(self):
            self.seen = []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(outputs["more"])

    module = Hooked(in_a_dict)
    trainer(max_epochs=1).fit(module, loader())
    assert module.seen == list(range(6))


def test_router_losses_of_every_forward_of_a_step():
    def two(module, batch, batch_idx):
        return loss_of(module, batch) + loss_of(module, [batch[0].flip(3), batch[1]])

    def two_and_their_losses(module, batch, batch_idx):
        first = its_own(module, batch, batch_idx)
        return first + its_own(module, [batch[0].flip(3), batch[1]], batch_idx)

    modules = [Variant(two), Variant(two_and_their_losses)]
    for module in modules:
        trainer(Seed(), max_epochs=1).fit(module, loader())
    assert largest_difference(*modules) < 1e-5


def test_a_batch_may_be_left_out():
    """Its losses are gone: neither an error at the step, nor in the next batch's loss."""

    def sometimes(module, batch, batch_idx):
        loss = loss_of(module, batch)
        return None if batch_idx % 2 else loss

    module = Variant(sometimes)
    fit = trainer()
    fit.fit(module, loader())
    assert fit.global_step == 12


class Manual(Classifier):
    """Calls backward and the optimizer itself."""

    def __init__(self, name, options, adds=False):
        super().__init__(name, options)
        self.automatic_optimization, self.adds = False, adds

    def training_step(self, batch, batch_idx):
        loss = loss_of(self, batch)
        self.manual_backward(loss + auxiliary_loss(self.model) if self.adds else loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return loss


def test_manual_optimization_adds_the_losses_itself():
    with pytest.raises(RuntimeError, match="were not added"):
        trainer().fit(Manual(*ROUTED), loader())
    reference, module = Classifier(*ROUTED).train(), Manual(*ROUTED, adds=True)
    plain_loop(reference, 1)
    trainer(Seed()).fit(module, loader())
    assert largest_difference(module, reference) == 0.0


class SteppingLate(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(loss := loss_of(self, batch))
        return loss

    def on_train_batch_end(self, *_):
        self.optimizers().step()


def test_a_loss_that_manual_optimization_returns_comes_too_late_for_more():
    with pytest.raises(RuntimeError, match="were not added"):
        trainer().fit(SteppingLate(*ROUTED), loader())


def test_manual_optimization_is_averaged_and_told_for_how_many_steps():
    reference, module = Classifier(*EWA).train(), Manual(*EWA)
    plain_loop(reference, 1)
    with pytest.warns(UserWarning, match=r"after 12 steps .*total_updates"):
        trainer(Seed()).fit(module, loader())
    assert largest_difference(module, reference) == 0.0


def test_nothing_is_left_after_fit_or_an_exception():
    def failing(module, batch, batch_idx):
        if batch_idx == 2:
            raise ArithmeticError
        return loss_of(module, batch)

    for module, error in ((Variant(failing, *EWA), ArithmeticError), (Classifier(*ROUTED), None)):
        fit = trainer()
        if error is None:
            fit.fit(module, loader())
        else:
            with pytest.raises(error):
                fit.fit(module, loader())
        assert "training_step" not in vars(module)
        assert ExpertWeightAveraging.of(fit.optimizers[0]) is None


def test_a_search_that_left_training_is_cleared_away():
    """As one for the batch size does: no hook is called when memory runs out."""
    callback, module = ExpertCallback(), Classifier(*EWA)

    class Search(lightning.Callback):
        def on_train_start(self, trainer, pl_module):
            callback.on_train_start(trainer, pl_module)

        def on_train_epoch_start(self, trainer, pl_module):
            assert pl_module.training_step.__wrapped__ is Classifier.training_step

    fit = trainer(Search(), callback, callback=False)
    fit.fit(module, loader())
    assert "training_step" not in vars(module)
    assert ExpertWeightAveraging.of(fit.optimizers[0]) is None


def test_a_process_that_failed_saves_alone():
    callback = ExpertCallback()
    callback.on_exception(None, None, ArithmeticError())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.is_initialized", lambda: True)
        callback.on_save_checkpoint(IDLE, None, checkpoint := {})
    assert len(checkpoint[RANDOM_STATES]) == 1


def test_after_a_run_that_failed_the_next_one_saves_all_states(monkeypatch):
    def gather(states, own):
        states[:] = [own, own]

    callback = ExpertCallback()
    callback.on_exception(None, None, ArithmeticError())
    callback.setup(trainer_on("cpu"), None, "fit")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    callback.on_save_checkpoint(IDLE, None, checkpoint := {})
    assert len(checkpoint[RANDOM_STATES]) == 2


def test_to_ask_for_the_state_is_no_collective(monkeypatch):
    """Lightning alone knows when all processes save."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert ExpertCallback().state_dict() == {}


class Copying(lightning.Callback):
    """Copies and pickles the module while it is trained."""

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.trainer = None
        self.copies = copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))
        pl_module.trainer = trainer


def test_a_copy_made_in_training_trains_itself():
    copying = Copying()
    trainer(copying, max_epochs=1).fit(module := Classifier(*ROUTED), loader())
    for copied in copying.copies:
        assert largest_difference(module, copied) == 0.0
        trainer(max_epochs=1).fit(copied, loader())
        assert largest_difference(module, copied) > 0


class Scheduled(Classifier):
    """As many do it, with a scheduler over all steps of the run, which asks for the data early."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def resumed(kind, model, folder, loaders, others=lambda: [], **options):
    """A run of four epochs, and one of the last two of them."""
    checkpoint = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    whole, part = (kind(*model, drop_rate=0.1) for _ in range(2))
    torch.manual_seed(50 + int(os.environ.get("RANK", 0)))
    trainer(checkpoint, *others(), max_epochs=4, enable_checkpointing=True, **options).fit(
        whole, *loaders()
    )
    torch.manual_seed(60)
    fit = trainer(
        ModelCheckpoint(folder / "second"),
        *others(),
        max_epochs=4,
        enable_checkpointing=True,
        **options,
    )
    fit.fit(part, *loaders(), ckpt_path=folder / "epoch=1.ckpt")
    assert fit.global_step == 24 // options.get("accumulate_grad_batches", 1) // options.get(
        "devices", 1
    )
    return whole, part


@pytest.mark.parametrize("model", [EWA, ROUTED], ids=["ewa", "routed"])
@pytest.mark.parametrize("kind", [Classifier, Scheduled])
def test_a_resumed_run_is_the_uninterrupted_one(kind, model, tmp_path):
    assert largest_difference(*resumed(kind, model, tmp_path, lambda: [shuffled()])) == 0.0


def test_a_resumed_run_with_validation_is_the_uninterrupted_one(tmp_path):
    whole, part = resumed(
        Scheduled, EWA, tmp_path, lambda: [shuffled(), shuffled()], accumulate_grad_batches=2
    )
    assert largest_difference(whole, part) == 0.0


class Rates(lightning.Callback):
    """Keeps the share rate of each step."""

    def __init__(self):
        self.rates = []

    def on_train_batch_end(self, trainer, *args):
        averaging = ExpertWeightAveraging.of(trainer.optimizers[0])
        self.rates.append(round(averaging.share_rate, 6))


@pytest.mark.parametrize(
    ("epochs_done", "batch", "options", "begin", "end"),
    [
        (2, 8, dict(max_epochs=4), 6, 12),
        (2, 2, dict(max_epochs=3), 24, 36),
        (1, 6, dict(max_epochs=3), 4, 12),
        (1, 4, dict(max_epochs=3, accumulate_grad_batches=2), 3, 9),
        (1, 4, dict(max_epochs=3, accumulate_grad_batches=4), 2, 6),
        (2, 8, dict(max_epochs=-1, max_steps=15), 12, 15),
    ],
    ids=["larger", "smaller", "after one epoch", "accumulation", "a last step of fewer", "steps"],
)
def test_a_run_that_resumes_with_other_batches_goes_on_at_its_part_of_the_training(
    epochs_done, batch, options, begin, end, tmp_path
):
    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer(checkpoint, enable_checkpointing=True).fit(Classifier(*EWA), loader())
    images = DataLoader(loader().dataset, batch)
    seen = Rates()
    trainer(seen, **options).fit(
        Classifier(*EWA), images, ckpt_path=tmp_path / f"epoch={epochs_done - 1}.ckpt"
    )
    expected = [0.3 * update / end for update in range(begin + 1, end + 1)]
    rates = seen.rates
    if "accumulate_grad_batches" in options:  # Batches share a step, and the first have none.
        rates = [rate for rate in dict.fromkeys(rates) if rate]
    assert rates == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("batch", "progress"), [(BATCH, 5 / 12), (2 * BATCH, 3 / 6)])
def test_steps_that_were_skipped_before_a_resume_stay_uncounted(batch, progress, tmp_path):
    """Resume a count that is behind, as float16's GradScaler leaves it."""
    fit = trainer(max_epochs=1)
    fit.fit(Classifier(*EWA), loader())
    fit.save_checkpoint(tmp_path / "last.ckpt")
    content = torch.load(tmp_path / "last.ckpt", weights_only=False)
    for group in content["optimizer_states"][0]["param_groups"]:
        group["ewa_updates"] = torch.tensor(4)
    torch.save(content, tmp_path / "last.ckpt")
    seen = Rates()
    images = DataLoader(loader().dataset, batch)
    trainer(seen).fit(Classifier(*EWA), images, ckpt_path=tmp_path / "last.ckpt")
    assert seen.rates[0] == pytest.approx(0.3 * progress)


def test_a_run_without_the_callback_is_resumed_with_it(tmp_path):
    first = trainer(callback=False, max_epochs=1)
    first.fit(Classifier(*EWA), loader())
    first.save_checkpoint(tmp_path / "last.ckpt")
    seen = Rates()
    trainer(seen).fit(Classifier(*EWA), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert seen.rates == pytest.approx([0.3 * update / 12 for update in range(7, 13)], abs=1e-6)


def averaging_weights():
    return [EMAWeightAveraging(decay=0.5)]


def test_the_ema_is_of_the_averaged_weights(tmp_path):
    reference, module = Classifier(*EWA).train(), Classifier(*EWA)
    ema = AveragedModel(reference, avg_fn=get_ema_avg_fn(0.5))
    plain_loop(reference, 1, lambda: ema.update_parameters(reference))
    trainer(Seed(), *averaging_weights()).fit(module, loader())
    assert largest_difference(module, ema.module) == 0.0
    whole, part = resumed(
        Classifier, EWA, tmp_path, lambda: [shuffled(), shuffled()], averaging_weights
    )
    assert largest_difference(whole, part) == 0.0


def test_only_fit_takes_the_random_state_of_a_checkpoint(tmp_path):
    module, fit = Classifier(*EWA), trainer(max_epochs=1)
    fit.fit(module, loader(), loader())
    fit.save_checkpoint(tmp_path / "last.ckpt")
    torch.manual_seed(9)
    before = torch.get_rng_state()
    for run in (fit.validate, fit.test, fit.predict):
        run(module, loader(), ckpt_path=tmp_path / "last.ckpt")
        assert (torch.get_rng_state() == before).all()
    predicted = torch.cat(fit.predict(module, loader()))
    export_dense(module.model, tmp_path / "dense")
    dense = timm.create_model(f"local-dir:{tmp_path / 'dense'}", pretrained=True).eval()
    with torch.inference_mode():
        outputs = torch.cat([dense(batch[0]) for batch in loader()])
    assert torch.allclose(outputs, predicted, atol=1e-5)


def trainer_on(device):
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(strategy=strategy, callbacks=[])


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_all_generators_go_on(tmp_path, monkeypatch, device):
    of_mps = torch.Generator()
    monkeypatch.setattr(torch.mps, "get_rng_state", of_mps.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", of_mps.set_state)

    def drawing():
        on_device = torch.rand(1, generator=of_mps).item() if device == "mps" else 0
        return torch.rand(1).item(), random.random(), np.random.rand(), on_device

    callback = ExpertCallback()
    callback.setup(trainer_on(device), None, "fit")
    callback.on_save_checkpoint(IDLE, None, checkpoint := {})
    torch.save(checkpoint, tmp_path / "state.pt")
    drawn = drawing()
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    callback.on_load_checkpoint(None, None, loaded)
    assert drawing() == drawn


def test_a_checkpoint_of_more_processes_is_told():
    callback = ExpertCallback()
    callback.on_save_checkpoint(IDLE, None, checkpoint := {})
    callback.setup(trainer_on("cpu"), None, "fit")
    before = torch.get_rng_state()
    torch.rand(1)
    with pytest.warns(UserWarning, match=r"random state of 2 processes .* 1,"):
        callback.on_load_checkpoint(None, None, {RANDOM_STATES: checkpoint[RANDOM_STATES] * 2})
    assert (torch.get_rng_state() != before).any()


def test_an_evaluation_is_not_told_of_random_states():
    callback = ExpertCallback()
    callback.on_save_checkpoint(IDLE, None, checkpoint := {})
    callback.setup(trainer_on("cpu"), None, "validate")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_load_checkpoint(None, None, {RANDOM_STATES: checkpoint[RANDOM_STATES] * 2})


@pytest.mark.parametrize(
    ("options", "callbacks", "message"),
    [
        ({"max_epochs": -1}, [], "optimizer steps .*inf: "),
        (
            {},
            [GradientAccumulationScheduler({1: 2})],
            "GradientAccumulationScheduler .*total_updates",
        ),
    ],
)
def test_a_run_of_unknown_length_is_told(options, callbacks, message):
    fit, module = trainer(*callbacks, **options), Classifier(*EWA)
    with pytest.raises(ValueError, match=message):
        fit.fit(module, loader())
    assert "training_step" not in vars(module)


def test_without_averaging_nobody_needs_the_length_of_a_run():
    module = Classifier(*ROUTED)
    trainer(GradientAccumulationScheduler({1: 2})).fit(module, loader())
    assert all(layer.router.totals.forwards for layer in moe_layers(module).values())


def test_a_layer_without_a_rate_leaves_the_others_averaged():
    module, seen = Classifier(*EWA), Rates()
    *_, last = moe_layers(module).values()
    last.share_rate = 0.0
    trainer(seen).fit(module, loader())
    assert seen.rates == pytest.approx([0.3 * update / 12 for update in range(1, 13)], abs=1e-6)


class Stream(IterableDataset):
    """Images without an end."""

    def __iter__(self):
        while True:
            yield from loader().dataset


def test_a_run_on_a_stream_is_saved_and_resumed(tmp_path):
    options = dict(max_epochs=-1, limit_train_batches=None)
    first = trainer(max_steps=2, **options)
    first.fit(Classifier(*EWA), DataLoader(Stream(), BATCH))
    first.save_checkpoint(tmp_path / "last.ckpt")
    seen = Rates()
    trainer(seen, max_steps=4, **options).fit(
        Classifier(*EWA), DataLoader(Stream(), BATCH), ckpt_path=tmp_path / "last.ckpt"
    )
    assert seen.rates == pytest.approx([0.3 * 3 / 4, 0.3])


class OfABatch(Classifier):
    def training_step(self, batch):
        return super().training_step(batch, 0)


def test_a_compiled_module_keeps_its_compiled_step_and_the_arguments():
    graphs = []
    module = OfABatch(*EWA)
    compiled = torch.compile(module, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    trainer(max_epochs=1).fit(compiled, loader())
    assert graphs
    assert "training_step" in vars(module)


def test_a_step_that_fabric_skips_is_not_averaged(monkeypatch):
    module = Classifier(*EWA)
    raw = module.configure_optimizers()
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(module.model, raw)
    averaging = start_averaging(model, optimizer, total_updates=4)
    images, labels = next(iter(loader()))
    for _ in range(2):
        fabric.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
        monkeypatch.setattr(fabric.strategy, "optimizer_step", lambda *_, **__: None)
    assert averaging.updates == 1
    assert ExpertWeightAveraging.of(raw) is averaging


class Averaged(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.averaging = self.average(optimizer)
        return optimizer

    def average(self, optimizer):
        return ExpertWeightAveraging(self, optimizer, schedule="constant", total_updates=12)


class Started(Averaged):
    def average(self, optimizer):
        return start_averaging(self, optimizer, total_updates=24)


@pytest.mark.parametrize(("kind", "rate"), [(Averaged, 0.3), (Started, 0.15)])
def test_an_optimizer_keeps_its_own_averaging(kind, rate):
    fit, module = trainer(), kind(*EWA)
    fit.fit(module, loader())
    assert ExpertWeightAveraging.of(fit.optimizers[0]) is module.averaging
    assert module.averaging.updates == 12
    assert fit.callback_metrics["ewa/share_rate"] == pytest.approx(rate)


def test_who_averages_may_change_the_accumulation_of_gradients():
    fit, module = trainer(GradientAccumulationScheduler({1: 2})), Averaged(*EWA)
    fit.fit(module, loader())
    assert module.averaging.updates == 9


class Backbone(Classifier):
    """With the backbone apart from the head, as ``BackboneFinetuning`` wants it."""

    def __init__(self):
        super().__init__()
        self.model.reset_classifier(0)
        self.backbone, self.head = self.model, nn.Linear(self.model.num_features, 5)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.head(self.backbone(images)), labels)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


def test_a_backbone_that_thaws_is_averaged_from_then_on(caplog, tmp_path):
    module = Backbone()
    thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    logs = CSVLogger(tmp_path)
    trainer(thaw, logger=logs, log_every_n_steps=1).fit(module, loader())
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    rows = csv.DictReader(Path(logs.log_dir, "metrics.csv").read_text().splitlines())
    rates = [float(row["ewa/share_rate"]) for row in rows if row.get("ewa/share_rate")]
    assert rates == pytest.approx([0, 0.3])


class Thawing(Classifier):
    """Trains its head first; then another optimizer gets the frozen blocks."""

    def __init__(self):
        super().__init__(*EWA)
        self.automatic_optimization = False
        self.model.blocks.requires_grad_(False)

    def configure_optimizers(self):
        parts = (self.model.head, self.model.patch_embed)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.model.blocks.requires_grad_(True)
            self.optimizers()[1].add_param_group({"params": self.model.blocks.parameters()})

    def training_step(self, batch, batch_idx):
        self.manual_backward(loss_of(self, batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def test_of_several_optimizers_the_rate_is_logged_of_the_one_that_averages():
    fit = trainer()
    fit.fit(Thawing(), loader())
    assert fit.callback_metrics["ewa/share_rate"] == pytest.approx(0.3)


def test_two_callbacks_are_as_one():
    one, two = Classifier(*ROUTED), Classifier(*ROUTED)
    trainer(Seed()).fit(one, loader())
    fit = trainer(Seed(), ExpertCallback())
    fit.fit(two, loader())
    assert largest_difference(one, two) == 0
    assert not {"training_step", "on_train_start"} & set(vars(two))


def test_fast_dev_run():
    trainer(fast_dev_run=True).fit(Classifier(*ROUTED), loader(), loader())


def test_a_trainer_of_pytorch_lightning_takes_it_too():
    library = pytest.importorskip("pytorch_lightning")

    class Module(library.LightningModule):
        training_step, configure_optimizers = (
            Classifier.training_step,
            Classifier.configure_optimizers,
        )

    reference, module = Classifier(*ROUTED).train(), Module()
    module.model = copy.deepcopy(reference.model)
    plain_loop(reference, 1)
    trainer(Seed(), library=library).fit(module, loader())
    assert largest_difference(module, reference) == 0.0


def test_lightning_is_imported_by_its_integration_alone():
    code = "import sys, timm_moe; assert not {'lightning', 'lightning.pytorch'} & {*sys.modules}"
    assert run_code(code).returncode == 0
    done = run_code(
        "import sys; sys.modules['lightning'] = None; import timm_moe.integrations.lightning"
    )
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ImportError: timm_moe.integrations.lightning needs lightning")
    assert "pip install 'timm_moe[lightning]'" in error


def test_the_example(tmp_path):
    done = run_script(EXAMPLES / "lightning_fit.py", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'ewa/share_rate': 0.3" in done.stdout
    assert (tmp_path / "exported/model.safetensors").is_file()


def join_torchrun(rank, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="0", GROUP_RANK="0"
    )
    os.environ.update(LOCAL_WORLD_SIZE="2")
    torch.set_num_threads(1)


def ddp_worker(rank, folder, port):
    join_torchrun(rank, port)
    differences = []
    for model in (EWA, ROUTED):
        whole, part = resumed(
            Scheduled,
            model,
            Path(folder, model[0]),
            lambda: [shuffled()],
            strategy="ddp",
            devices=2,
        )
        differences.append(largest_difference(whole, part))
    torch.save(
        {"differences": differences, "weights": whole.state_dict()}, f"{folder}/rank{rank}.pt"
    )


def test_ddp(tmp_path):
    run_ranks(ddp_worker, (str(tmp_path), free_port()), 2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert first["differences"] == second["differences"] == [0.0, 0.0]
    assert all(
        torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"]
    )


def spread_worker(rank, folder, port, text):
    """The program of docs/trainers.md in two processes."""
    join_torchrun(rank, port)
    os.chdir(folder)
    names = {"__name__": "__main__"}
    exec(text.replace("max(1, torch.cuda.device_count())", "2"), names)
    trainer = names["trainer"]
    (layer, *_) = moe_layers(trainer.lightning_module).values()
    assert all(
        2 * len(p.to_local()) == len(p) == layer.num_experts
        for _, p in layer.named_expert_parameters()
    )
    assert trainer.global_step == 1347 // 2 // 64 + 1
    metrics = {name: float(number) for name, number in trainer.callback_metrics.items()}
    torch.save(metrics, f"{folder}/rank{rank}.pt")


def test_experts_over_processes(tmp_path):
    blocks = blocks_of(ROOT / "docs/trainers.md")
    (program,) = (block.text for block in blocks if "ModelParallelStrategy" in block.text)
    run_ranks(
        spread_worker, (str(tmp_path), free_port(), before_spread_classifier(blocks) + program), 2
    )
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert first == second
    assert 1 <= first["router/model.blocks.1.mlp/balance_loss"] < 1.5
