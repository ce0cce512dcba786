"""ExpertCallback in Hugging Face's Trainer.

Models are native ones of transformers, and timm's in their wrapper.
"""

import copy
import pickle

import pytest
import timm
import torch
from averaging_loop import spread
from common import OPTIONS, SMALL_VIT
from foreign_loop import Images
from safetensors.torch import save_file
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.nn import functional as F

import timm_moe
from timm_moe.export.export import export_moe
from timm_moe_cli import main

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from timm_moe.integrations.transformers import ExpertCallback, load_experts  # noqa: E402

pytestmark = [pytest.mark.ci]

VIT = dict(
    **dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=32, patch_size=8),
    num_labels=5,
    hidden_dropout_prob=0.1,
)
FULL = 0.75  # of 4 experts: a last averaging at this rate makes them equal


def native(kind, **options):
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{kind}ForImageClassification")
    sizes = dict(mlp_ratio=2) if kind == "Dinov2" else dict(intermediate_size=64)
    model = model_class(getattr(transformers, f"{kind}Config")(**VIT, **sizes))
    return timm_moe.convert_to_moe(model, expert_init="independent", **options)


def wrapped(folder, name, **options):
    """A timm model in transformers' wrapper, as AutoModel opens it."""
    torch.manual_seed(0)
    export_moe(
        timm.create_model(name, **SMALL_VIT, **options),
        folder,
        model_args={**OPTIONS, **options},
        overwrite=True,
    )
    return transformers.AutoModelForImageClassification.from_pretrained(folder)


def trainer(
    model,
    folder,
    callbacks=None,
    trainer_class=transformers.Trainer,
    compute_loss_func=None,
    **options,
):
    model_init = options.pop("model_init", None)
    optimizers = options.pop("optimizers", (None, None))
    defaults = dict(
        max_steps=4,
        per_device_train_batch_size=6,
        logging_steps=2,
        save_steps=2,
        save_strategy="steps",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-2,
    )
    args = transformers.TrainingArguments(str(folder), **{**defaults, **options})
    callbacks = [ExpertCallback()] if callbacks is None else callbacks
    return trainer_class(
        model,
        args,
        train_dataset=Images(24),
        eval_dataset=Images(24),
        callbacks=callbacks,
        compute_loss_func=compute_loss_func,
        model_init=model_init,
        optimizers=optimizers,
    )


MODELS = {
    "ViT": lambda folder, **options: native("ViT", **options),
    "DINOv2": lambda folder, **options: native("Dinov2", **options),
    "timm": lambda folder, router="random", **options: wrapped(
        folder, "vit_tiny_ewa_moe" if router == "random" else "vit_tiny_moe", **options
    ),
}


@pytest.mark.parametrize("router", ["random", "top_k"])
@pytest.mark.parametrize("kind", ["ViT", "DINOv2", "timm"])
def test_resumed_it_is_the_uninterrupted_run(kind, router, tmp_path):
    """Some models are written with the names of earlier versions, such as ViT.

    Trainer does not load these again.
    """
    options = dict(share_rate=FULL, share_schedule="linear") if router == "random" else {}
    whole = trainer(MODELS[kind](tmp_path / "model", router=router, **options), tmp_path / "whole")
    start = copy.deepcopy(whole.model.state_dict())
    whole.train()
    resumed = trainer(
        MODELS[kind](tmp_path / "model", router=router, **options), tmp_path / "resumed"
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    for name, expected in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], expected), name
    assert any(
        not torch.equal(start[name], tensor) for name, tensor in whole.model.state_dict().items()
    )
    if router == "random":
        assert spread(whole.model) < 1e-6
        assert resumed.optimizer.param_groups[0]["ewa_updates"] == 4


def test_a_second_run_begins_anew(tmp_path):
    run = trainer(native("ViT", share_rate=FULL, share_schedule="linear"), tmp_path)
    run.train()
    run.args.max_steps = 2
    run.train()
    assert run.optimizer.param_groups[0]["ewa_updates"] == 2
    assert timm_moe.ExpertWeightAveraging.of(run.optimizer) is None


