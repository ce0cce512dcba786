"""The public timm objects in the order in which train.py uses them.

Nothing of ours is called by name.
"""

import argparse
import copy
import importlib
import logging
import pickle
import sys

import pytest
import timm
import timm.scheduler
import torch
from common import OPTIONS, SMALL_VIT
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler, dispatch_clip_grad
from torch import nn

import timm_moe
from timm_moe import ExpertWeightAveraging
from timm_moe.export.export import export_dense

UPDATES_PER_EPOCH = 3
EPOCHS = 2


class Training:
    """train.py in small: create, resume, schedule, train by epochs, save."""

    def __init__(
        self,
        folder,
        resume=None,
        no_resume_opt=False,
        sched="cosine",
        start_epoch=None,
        opt="adamw",
        **kwargs,
    ):
        torch.manual_seed(0)
        self.args = argparse.Namespace(
            model="vit_tiny_ewa_moe",
            num_classes=SMALL_VIT["num_classes"],
            model_kwargs={**OPTIONS, **kwargs},
            img_size=32,
        )
        self.model = timm.create_model(
            self.args.model, num_classes=self.args.num_classes, **self.args.model_kwargs
        )
        self.task = ClassificationTask(
            self.model, nn.CrossEntropyLoss(), device=torch.device("cpu"), verbose=False
        )
        self.optimizer = create_optimizer_v2(self.model, opt=opt, lr=1e-3, weight_decay=0.05)
        resume_epoch = None
        if resume:
            resume_epoch = timm.models.resume_checkpoint(
                self.model,
                resume,
                optimizer=None if no_resume_opt else self.optimizer,
                log_info=False,
            )
        self.ema = ModelEmaV3(self.model, decay=0.9)
        self.saver = CheckpointSaver(
            self.model,
            self.optimizer,
            args=self.args,
            model_ema=self.ema,
            checkpoint_dir=str(folder),
            recovery_dir=str(folder),
        )
        self.scheduler, self.epochs = timm.scheduler.create_scheduler_v2(
            self.optimizer,
            sched=sched,
            num_epochs=EPOCHS,
            warmup_epochs=0,
            updates_per_epoch=UPDATES_PER_EPOCH,
        )
        self.start_epoch = start_epoch if start_epoch is not None else resume_epoch or 0
        if self.scheduler is not None and self.start_epoch > 0:
            self.scheduler.step(self.start_epoch)
        self.averaging = ExpertWeightAveraging.of(self.optimizer)
        self.rates = []

    def run(self, epochs=None):
        for epoch in range(self.start_epoch, epochs or self.epochs):
            self.model.train()
            for batch in range(UPDATES_PER_EPOCH):
                torch.manual_seed(100 * epoch + batch)
                result = self.task(torch.randn(4, 3, 32, 32), torch.randint(5, (4,)))
                self.optimizer.zero_grad()
                result["loss"].backward()
                self.optimizer.step()
                self.ema.update(self.model)
                self.rates.append(round(self.averaging.share_rate, 6))
                if self.scheduler is not None:
                    self.scheduler.step_update(
                        num_updates=epoch * UPDATES_PER_EPOCH + batch + 1, metric=0.0
                    )
            self.saver.save_checkpoint(epoch, metric=epoch)
            if self.scheduler is not None:
                self.scheduler.step(epoch + 1, 0.0)
        return self


FULL_RUN = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3]


