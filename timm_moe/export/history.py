"""The origin and training of weights, as far as they are known.

An export records them in the config.json beside the weights.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from torch import nn

from ..checkpoints.description import ENTRY, SOURCE_PREFIXES, measures_ema
from ..checkpoints.image_settings import own_numbering, stated_image_mode
from ..checkpoints.model_spec import Origin
from ..checkpoints.summary_csv import DamagedTable, read_summary
from ..console import describe, is_single, shown
from ..convert.expert_layers import moe_layers, numbers_of_experts, parameters
from ..layers import EwaMlp, SharedExpertMlp
from ..model_config import get_pretrained_cfg

#: Options of train.py that are kept where they are set: not None, False, empty or, but for those
#: of :data:`_ZERO_COUNTS`, zero. None of them is a path.
_TRAINING_OPTIONS = (
    "pretrained",
    "epochs",
    "batch_size",
    "grad_accum_steps",
    "world_size",
    "opt",
    "opt_kwargs",
    "lr",
    "weight_decay",
    "clip_grad",
    "layer_decay",
    "sched",
    "warmup_epochs",
    "min_lr",
    "smoothing",
    "mixup",
    "cutmix",
    "no_aug",
    "drop",
    "drop_path",
    "task",
    "loss",
    "bce_loss",
    "jsd_loss",
    "amp",
    "model_ema",
    "kd_model_name",
    "seed",
    "train_split",
    "val_split",
    "target_key",
)
#: Options of which zero says something, since train.py's default is another number.
_ZERO_COUNTS = ("seed", "weight_decay", "warmup_epochs", "smoothing")
#: Values that say nothing, since they are train.py's defaults.
_DEFAULTS = {"train_split": "train", "val_split": "validation"}
#: Options of the augmentation, which ``no_aug`` turns off.
_AUGMENTATION = ("scale", "aa", "reprob")
#: Options that mean nothing unless another one is set.
_DEPENDENT_OPTIONS = {
    "amp": ("amp_dtype",),
    "mixup": ("mixup_prob",),
    "model_ema": ("model_ema_decay",),
    "kd_model_name": (
        "kd_distill_type",
        "kd_loss_type",
        "kd_temperature",
        "distill_loss_weight",
        "task_loss_weight",
    ),
}
#: Prefixes of ``--dataset`` before a name on the Hub.
_HUB_READERS = ("hfds", "hfids")
#: Columns of summary.csv: name for people, type for the Hub.
METRICS = {
    "top1": ("top-1 accuracy (%)", "accuracy"),
    "top5": ("top-5 accuracy (%)", "top_5_accuracy"),
    "loss": ("loss", "loss"),
    "map": ("mean average precision (%)", "mean_average_precision"),
    "micro_f1": ("micro F1 (%)", "f1"),
    "macro_f1": ("macro F1 (%)", "f1"),
    "sample_f1": ("sample F1 (%)", "f1"),
}
#: Entry of config.json in the place of "metrics" where they are those of the experts, and the
#: weights are another function.
_OF_EXPERTS = "metrics_of_experts"
#: ``user/name``, or a name without an owner.
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ExpertsRecord:
    """The experts of a model, or those that a dense model was made of."""

    model: str  # name of the expert model
    layers: int  # number of its expert layers
    experts: str  # their number in each layer, as "4" or "4/8"
    shared: bool  # whether there is a shared expert beside them
    averaged: bool  # whether they were averaged in training
    mean: bool  # whether the mean of the experts computes the same as the model in eval mode
    parameters: int  # of the whole model

    @classmethod
    def of(cls, model: nn.Module) -> "ExpertsRecord | None":
        """Describe the experts of a model; None if it has none."""
        layers = list(moe_layers(model).values())
        if not layers:
            return None
        return cls(
            model=get_pretrained_cfg(model).get("architecture", type(model).__name__),
            layers=len(layers),
            experts=numbers_of_experts(layers),
            shared=any(isinstance(layer, SharedExpertMlp) for layer in layers),
            averaged=any(isinstance(layer, EwaMlp) or layer.share_rate > 0 for layer in layers),
            mean=all(layer.deploys_dense for layer in layers),
            parameters=parameters(model),
        )


@dataclass(frozen=True)
class History:
    """Origin and training of weights, in words that may be published: no paths."""

    file: str | None = None  # checkpoint, folder or ``hf-hub:`` name; None for a model in memory
    options: dict[str, str] = field(default_factory=dict)  # of train.py, if it wrote the file
    epoch: int | None = None  # the last one, from 0
    ema: bool = False  # whether these are the EMA weights
    metrics: dict[str, int | float] = field(default_factory=dict)  # from train.py's summary.csv
    base: str | None = None  # name on the Hub of the pretrained weights that training began from
    base_license: str | None = None  # of these weights, where timm knows it
    # Other weights that training began from: a file, or the folder of a gathered student
    start: str | None = None
    dataset: str | None = None  # name of the data set for train.py, unless it is a folder of images
    dataset_on_hub: bool = False  # whether that is a name on the Hub
    numbering: str | None = None  # what numbered the classes, unless it is the order of the folders
    image_mode: str | None = None  # of Pillow, if train.py was told one
    experts: ExpertsRecord | None = None  # that the dense model was made of
    method: str | None = None  # by which it was made

    @property
    def is_what_was_measured(self) -> bool:
        """Tell if the weights compute the function that the metrics are of."""
        return self.method is None or (
            self.experts is not None and self.experts.mean and self.method == "average"
        )

    def to_config(self) -> dict[str, Any]:
        """Return the known values, for :func:`recorded_history`."""
        unknown = asdict(History())
        known = {name: value for name, value in asdict(self).items() if value != unknown[name]}
        if "metrics" in known and not self.is_what_was_measured:
            known[_OF_EXPERTS] = known.pop("metrics")
        return known


def history_of(model: nn.Module, method: str | None = None) -> History:
    """Find the history of a loaded model.

    All of it is known if train.py wrote the file, or if the folder was exported from such a file.
    Nothing is known of a model without an ``origin``.

    Args:
        model: the loaded model.
        method: by which one network is going to be made of its experts, if it has any.
    """
    history = _history_of(getattr(model, "origin", None), get_pretrained_cfg(model))
    if history.file is not None:
        metrics = dict(history.metrics)
        if getattr(model, "num_classes", 0) <= 5:  # One of five answers is always right.
            metrics.pop("top5", None)
        history = replace(
            history,
            metrics=metrics,
            numbering=own_numbering(model),
            image_mode=stated_image_mode(model),
        )
    experts = None if method is None else ExpertsRecord.of(model)
    return history if experts is None else replace(history, experts=experts, method=method)


def _history_of(origin: Origin | None, cfg: Mapping[str, Any]) -> History:
    if origin is None:
        return History()
    if origin.folder is not None:
        return recorded_history(origin) or History(public(origin.folder.absolute()))
    if "model" not in origin.train_args:
        return History(public(origin.place), ema=origin.ema)
    return _history_of_run(origin, cfg)


def recorded_history(origin: Origin) -> History | None:
    """Return the history in a folder's config.json; None if it is that of other weights.

    Raises:
        ValueError: if the entry is damaged.
    """
    if origin.recorded is None or origin.folder is None:
        return None
    try:
        record = dict(origin.recorded)
        if record.pop("weights", None) != digest(origin.folder):
            return None
        if _OF_EXPERTS in record:
            record["metrics"] = record.pop(_OF_EXPERTS)
        if record.get("experts") is not None:
            record["experts"] = _checked(ExpertsRecord, dict(record["experts"]))
        return _checked_history(_checked(History, record))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"The entry {ENTRY} in {origin.folder / 'config.json'} is damaged ({describe(error)}): "
            "take it out."
        ) from error


def _checked(kind: type, record: dict[str, Any]) -> Any:
    """Make a record of what a file states.

    Raises:
        KeyError: if a value has no field.
        ValueError: if a value does not have the type of its field.
    """
    types = get_type_hints(kind)
    for name, value in record.items():
        if not _fits(value, types[name]):
            raise ValueError(f"{name} is {shown(value)}")
    return kind(**record)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is dict:  # its names are texts in JSON, so only the values are checked
        return isinstance(value, dict) and all(
            isinstance(part, get_args(kind)[1]) for part in value.values()
        )
    return isinstance(value, kind)


def _checked_history(history: History) -> History:
    """Return a history; ValueError if it holds a name that none of its kind has."""
    for name in filter(None, (history.base, history.dataset)):
        if not HUB_NAME.fullmatch(name):
            raise ValueError(f"{shown(name)} is no name on the Hub")
    for name in history.options:
        if not re.fullmatch(r"(model option )?\w+", name):
            raise ValueError(f"{shown(name)} is no option of train.py")
    if history.experts and not re.fullmatch(r"[\d/]+", history.experts.experts):
        raise ValueError(f"{shown(history.experts.experts)} is no number of experts")
    if strange := history.metrics.keys() - METRICS.keys():
        raise ValueError(f"{shown(min(strange))} is no metric of train.py")
    return history


def digest(folder: Path) -> str | None:
    """Return the SHA-256 of the weights in a folder; None if there is no model.safetensors."""
    file, found = folder / "model.safetensors", hashlib.sha256()
    if not file.is_file():
        return None
    with file.open("rb") as weights:
        while part := weights.read(2**20):
            found.update(part)
    return found.hexdigest()


def _history_of_run(origin: Origin, cfg: Mapping[str, Any]) -> History:
    """Return the history of a run of train.py.

    Args:
        origin: of its checkpoint.
        cfg: pretrained config of its model, which names the weights that timm has for it.
    """
    args = origin.train_args
    replaced = _stated_start(args)
    # Without --pretrained timm draws weights, also for a model that a folder describes.
    model = str(args["model"])
    start, base, base_license = replaced, None, None
    if args.get("pretrained") and not replaced:
        name = re.sub("^hf[-_]hub:", "", model).partition("@")[0]
        if name != model and HUB_NAME.fullmatch(name):
            base = name
        elif model.startswith(SOURCE_PREFIXES):
            start = model
        # The user may have stated another model than the file.
        elif model.partition(".")[0] == cfg.get("architecture"):
            named = HUB_NAME.fullmatch(cfg.get("hf_hub_id") or "")
            base, base_license = (named.group(), cfg.get("license")) if named else (None, None)
    reader, dataset = _named_dataset(args)

    epoch = origin.epoch if type(origin.epoch) is int and is_single(origin.epoch) else None
    measured = args.get("eval_metric") or ("map" if args.get("task") == "multilabel" else "top1")
    metrics = _summary(Path(origin.place).parent, measured, epoch, origin.metric)
    return History(
        file=public(origin.place),
        options=_options(args, dataset),
        epoch=epoch,
        ema=origin.ema,
        metrics=metrics if measures_ema(args) == origin.ema else {},
        base=base,
        base_license=base_license,
        start=public(start) if start else None,
        dataset=dataset,
        dataset_on_hub=dataset is not None and reader in _HUB_READERS,
    )


def _options(args: dict[str, Any], dataset: str | None) -> dict[str, str]:
    """Return the options of train.py that are set, as they may be published."""
    model_options = (args.get("model_kwargs") or {}).items()
    dependent = [
        name for main, names in _DEPENDENT_OPTIONS.items() if args.get(main) for name in names
    ]
    augmentation = () if args.get("no_aug") else _AUGMENTATION
    options = {
        "model": args["model"],
        **{f"model option {public(name)}": value for name, value in model_options},
        "dataset": dataset,
        **{name: args.get(name) for name in (*_TRAINING_OPTIONS, *augmentation, *dependent)},
    }
    return {name: public(value) for name, value in options.items() if _is_set(name, value)}


def _is_set(name: str, value: Any) -> bool:
    """Tell if an option of train.py has a value that says something."""
    is_zero_that_counts = value == 0 and value is not False and name in _ZERO_COUNTS
    is_given = value not in (None, False, "", {}, _DEFAULTS.get(name))
    return is_zero_that_counts or is_given


def _stated_start(args: dict[str, Any]) -> Any:
    """Return the weights with which train.py was told to begin, in place of timm's.

    None is returned if there are none. ``--resume`` with ``--start-epoch 0`` begins from a file.
    """
    starts = [args.get("resume")] if args.get("start_epoch") == 0 else []
    starts.append(args.get("initial_checkpoint"))
    if args.get("pretrained"):  # Without it timm does not look at the others.
        starts.append(args.get("pretrained_path"))
        overlay = (args.get("model_kwargs") or {}).get("pretrained_cfg_overlay")
        if isinstance(overlay, dict):
            starts += [overlay.get(name) for name in ("file", "url", "hf_hub_id")]
    return next(filter(None, starts), None)


def _named_dataset(args: dict[str, Any]) -> tuple[str, str | None]:
    """Return the reader and the name of a data set; the name is None if it may be a path."""
    reader, _, name = " ".join(str(args.get("dataset") or "").split()).partition("/")
    is_named = reader in (*_HUB_READERS, "tfds", "torch") and HUB_NAME.fullmatch(name)
    of_folders = reader == "torch" and name in ("image_folder", "folder")
    return reader, name if is_named and not of_folders else None


def _summary(folder: Path, measured: Any, epoch: int | None, metric: Any) -> dict[str, int | float]:
    """Read the metrics that were written with a checkpoint in summary.csv.

    They are empty if the file, or the row of the checkpoint, is missing.
    """
    try:
        rows = read_summary(folder, [f"eval_{name}" for name in (*METRICS, measured)])
    except DamagedTable:
        return {}
    found: dict[str, int | float] = {}
    at_checkpoint = {"epoch": epoch, f"eval_{measured}": metric}
    for row in rows:
        if at_checkpoint.items() <= row.items():
            found = {name: row[f"eval_{name}"] for name in METRICS if f"eval_{name}" in row}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def public(value: Any) -> str:
    """Write a value as code on one line of Markdown.

    Of a path or an address only the last part appears.
    """
    if isinstance(value, dict):
        return ", ".join(f"{public(name)}={public(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(public(part) for part in value)
    printable = "".join(
        letter if letter.isprintable() else " " for letter in _last_part(str(value))
    )
    return re.sub(r"[`|<>\s]+", " ", printable)


def _last_part(text: str) -> str:
    """Return the last part of a path or an address; other texts are as they are.

    Query and user of an address are left out.
    """
    name = text.removeprefix("hf-hub:")
    if name != text and HUB_NAME.fullmatch(name.partition("@")[0]):
        return text
    if "://" in text:
        try:
            address = urlsplit(text)
            text = address.path.rstrip("/") or address.hostname or ""
        except ValueError:  # of an impossible host
            return "address"
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