class TrainsAnother(transformers.TrainerCallback):
    """Trains a model within the run of another one, by the same callback."""

    def __init__(self, experts, folder):
        self.experts, self.folder = experts, folder

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            pickle.dumps(self.experts)  # as a search that spreads its trials does
            model = native("ViT", share_rate=FULL, share_schedule="linear")
            inner = trainer(model, self.folder, [self.experts])
            inner.train()
            assert inner.optimizer.param_groups[0]["ewa_updates"] == 4


def test_one_callback_trains_within_the_run_of_another_model(tmp_path):
    experts = ExpertCallback()
    model = native("ViT", share_rate=FULL, share_schedule="linear")
    run = trainer(model, tmp_path / "outer", [experts, TrainsAnother(experts, tmp_path / "inner")])
    run.train()
    assert run.optimizer.param_groups[0]["ewa_updates"] == 4
    assert spread(model) < 1e-6
    assert timm_moe.ExpertWeightAveraging.of(run.optimizer) is None


def by_its_class(model, optimizer):
    return timm_moe.ExpertWeightAveraging(model, optimizer, schedule="linear", total_updates=20)


def by_a_loops_start(model, optimizer):
    return timm_moe.start_averaging(model, optimizer, total_updates=20)


def by_timms_scheduler(model, optimizer):
    create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=10)
    return timm_moe.ExpertWeightAveraging.of(optimizer)


@pytest.mark.parametrize("average", [by_its_class, by_a_loops_start, by_timms_scheduler])
def test_an_optimizer_keeps_its_own_averaging(average, tmp_path):
    model = native("ViT", share_rate=FULL, share_schedule="linear")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    averaging = average(model, optimizer)
    run = trainer(model, tmp_path, optimizers=(optimizer, None))
    run.train()
    assert timm_moe.ExpertWeightAveraging.of(optimizer) is averaging
    assert averaging.updates == run.state.global_step
    assert averaging.share_rate == pytest.approx(FULL * averaging.updates / 20)


class Recorder(transformers.TrainerCallback):
    """As TensorBoard's callback, which Trainer puts before those of the user."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(dict(logs))


def test_statistics_reach_every_log(tmp_path):
    recorder = Recorder()
    model = native("ViT", router="top_k", share_rate=0.5, share_schedule="constant")
    run = trainer(
        model, tmp_path, [recorder, ExpertCallback()], eval_strategy="steps", eval_steps=2
    )
    run.train()
    training = [logs for logs in recorder.logs if "loss" in logs]
    assert len(training) == 2
    for logs in training:
        assert logs["ewa/share_rate"] == 0.5
        assert logs["router/vit.layers.3.mlp/dropped"] == 0
        assert 0.25 <= logs["router/vit.layers.1.mlp/load_max"] <= 1
        assert logs["router/vit.layers.1.mlp/balance_loss"] >= 0.9
    evaluations = [logs for logs in recorder.logs if "eval_loss" in logs]
    assert len(evaluations) == 2
    assert not any(name.startswith(("router/", "ewa/")) for logs in evaluations for name in logs)
    assert "router/vit.layers.1.mlp/dropped" in run.state.log_history[0]


def test_two_callbacks_are_as_one(tmp_path):
    recorder = Recorder()
    model = native("ViT", share_rate=0.5, share_schedule="constant")
    run = trainer(model, tmp_path, [recorder, ExpertCallback(), ExpertCallback()])
    run.train()
    rates = [logs["ewa/share_rate"] for logs in recorder.logs if "loss" in logs]
    assert rates == [0.5, 0.5]
    assert timm_moe.ExpertWeightAveraging.of(run.optimizer) is None


def summed_loss(outputs, labels, num_items_in_batch):
    return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


class OwnLoss(transformers.Trainer):
    """Computes its loss without Trainer's compute_loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs, num_items_in_batch=num_items_in_batch).loss
        return loss + timm_moe.auxiliary_loss(model) / self.current_gradient_accumulation_steps


class LossOnTop(transformers.Trainer):
    """Adds the routers' losses to what Trainer's compute_loss returns.

    A user does so who knows of no callback.
    """

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + timm_moe.auxiliary_loss(model)  # zero, as the callback has added them
        return (loss, outputs) if return_outputs else loss