def test_experts_are_averaged_after_every_update_without_a_word(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        training = Training(tmp_path).run()
    assert training.rates == FULL_RUN
    assert [record.message for record in caplog.records if "EWA" in record.message] == [
        "EWA: averaging the 4 experts of 2 layers after every optimizer step, share rate 0.3, "
        "schedule linear, over 6 updates."
    ]


@pytest.mark.parametrize("sched", ["cosine", "none", "step", "plateau"])
@pytest.mark.first_case
def test_resume_goes_on_bit_for_bit(tmp_path, sched):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    whole = Training(tmp_path / "a", sched=sched).run()
    Training(tmp_path / "b", sched=sched).run(epochs=1)
    resumed = Training(tmp_path / "b", resume=str(tmp_path / "b/last.pth.tar"), sched=sched).run()
    assert resumed.rates == FULL_RUN[3:]
    for (name, a), b in zip(
        whole.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.first_case
def test_a_run_from_a_recovery_file_ends_at_the_end_of_the_schedule(tmp_path, batch, caplog):
    """train.py goes on with the next epoch, and leaves out the rest of the one that was cut off."""
    training = Training(tmp_path)
    save_recovery = training.saver.save_recovery

    def step_update(num_updates, metric):
        if num_updates == batch + 1:
            save_recovery(0, batch_idx=batch)

    training.scheduler.step_update = step_update
    training.run(epochs=1)
    (file,) = tmp_path.glob("recovery*")
    resumed = Training(tmp_path, resume=str(file)).run()
    assert resumed.rates == FULL_RUN[3:]
    assert not any("will not reach its end" in message for message in caplog.messages)


def test_no_resume_opt_takes_the_place_in_the_schedule_from_the_epoch(tmp_path, caplog):
    Training(tmp_path).run(epochs=1)
    with caplog.at_level(logging.INFO):
        resumed = Training(
            tmp_path, resume=str(tmp_path / "last.pth.tar"), no_resume_opt=True
        ).run()
    assert resumed.rates == FULL_RUN[3:]
    assert "EWA: the share rate continues after update 3 of 6." in caplog.messages


@pytest.mark.parametrize("opt", ["adamw", "sgd", "lookahead_adamw"])
@pytest.mark.first_case
def test_the_optimizer_of_a_dense_run_is_not_that_of_experts(dense_vit, tmp_path, opt):
    optimizer = create_optimizer_v2(dense_vit, opt=opt, lr=1e-3, weight_decay=0.05)
    dense_vit(torch.randn(4, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    file = str(tmp_path / "dense.pth.tar")
    torch.save(
        {"epoch": 0, "state_dict": dense_vit.state_dict(), "optimizer": optimizer.state_dict()},
        file,
    )
    with pytest.raises(ValueError, match=r"dense model.*--no-resume-opt"):
        Training(tmp_path, resume=file, opt=opt).run()
    Training(tmp_path, resume=file, opt=opt, no_resume_opt=True).run()


def test_start_epoch(tmp_path):
    assert Training(tmp_path, start_epoch=1).run().rates == FULL_RUN[3:]


def test_a_resumed_run_that_starts_at_epoch_0_begins_its_schedule_anew(tmp_path):
    """train.py states no position to the scheduler then, so the first rate is that of the file."""
    Training(tmp_path).run(epochs=1)
    resumed = Training(tmp_path, resume=str(tmp_path / "last.pth.tar"), start_epoch=0).run()
    assert resumed.rates == [FULL_RUN[3], *FULL_RUN[1:]]


@pytest.mark.parametrize(
    "positions", [dict(step_update=6), dict(step=2)], ids=["on updates", "on epochs"]
)
def test_fewer_updates_of_an_epoch_at_a_resume_are_no_short_epoch(ewa_vit, positions, caplog):
    """train.py states a position in updates with ``--sched-on-updates``, else in epochs."""
    optimizer = create_optimizer_v2(ewa_vit, opt="adamw", lr=1e-3)
    # The state's count is that of two epochs of four updates.
    optimizer.param_groups[0]["ewa_updates"] = torch.tensor(8)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=4, updates_per_epoch=3)
    for method, position in positions.items():
        getattr(scheduler, method)(position)
    averaging = ExpertWeightAveraging.of(optimizer)
    for update in range(6, 12):
        ewa_vit(torch.randn(2, 3, 32, 32)).mean().backward()
        optimizer.step()
        scheduler.step_update(update + 1)
        if update % 3 == 2:
            scheduler.step(update // 3 + 1)
    assert averaging.updates == 12
    assert averaging.share_rate == pytest.approx(0.3)
    assert "will not reach its end" not in caplog.text


def test_an_epoch_that_is_trained_anew_is_no_short_epoch(ewa_vit, caplog):
    """Begin anew, as with the recovery file of a first epoch and ``--start-epoch 0``."""
    optimizer = create_optimizer_v2(ewa_vit, opt="adamw", lr=1e-3)
    optimizer.param_groups[0]["ewa_updates"] = torch.tensor(2)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=3)
    for update in range(3):
        ewa_vit(torch.randn(2, 3, 32, 32)).mean().backward()
        optimizer.step()
        scheduler.step_update(update + 1)
    scheduler.step(1)
    assert ExpertWeightAveraging.of(optimizer).updates == 3
    assert "will not reach its end" not in caplog.text


def test_a_loop_that_numbers_its_steps_from_0_keeps_its_count(ewa_vit):
    optimizer = create_optimizer_v2(ewa_vit, opt="adamw", lr=1e-3)
    optimizer.param_groups[0]["ewa_updates"] = torch.tensor(3)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=3)
    for update in range(3, 6):
        ewa_vit(torch.randn(2, 3, 32, 32)).mean().backward()
        optimizer.step()
        scheduler.step_update(update)
    assert ExpertWeightAveraging.of(optimizer).updates == 6


def test_without_scheduler_nor_optimizer_state_the_schedule_starts_over(tmp_path, caplog):
    Training(tmp_path, sched="none").run(epochs=1)
    with caplog.at_level(logging.INFO):
        resumed = Training(
            tmp_path, resume=str(tmp_path / "last.pth.tar"), no_resume_opt=True, sched="none"
        ).run()
    assert resumed.rates == FULL_RUN[:3]
    assert not any("continues" in message or "continuing" in message for message in caplog.messages)


def test_options_of_the_model_reach_the_averaging(tmp_path):
    assert Training(tmp_path, share_rate=0.5, share_schedule="early").run().rates == [
        0.5,
        0.5,
        0,
        0,
        0,
        0,
    ]


def test_a_routed_model_says_once_what_it_routes(caplog):
    caplog.set_level(logging.INFO)
    sizes = dict(SMALL_VIT, num_experts=3, top_k=2)
    model = timm.create_model("vit_tiny_moe", **sizes)
    teacher = timm.create_model("vit_tiny_moe", **sizes)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1)
    timm.scheduler.create_scheduler_v2(optimizer, num_epochs=1, updates_per_epoch=2)
    assert teacher is not model
    assert caplog.messages == [
        "Routing: 3 experts in each of 2 layers, blocks.1.mlp to blocks.3.mlp, by "
        "TopKRouter(num_experts=3, top_k=2, capacity_factor=1.05)."
    ]


def test_share_rate_0_means_no_averaging(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        training = Training(tmp_path, share_rate=0)
    assert training.averaging is None
    assert "EWA: share_rate is 0, so the experts are trained without averaging." in caplog.messages


def test_names_bound_before_the_plugin_came_are_replaced(monkeypatch):
    """``--device-modules timm_moe`` imports it after train.py has bound its names."""
    hooks = importlib.import_module("timm_moe.integrations.timm")
    script = type(timm)("train_script")
    script.create_scheduler_v2 = hooks.create_scheduler_v2  # timm's own
    monkeypatch.setitem(sys.modules, "train_script", script)
    hooks.wrap_functions()
    assert script.create_scheduler_v2 is timm.scheduler.create_scheduler_v2
    assert script.create_scheduler_v2 is not hooks.create_scheduler_v2


@pytest.mark.parametrize("sched", ["cosine", "plateau"])
def test_a_schedulers_state_is_saved_loaded_and_copied_as_ever(ewa_vit, dense_vit, sched):
    schedulers = []
    for model in (ewa_vit, copy.deepcopy(ewa_vit)):
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1)
        schedulers.append(
            timm.scheduler.create_scheduler_v2(
                optimizer, sched=sched, num_epochs=5, updates_per_epoch=10
            )[0]
        )
    first, second = schedulers
    if sched == "cosine":  # timm's own Plateau cannot be pickled
        second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        copy.deepcopy(second).step(3)
    second.step(2)
    assert ExpertWeightAveraging.of(first.optimizer).updates == 0
    assert ExpertWeightAveraging.of(second.optimizer).updates == 20


def test_first_steps_that_the_scaler_skips_are_not_counted(ewa_vit, caplog):
    optimizer = create_optimizer_v2(ewa_vit, opt="adamw", lr=1e-3)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=10)
    averaging = ExpertWeightAveraging.of(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    with caplog.at_level(logging.INFO):
        for update in range(9):
            optimizer.zero_grad()
            scaler.scale(ewa_vit(torch.randn(2, 3, 32, 32)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step_update(update + 1)
    skipped = 9 - averaging.updates
    assert 0 < skipped < 9
    assert "continues" not in caplog.text
    scheduler.step(1)
    assert averaging.updates == 9 - skipped


def test_a_second_scheduler_is_a_new_run(ewa_vit, caplog):
    optimizer = create_optimizer_v2(ewa_vit, opt="adamw", lr=0.1)
    for epochs in (2, 20):  # nothing trained in between: the second one counts
        timm.scheduler.create_scheduler_v2(optimizer, num_epochs=epochs, updates_per_epoch=2)
    assert ExpertWeightAveraging.of(optimizer).total_updates == 40
    ewa_vit(torch.randn(2, 3, 32, 32)).mean().backward()
    optimizer.step()
    assert ExpertWeightAveraging.of(optimizer).updates == 1
    timm.scheduler.create_scheduler_v2(optimizer, num_epochs=3, updates_per_epoch=2)
    averaging = ExpertWeightAveraging.of(optimizer)
    assert (averaging.updates, averaging.total_updates) == (0, 6)
    optimizer.step()
    assert "nobody counted" not in caplog.text
    averaging.remove()
    own = ExpertWeightAveraging(ewa_vit, optimizer, total_updates=7)
    timm.scheduler.create_scheduler_v2(optimizer, num_epochs=3, updates_per_epoch=2)
    assert ExpertWeightAveraging.of(optimizer) is own


def test_a_loops_own_start_takes_the_place_of_that_of_a_scheduler(ewa_vit, caplog):
    optimizer = create_optimizer_v2(ewa_vit, opt="adamw", lr=0.1)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=2)
    averaging = timm_moe.start_averaging(ewa_vit, optimizer, total_updates=10)
    ewa_vit(torch.randn(2, 3, 32, 32)).mean().backward()
    optimizer.step()
    scheduler.step(1)
    assert ExpertWeightAveraging.of(optimizer) is averaging
    assert (averaging.updates, averaging.share_rate) == (1, pytest.approx(0.03))
    assert not caplog.messages


def test_a_dense_model_is_left_alone(dense_vit):
    optimizer = create_optimizer_v2(dense_vit, opt="adamw", lr=1e-3)
    _, epochs = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=5, updates_per_epoch=2)
    assert epochs == 5
    assert ExpertWeightAveraging.of(optimizer) is None
    assert not optimizer._optimizer_step_post_hooks


def test_the_older_factory_and_a_deep_copied_model(ewa_vit):
    model = copy.deepcopy(ewa_vit)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1)
    args = argparse.Namespace(sched="cosine", epochs=5)
    timm.scheduler.create_scheduler(args, optimizer, updates_per_epoch=7)
    assert ExpertWeightAveraging.of(optimizer).total_updates == 35


