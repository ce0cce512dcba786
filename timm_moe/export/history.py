"""The origin and training of weights, as far as they are known; recorded in the config.json beside them."""

import csv
import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torch import nn

from ..checkpoints.source import folder_of, read_checkpoint
from ..checkpoints.stated import SOURCE_PREFIXES, args_of_train_py
from ..console import describe
from ..convert.blocks import moe_layers, parameters
from ..files import read_text, require_file
from ..layers import EwaMlp, SharedExpertMlp
from ..model_config import get_pretrained_cfg, is_single, shown

#: Entry of config.json that holds the history, and a digest of the weights: transformers keeps it beside other weights.
ENTRY = "timm_moe"
#: Options of train.py that are kept where they are set. None of them is a path.
_TRAINING_OPTIONS = (
    *("pretrained", "epochs", "batch_size", "grad_accum_steps", "world_size", "opt", "lr", "weight_decay", "clip_grad"),
    *("layer_decay", "sched", "warmup_epochs", "min_lr", "smoothing", "mixup", "cutmix", "aa", "reprob", "drop"),
    *("drop_path", "task", "loss", "bce_loss", "jsd_loss", "amp", "model_ema", "kd_model_name", "seed"),
)
#: Options that mean nothing unless another one is set.
_DEPENDENT_OPTIONS = {
    "amp": ("amp_dtype",),
    "model_ema": ("model_ema_decay",),
    "kd_model_name": ("kd_distill_type", "kd_loss_type", "kd_temperature", "distill_loss_weight", "task_loss_weight"),
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
#: ``user/name``, or a name without an owner.
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class _Record:
    """Base of records that may come from somebody else's file: every value must have its field's type."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if not _fits(value, kind):
                raise ValueError(f"{name} is {shown(value)}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is dict:  # whose names are texts in JSON
        return isinstance(value, dict) and all(isinstance(part, get_args(kind)[1]) for part in value.values())
    return isinstance(value, kind)


@dataclass(frozen=True)
class Experts(_Record):
    """The experts that a dense model was made of."""

    model: str  # name of the expert model
    layers: int  # number of its expert layers
    experts: int  # in each layer
    shared: bool  # whether there is a shared expert beside them
    averaged: bool  # whether they were averaged in training
    mean: bool  # whether the model in eval mode computes the same as the network made of its experts
    parameters: int  # of the whole model

    @classmethod
    def of(cls, model: nn.Module) -> "Experts":
        layers = list(moe_layers(model).values())
        return cls(
            model=get_pretrained_cfg(model).get("architecture", type(model).__name__),
            layers=len(layers),
            experts=layers[0].num_experts,
            shared=any(isinstance(layer, SharedExpertMlp) for layer in layers),
            averaged=any(isinstance(layer, EwaMlp) or layer.share_rate > 0 for layer in layers),
            mean=all(layer.deploys_dense for layer in layers),
            parameters=parameters(model),
        )


@dataclass(frozen=True)
class History(_Record):
    """Origin and training of weights, in words that may be published: no paths. ValueError for impossible values."""

    file: str | None = None  # checkpoint, folder or ``hf-hub:`` name; None for a model in memory
    options: dict[str, str] = field(default_factory=dict)  # of train.py, if it wrote the file
    epoch: int | None = None  # the last one, from 0
    ema: bool = False  # whether these are the EMA weights
    metrics: dict[str, int | float] = field(default_factory=dict)  # from train.py's summary.csv
    base: str | None = None  # name on the Hub of the pretrained weights that training began from
    start: str | None = None  # other weights that training began from: a file, or the folder of a gathered student
    dataset: str | None = None  # name of the data set for train.py, unless it is a folder of images
    dataset_on_hub: bool = False  # whether that is a name on the Hub
    experts: Experts | None = None  # that the dense model was made of
    method: str | None = None  # by which it was made

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in filter(None, (self.base, self.dataset)):
            if not HUB_NAME.fullmatch(name):
                raise ValueError(f"{shown(name)} is no name on the Hub")
        for name in self.options:
            if not re.fullmatch(r"(model option )?\w+", name):
                raise ValueError(f"{shown(name)} is no option of train.py")
        for name in self.metrics.keys() - METRICS.keys():
            raise ValueError(f"{shown(name)} is no metric of train.py")

    def to_config(self) -> dict[str, Any]:
        """Return the known values, for :func:`recorded_history`."""
        unknown = asdict(History())
        return {name: value for name, value in asdict(self).items() if value != unknown[name]}


def find_history(source: nn.Module | str | Path, model: nn.Module, use_ema: bool = False) -> History:
    """Find the history of a source and its loaded model, or of its EMA weights.

    All of it is known if train.py wrote the file, or if the folder was exported from such a file.
    """
    if isinstance(source, nn.Module):
        return History()
    folder, path = folder_of(source), Path(source)
    if folder is not None:
        return recorded_history(folder) or History(public(folder.absolute()))
    if str(source).startswith("hf-hub:") or path.suffix == ".safetensors":  # it holds nothing but weights
        return History(public(source))
    checkpoint = read_checkpoint(path)
    args = args_of_train_py(checkpoint)
    if "model" not in args:
        return History(public(path), ema=use_ema)
    return _history_of_run(path, args, checkpoint, model, use_ema)


def recorded_history(folder: Path) -> History | None:
    """Read the history in a folder's config.json, if it is that of the weights there; ValueError if it is damaged."""
    record = json.loads(read_text(folder / "config.json")).get(ENTRY)
    try:
        if record is None or record.pop("weights", None) != digest(folder):
            return None
        experts = record.get("experts")
        if experts is not None:
            experts.pop("fused", None)  # stated by earlier exports, but never true of a model of this package
        return History(**{**record, "experts": None if experts is None else Experts(**experts)})
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"The entry {ENTRY} in {folder / 'config.json'} is damaged ({describe(error)}): take it out."
        ) from error