class WithoutItems(transformers.Trainer):
    """Counts no items, as for labels of objects; so it divides the loss of a model itself."""

    def get_batch_samples(self, *args):
        return super().get_batch_samples(*args)[0], None


class Dividing(transformers.Trainer):
    """Divides the mean that its ``compute_loss_func`` returns."""

    loss_is_scaled_for_ga = False


def mean_loss(outputs, labels, num_items_in_batch):
    return F.cross_entropy(outputs["logits"], labels)


WAYS = {
    "the model's loss": dict(),
    "label smoothing": dict(label_smoothing_factor=0.2),
    "compute_loss_func": dict(compute_loss_func=summed_loss),
    "a loss of its own": dict(trainer_class=OwnLoss),
    "a loss on top": dict(trainer_class=LossOnTop),
    "no number of items": dict(trainer_class=WithoutItems),
    "a mean": dict(trainer_class=Dividing, compute_loss_func=mean_loss),
}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    ("kind", "way"),
    # the wrapper of timm's models takes no num_items_in_batch
    [
        (kind, way)
        for kind in ("ViT", "timm")
        for way in WAYS
        if (kind, way) != ("timm", "a loss of its own")
        and (way != "a mean" or hasattr(transformers.Trainer, "loss_is_scaled_for_ga"))
    ],
)
def test_the_routers_losses_have_their_weight(kind, way, accumulation, tmp_path):
    model = MODELS[kind](tmp_path / "model", router="top_k", aux_loss_weight=3.0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    reference = copy.deepcopy(model).train()
    options = dict(
        max_steps=1, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0
    )
    sampling = dict(train_sampling_strategy="sequential", gradient_accumulation_steps=accumulation)
    run = trainer(model, tmp_path / "run", **options, **sampling, save_total_limit=1, **WAYS[way])
    logged = run.train().training_loss
    smoothing = WAYS[way].get("label_smoothing_factor", 0.0)
    expected = 0.0
    for number in range(accumulation):
        items = [Images(24)[index] for index in range(6 * number, 6 * number + 6)]
        pixels, labels = (
            torch.stack([item["pixel_values"] for item in items]),
            torch.tensor([i["labels"] for i in items]),
        )
        logits = reference(pixels).logits
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing) + timm_moe.auxiliary_loss(
            reference
        )
        (loss / accumulation).backward()
        expected += loss.item() / accumulation
    assert logged == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        for (name, trained), parameter in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            if parameter.grad is not None:
                torch.testing.assert_close(
                    trained, parameter - 0.1 * parameter.grad, rtol=1e-4, atol=1e-6, msg=name
                )