def test_cooldown_and_cycles_count_into_the_whole_run(ewa_vit):
    optimizer = create_optimizer_v2(ewa_vit, opt="sgd", lr=0.1)
    _, epochs = timm.scheduler.create_scheduler_v2(
        optimizer,
        num_epochs=5,
        cooldown_epochs=2,
        warmup_epochs=1,
        warmup_prefix=True,
        updates_per_epoch=7,
    )
    assert epochs == 8
    assert ExpertWeightAveraging.of(optimizer).total_updates == 56


@pytest.mark.parametrize("use_ema", [False, True])
@pytest.mark.first_case
def test_the_saved_checkpoint_is_exported(tmp_path, use_ema):
    (tmp_path / "run").mkdir()
    training = Training(tmp_path / "run").run()
    export = export_dense(tmp_path / "run/model_best.pth.tar", tmp_path / "dense", use_ema=use_ema)
    stock = timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()
    source = (training.ema.module if use_ema else training.model).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(stock(x), source(x))
    assert not timm_moe.moe_layers(stock)


def clipped(model, clip):
    """Gradients by name after clipping."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = 0.1 * torch.randn_like(parameter)
    clip([parameter for parameter in model.parameters() if parameter is not model.head.weight])
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("road", ["function", "dispatch", "tensor"])
def test_adaptive_clipping_is_that_of_the_dense_networks_one_by_one(ewa_vit, road):
    with torch.no_grad():
        for name, parameter in ewa_vit.named_parameters():
            if ".1.mlp." in name or ".3.mlp." in name:  # rows and experts of norms of their own
                parameter.normal_().mul_(
                    10
                    ** torch.linspace(-2, 1, parameter.shape[0]).view(
                        -1, *[1] * (parameter.ndim - 1)
                    )
                )
    roads = {
        "function": lambda parameters: timm.utils.adaptive_clip_grad(iter(parameters), 0.05),
        "dispatch": lambda parameters: dispatch_clip_grad(parameters, 0.05, mode="agc"),
        "tensor": lambda parameters: [
            timm.utils.adaptive_clip_grad(parameter, 0.05) for parameter in parameters
        ],
    }
    gradients = clipped(ewa_vit, roads[road])
    unclipped = clipped(ewa_vit, lambda parameters: None)
    stock = importlib.import_module("timm_moe.integrations.timm").adaptive_clip_grad
    for name, parameter in ewa_vit.named_parameters():
        if name == "head.weight":
            continue
        stacked = ".1.mlp." in name or ".3.mlp." in name
        parts, grads = (
            (parameter.detach(), unclipped[name])
            if stacked
            else (parameter.detach()[None], unclipped[name][None])
        )
        for expert, (part, grad) in enumerate(zip(parts, grads, strict=True)):
            dense = nn.Parameter(part.clone())
            dense.grad = grad.clone()
            stock(dense, 0.05)
            assert torch.equal(
                dense.grad, gradients[name][expert] if stacked else gradients[name]
            ), name
    weight = "blocks.1.mlp.fc1.weight"
    kept = (gradients[weight] == unclipped[weight]).flatten(1).all(1)
    assert kept.any()
    assert not kept.all()


def test_adaptive_clipping_by_timms_scaler(ewa_vit):
    optimizer = torch.optim.SGD(ewa_vit.parameters(), lr=0.0)
    ewa_vit.blocks[3].mlp.fc2.bias.requires_grad_(False)  # without a gradient
    scaler, layer = NativeScaler("cpu"), ewa_vit.blocks[1].mlp
    loss = 1e4 * ewa_vit(torch.randn(4, 3, 32, 32)).square().mean()
    scaler(loss, optimizer, clip_grad=0.01, clip_mode="agc", parameters=ewa_vit.parameters())
    for stacked in (layer.fc1.weight, layer.fc2.weight):
        limits = 0.01 * stacked.detach().norm(dim=2).clamp(min=1e-3)  # of every row of each expert
        assert (stacked.grad.norm(dim=2) <= limits * 1.001).all()


@pytest.mark.parametrize("accumulated", [4, 2])
@pytest.mark.first_case
def test_batches_that_are_counted_as_updates_are_told_of_once(ewa_vit, caplog, accumulated):
    """Twelve batches are fewer updates where gradients are accumulated."""
    optimizer = train_on_twelve_batches(ewa_vit, accumulated, stated=12)
    (told,) = [message for message in caplog.messages if "EWA" in message]
    assert f"took {12 // accumulated} optimizer steps" in told
    assert "updates_per_epoch=12" in told
    assert ExpertWeightAveraging.of(optimizer).share_rate == 0.3 / accumulated


def test_updates_that_are_counted_are_not_told_of(ewa_vit, caplog):
    optimizer = train_on_twelve_batches(ewa_vit, accumulated=4, stated=3)
    assert [message for message in caplog.messages if "EWA" in message] == []
    assert ExpertWeightAveraging.of(optimizer).share_rate == 0.3


def test_an_epoch_that_a_resumed_run_ends_is_not_told_of(ewa_vit, caplog):
    optimizer = create_optimizer_v2(ewa_vit, opt="sgd", lr=0.0)
    for group in optimizer.param_groups:
        group["ewa_updates"] = torch.tensor(9)
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, num_epochs=3, updates_per_epoch=12)
    for _ in range(3):
        ewa_vit(torch.randn(2, 3, 32, 32)).mean().backward()
        optimizer.step()
    scheduler.step(1)
    averaging = ExpertWeightAveraging.of(optimizer)
    assert averaging.updates == 12
    assert "optimizer steps" not in caplog.text


def train_on_twelve_batches(model, accumulated, stated):
    """Train for three epochs whose updates are stated to the scheduler."""
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.0)
    scheduler, _ = timm.scheduler.create_scheduler_v2(
        optimizer, num_epochs=3, updates_per_epoch=stated
    )
    for epoch in range(3):
        for batch in range(1, 13):
            model(torch.randn(2, 3, 32, 32)).mean().backward()
            if batch % accumulated == 0:
                optimizer.step()
        scheduler.step(epoch + 1)
    return optimizer


def test_a_run_whose_updates_nobody_states_is_not_averaged(ewa_vit):
    optimizer = create_optimizer_v2(ewa_vit, opt="adamw", lr=0.1)
    timm.scheduler.create_scheduler_v2(optimizer, num_epochs=2)
    assert ExpertWeightAveraging.of(optimizer) is None