def digest(folder: Path) -> str | None:
    """Return the SHA-256 of the weights in a folder; None if there is no model.safetensors."""
    file, found = folder / "model.safetensors", hashlib.sha256()
    if not file.is_file():
        return None
    with file.open("rb") as weights:
        while part := weights.read(2**20):
            found.update(part)
    return found.hexdigest()


def _history_of_run(
    path: Path, args: dict[str, Any], checkpoint: dict[str, Any], model: nn.Module, use_ema: bool
) -> History:
    name, epoch = str(args["model"]), checkpoint.get("epoch")
    epoch = epoch if type(epoch) is int and is_single(epoch) else None
    folder = name if name.startswith(SOURCE_PREFIXES) else None
    overlay = args.get("pretrained_cfg_overlay")
    others = [overlay.get(name) for name in ("file", "url", "hf_hub_id")] if isinstance(overlay, dict) else []
    replaced = next(filter(None, (args.get("initial_checkpoint"), args.get("pretrained_path"), *others)), None)
    base = get_pretrained_cfg(model).get("hf_hub_id")
    if not args.get("pretrained") or replaced or not HUB_NAME.fullmatch(base or ""):
        base = None
    start = None if base else replaced or folder
    reader, _, named = " ".join(str(args.get("dataset") or "").split()).partition("/")
    is_named = reader in (*_HUB_READERS, "tfds", "torch") and HUB_NAME.fullmatch(named)  # and no path
    dataset = named if is_named else None
    dependent = [name for main, names in _DEPENDENT_OPTIONS.items() if args.get(main) for name in names]
    options = {
        "model": args["model"],
        **{f"model option {public(name)}": value for name, value in (args.get("model_kwargs") or {}).items()},
        "dataset": dataset,
        **{name: args.get(name) for name in (*_TRAINING_OPTIONS, *dependent)},
    }
    measured = args.get("eval_metric") or ("map" if args.get("task") == "multilabel" else "top1")
    metrics = _summary(path, measured, epoch, checkpoint.get("metric"))
    measured_ema = bool(args.get("model_ema")) and not args.get("model_ema_force_cpu")
    return History(
        file=public(path),
        options={name: public(value) for name, value in options.items() if value not in (None, False, "")},
        epoch=epoch,
        ema=use_ema,
        metrics=metrics if measured_ema == use_ema else {},
        base=base,
        start=public(start) if start else None,
        dataset=dataset,
        dataset_on_hub=dataset is not None and reader in _HUB_READERS,
    )


def _summary(path: Path, measured: Any, epoch: int | None, metric: Any) -> dict[str, int | float]:
    """Read the metrics in the row of summary.csv that was written with this checkpoint, if there is one."""
    file = path.parent / "summary.csv"
    if not file.exists():
        return {}
    require_file(file, path.parent)
    try:
        rows = [
            row
            for row in csv.DictReader(read_text(file).splitlines())
            if row["epoch"] == str(epoch) and float(row[f"eval_{measured}"]) == float(metric)
        ]
        found = {name: float(rows[-1][f"eval_{name}"]) for name in METRICS if rows[-1].get(f"eval_{name}")}
    except (csv.Error, KeyError, TypeError, ValueError, IndexError):  # of another run, or damaged
        return {}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def public(value: Any) -> str:
    """Write a value as code on one line of Markdown; only the last part of a path appears."""
    if isinstance(value, dict):
        return ", ".join(f"{public(name)}={public(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(public(part) for part in value)
    text = str(value)
    if not text.startswith("hf-hub:"):
        text = re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return re.sub(r"[`|<>\s]+", " ", printable)