class TwoViews(nn.Module):
    """Calls its backbone twice in a forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = timm.create_model("vit_tiny_moe", **SMALL_VIT, noise_std=0.0)

    def forward(self, pixel_values, labels):
        logits = self.backbone(pixel_values) + self.backbone(pixel_values.flip(3))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_losses_of_all_calls_of_a_part_are_added(tmp_path):
    model = TwoViews().train()
    items = [Images(24)[index] for index in range(24)]
    pixels, labels = torch.stack([item["pixel_values"] for item in items]), torch.arange(24) % 5
    expected = model(pixels, labels)["loss"].item()
    for view in (pixels, pixels.flip(3)):
        model.backbone(view)
        expected += timm_moe.auxiliary_loss(model).item()
    options = dict(train_sampling_strategy="sequential", save_strategy="no")
    run = trainer(model, tmp_path, max_steps=1, per_device_train_batch_size=24, **options)
    assert run.train().training_loss == pytest.approx(expected, rel=1e-5)


class ForwardBefore(transformers.Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        model(inputs["pixel_values"])
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_losses_of_a_forward_that_nobody_adds_are_told(tmp_path, caplog):
    run = trainer(native("ViT", router="top_k"), tmp_path, trainer_class=ForwardBefore, max_steps=1)
    with caplog.at_level("WARNING", "timm_moe"):
        run.train()
    assert "some forwards were not added" in caplog.text


def test_without_the_callback_trainer_is_what_it_was(tmp_path, caplog):
    run = trainer(native("ViT", router="top_k"), tmp_path, callbacks=[])
    with pytest.raises(RuntimeError, match="losses were not added"):
        run.train()
    dense = transformers.ViTForImageClassification(
        transformers.ViTConfig(**VIT, intermediate_size=64)
    )
    run = trainer(dense, tmp_path, max_steps=2)  # with the callback, without experts
    with caplog.at_level("WARNING", "timm_moe"):
        run.train()
    assert "has no expert layers" in caplog.text
    assert not any(
        name.startswith(("router/", "ewa/")) for logs in run.state.log_history for name in logs
    )


@pytest.mark.parametrize(
    ("name", "options"), [("vit_tiny_ewa_moe", []), ("vit_tiny_moe", ["--moe"])]
)
def test_a_checkpoint_folder_is_exported(name, options, tmp_path):
    run = trainer(wrapped(tmp_path / "model", name), tmp_path / "run", max_steps=2)
    run.train()
    assert (
        main(["export", *options, str(tmp_path / "run/checkpoint-2"), str(tmp_path / "exported")])
        == 0
    )
    exported = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    images = torch.randn(6, 3, 32, 32)
    assert torch.equal(exported(images), run.model.timm_model.eval()(images))


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    options = dict(
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    run = trainer(
        native("ViT", router="top_k"),
        tmp_path,
        **options,
        greater_is_better=True,  # so that the best is not the last one, which is in memory
        learning_rate=1.0,
    )
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")
    best = native("ViT", router="top_k")
    load_experts(best, run.state.best_model_checkpoint)
    for name, tensor in best.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_a_folder_with_other_expert_layers_is_refused(kind, tmp_path):
    """Its files have the names of an earlier version of transformers, for ViT."""
    native(kind, router="top_k", moe_layers="1").save_pretrained(tmp_path / "fewer")
    more = native(kind, router="top_k", moe_layers="0,1")
    with pytest.raises(RuntimeError, match=r"none in .*layers?\.0\.mlp.*moe_layers"):
        load_experts(more, tmp_path / "fewer")
    run = trainer(native(kind, router="top_k", moe_layers="1"), tmp_path / "run", max_steps=2)
    run.train()
    with pytest.raises(RuntimeError, match=r"none in .*layers?\.0\.mlp.*moe_layers"):
        trainer(more, tmp_path / "run", max_steps=4).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", ["ViT", "Dinov2"])
def test_saved_and_back_and_dense(kind, tmp_path, images):
    run = trainer(native(kind, router="top_k"), tmp_path / "run", max_steps=2)
    run.train()
    run.save_model(tmp_path / "saved")
    with pytest.raises(RuntimeError, match=r"size|mismatch|shape"):
        type(run.model).from_pretrained(tmp_path / "saved")
    fresh = native(kind, router="top_k")
    load_experts(fresh, tmp_path / "saved")
    assert torch.equal(fresh.eval()(images).logits, run.model.eval()(images).logits)
    with pytest.raises((RuntimeError, ValueError), match=r"router\.weight|are routed"):
        load_experts(native(kind, router="random"), tmp_path / "saved")
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        load_experts(fresh, tmp_path / "nowhere")
    dense = timm_moe.to_dense(run.model, "average").eval()
    dense.save_pretrained(tmp_path / "dense")
    loaded = type(run.model).from_pretrained(tmp_path / "dense").eval()
    assert torch.equal(loaded(images).logits, dense(images).logits)


def test_evaluation_is_that_of_the_mean(tmp_path):
    run = trainer(native("ViT"), tmp_path, max_steps=2)
    run.train()
    dense = timm_moe.to_dense(run.model)
    expected = trainer(dense, tmp_path, callbacks=[]).evaluate()["eval_loss"]
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


class Scaled(transformers.Trainer):
    """With a scaler of gradients, which fp16 has on a GPU; its first two steps overflow."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**127, backoff_factor=2.0**-60
        )


def test_skipped_steps_are_not_averaged(tmp_path):
    run = trainer(
        native("ViT", share_rate=FULL, share_schedule="constant"), tmp_path, trainer_class=Scaled
    )
    apart = spread(run.model)
    spreads = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            spreads.append(spread(model))

    run.add_callback(Watch())
    run.train()
    skipped = spreads.count(apart)
    assert 0 < skipped < 4
    assert spreads[:skipped] == [apart] * skipped
    assert max(spreads[skipped:]) < 1e-6
    assert run.optimizer.param_groups[0]["ewa_updates"] == 4 - skipped


def by_add_callback(folder):
    run = trainer(native("ViT", router="top_k"), folder, callbacks=[])
    run.add_callback(ExpertCallback())
    return run


def by_model_init(folder):
    run = trainer(None, folder, model_init=lambda: native("ViT", router="top_k"))
    return run


@pytest.mark.parametrize("make", [by_add_callback, by_model_init])
def test_resumed_however_the_callback_and_the_model_came(make, tmp_path):
    whole = make(tmp_path / "whole")
    whole.train()
    resumed = make(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    for name, expected in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], expected), name


@pytest.mark.parametrize("options", [dict(), dict(compute_loss_func=summed_loss)])
def test_evaluation_before_training(options, tmp_path):
    model = native("ViT", router="top_k")
    expected = trainer(model, tmp_path, callbacks=[], **options).evaluate()["eval_loss"]
    assert trainer(model, tmp_path, **options).evaluate()["eval_loss"] == expected


def test_nothing_is_left_after_an_interrupted_run(tmp_path):
    class Interrupt(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise KeyboardInterrupt

    run = trainer(native("ViT"), tmp_path)
    hooks = list(run.model._load_state_dict_pre_hooks)  # the conversion's own
    run.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert timm_moe.ExpertWeightAveraging.of(run.optimizer) is None
    assert list(run.model._load_state_dict_pre_hooks) == hooks


def test_before_a_run_has_an_optimizer_the_averaging_of_another_model_is_left_alone(tmp_path):
    other = native("ViT")
    optimizer = torch.optim.SGD(other.parameters())
    averaging = by_its_class(other, optimizer)
    run = trainer(native("ViT"), tmp_path)
    run.train_dataset = None
    run.log({"loss": 1.0})
    with pytest.raises(ValueError, match="train_dataset"):
        run.train()
    assert timm_moe.ExpertWeightAveraging.of(optimizer) is averaging


def test_only_the_models_own_files_are_loaded(tmp_path):
    model = native("ViT", router="top_k")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        of_others = {"vit.embeddings.cls_token": torch.zeros(1, 1, 32)}
        save_file(of_others, folder / "model_ema.safetensors")
        fresh = native("ViT", router="top_k")
        torch.nn.init.zeros_(fresh.vit.embeddings.cls_token)
        load_experts(fresh, folder)
        assert all(
            torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True)
        )


def test_the_schedule_ends_with_a_run_that_accumulates_gradients(tmp_path):
    """Take 24 images in batches of 6, three to an update: two updates an epoch."""
    model = native("ViT", share_rate=FULL, share_schedule="linear")
    run = trainer(
        model,
        tmp_path,
        max_steps=-1,
        num_train_epochs=2,
        gradient_accumulation_steps=3,
        logging_steps=1,
    )
    run.train()
    rates = [logs["ewa/share_rate"] for logs in run.state.log_history if "loss" in logs]
    assert rates == pytest.approx([FULL * update / 4 for update in (1, 2, 3, 4)])
    assert spread(model) < 1e-6


class Thaw(transformers.TrainerCallback):
    """The encoder, frozen first, comes to the optimizer after two steps of four."""

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        if state.global_step == 2:
            model.vit.requires_grad_(True)
            # Another group would need a learning rate of its own of the scheduler.
            optimizer.param_groups[0]["params"] += model.vit.parameters()


def test_an_encoder_that_thaws_is_averaged_from_then_on(tmp_path, caplog):
    model = native("ViT", share_rate=FULL, share_schedule="constant")
    model.vit.requires_grad_(False)
    before = spread(model)
    options = dict(lr_scheduler_type="constant", max_grad_norm=0)
    trainer(model, tmp_path, [ExpertCallback(), Thaw()], **options).train()
    assert spread(model) < 1e-6 < before
    assert "nothing averages" not in caplog.text
