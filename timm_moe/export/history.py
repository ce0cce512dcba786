"""After training: what is known of how weights came to be, kept in the config.json beside them."""

import csv
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torch import nn

from ..checkpoints.source import describe, read_checkpoint
from ..convert.blocks import moe_layers, share_rate_and_schedule
from ..info import parameters
from ..layers import EwaMlp, SharedExpertMlp
from ..model_config import get_pretrained_cfg

#: The entry of config.json that holds it: timm and the Hub pass it over, transformers hands it on.
ENTRY = "timm_moe"
#: Options of train.py that are kept where they are set. None of them is a path.
_TRAINING_OPTIONS = (
    *("pretrained", "epochs", "batch_size", "grad_accum_steps", "world_size", "opt", "lr", "weight_decay", "clip_grad"),
    *("layer_decay", "sched", "warmup_epochs", "min_lr", "smoothing", "mixup", "cutmix", "aa", "reprob", "drop"),
    *("drop_path", "bce_loss", "jsd_loss", "amp", "model_ema", "kd_model_name", "seed"),
)
#: Those that say nothing unless another one is set.
_DEPENDENT_OPTIONS = {
    "amp": ("amp_dtype",),
    "model_ema": ("model_ema_decay",),
    "kd_model_name": (
        *("kd_distill_type", "kd_loss_type", "kd_temperature", "distill_loss_weight", "task_loss_weight"),
    ),
}
#: What ``--dataset`` begins with where the name is one on the Hub.
_HUB_READERS = ("hfds", "hfids")
#: Values of options that are not used.
_UNSET: tuple[Any, ...] = (None, False, "")
#: Columns of summary.csv: name for people, type for the Hub.
METRICS = {
    "top1": ("top-1 accuracy (%)", "accuracy"),
    "top5": ("top-5 accuracy (%)", "top_5_accuracy"),
    "loss": ("loss", "loss"),
}


#: ``user/name``, or a name without an owner.
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class _Record:
    """What may come from a file of somebody else."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            if not _fits(getattr(self, name), kind):
                raise ValueError(f"{name} is {str(getattr(self, name))[:50]!r}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(
            _fits(part, wanted) for pair in value.items() for part, wanted in zip(pair, get_args(kind), strict=True)
        )
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, kind)


@dataclass(frozen=True)
class Experts(_Record):
    """The experts that a dense model was made of.

    Attributes:
        model: name of the expert model.
        layers: number of its expert layers.
        experts: in each of them.
        shared: whether there is a shared expert beside them.
        averaged: whether they were averaged in training.
        mean: whether in evaluation the model computes what one network made of its experts does, the mean or the fused
            one.
        parameters: of the whole model.
        fused: whether learned weights fuse them.
    """

    model: str
    layers: int
    experts: int
    shared: bool
    averaged: bool
    mean: bool
    parameters: int
    fused: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> "Experts":
        layers = list(moe_layers(model).values())
        return cls(
            model=get_pretrained_cfg(model).get("architecture", type(model).__name__),
            layers=len(layers),
            experts=layers[0].num_experts,
            shared=any(isinstance(layer, SharedExpertMlp) for layer in layers),
            averaged=any(isinstance(layer, EwaMlp) or bool(share_rate_and_schedule(layer)[0]) for layer in layers),
            mean=all(layer.deploys_dense and getattr(layer, "eval_mode", "average") == "average" for layer in layers),
            parameters=parameters(model),
            fused=all(layer.fused for layer in layers),
        )


@dataclass(frozen=True)
class History(_Record):
    """Where weights came from, as far as it is known, in words that may be published: no paths.

    Attributes:
        file: name of the checkpoint or folder, or ``hf-hub:`` name; None for a model in memory.
        options: train.py's, those that tell something; none if it did not write the file.
        epoch: number of the last epoch, from 0.
        ema: these are the EMA weights.
        metrics: what train.py measured on these weights, from its ``summary.csv``.
        base: name on the Hub of the pretrained weights that training began from.
        start: what else training began from: a file, or the folder of a gathered student.
        dataset: name that train.py was given for what is no folder of images.
        dataset_on_hub: whether that is a name on the Hub.
        experts: those that the dense model was made of.
        method: how.

    Raises:
        ValueError: if a value is none of these.
    """

    file: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    epoch: int | None = None
    ema: bool = False
    metrics: dict[str, int | float] = field(default_factory=dict)
    base: str | None = None
    start: str | None = None
    dataset: str | None = None
    dataset_on_hub: bool = False
    experts: Experts | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (self.base, self.dataset):
            if name is not None and not _HUB_NAME.fullmatch(name):
                raise ValueError(f"{name[:50]!r} is no name on the Hub")
        for name in self.metrics.keys() - METRICS.keys():
            raise ValueError(f"{name[:50]!r} is no metric of train.py")

    def to_config(self) -> dict[str, Any]:
        """What :func:`recorded_history` reads, without what is not known."""
        unknown = asdict(History())
        return {name: value for name, value in asdict(self).items() if value != unknown[name]}


def find_history(source: nn.Module | str | Path, model: nn.Module, use_ema: bool = False) -> History:
    """What a source tells about its training: all there is if train.py wrote it, or if it was exported from that.

    Args:
        source: as for :func:`timm_moe.checkpoints.source.load_source`.
        model: what that made of it.
        use_ema: these are the EMA weights of a train.py checkpoint.

    Raises:
        ValueError: as :func:`recorded_history`.
    """
    if isinstance(source, nn.Module):
        return History()
    if str(source).startswith("hf-hub:"):
        return History(public(source))
    path = Path(str(source).removeprefix("local-dir:"))
    if path.is_dir():
        return recorded_history(path)
    if path.suffix == ".safetensors":  # which holds nothing but weights
        return History(public(path))
    checkpoint = read_checkpoint(path)
    if not hasattr(checkpoint.get("args"), "model"):
        return History(public(path), ema=use_ema)
    args = vars(checkpoint["args"])
    epoch = checkpoint.get("epoch")
    measured_ema = bool(args.get("model_ema")) and not args.get("model_ema_force_cpu")
    dataset, on_hub = _dataset(args)
    base = _base(args, model)
    start = None if base else _start(args)
    return History(
        file=public(path),
        options={name: public(value) for name, value in _options(args, dataset).items() if value not in _UNSET},
        epoch=epoch if isinstance(epoch, int) else None,
        ema=use_ema,
        metrics=_summary(path, checkpoint) if measured_ema == use_ema else {},
        base=base,
        start=public(start) if start else None,
        dataset=dataset,
        dataset_on_hub=on_hub,
    )


def recorded_history(folder: Path) -> History:
    """What the config.json of a folder tells; where it tells nothing, the folder's name.

    Raises:
        ValueError: if that is damaged.
    """
    record = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(ENTRY)
    if record is None:
        return History(public(folder.absolute()))
    try:
        experts = record.get("experts")
        return History(**{**record, "experts": None if experts is None else Experts(**experts)})
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"The entry {ENTRY} in {folder / 'config.json'} is damaged ({describe(error)}): take it out, or export the "
            "model again."
        ) from error


def _base(args: dict[str, Any], model: nn.Module) -> str | None:
    replaced = args.get("pretrained_path") or args.get("initial_checkpoint")
    name = get_pretrained_cfg(model).get("hf_hub_id")
    return name if args.get("pretrained") and not replaced and name and _HUB_NAME.fullmatch(name) else None


def _start(args: dict[str, Any]) -> Any:
    name = str(args.get("model"))
    folder = name if name.startswith(("local-dir:", "hf-hub:")) else None
    return args.get("initial_checkpoint") or args.get("pretrained_path") or folder


def _dataset(args: dict[str, Any]) -> tuple[str | None, bool]:
    """The name that train.py was given for what is no folder of images, and whether it is one on the Hub."""
    kind, _, name = " ".join(str(args.get("dataset") or "").split()).partition("/")
    if kind not in (*_HUB_READERS, "tfds", "torch") or not _HUB_NAME.fullmatch(name):  # a path
        return None, False
    return name, kind in _HUB_READERS


def _options(args: dict[str, Any], dataset: str | None) -> dict[str, Any]:
    dependent = [name for main, names in _DEPENDENT_OPTIONS.items() if args.get(main) for name in names]
    return {
        "model": args["model"],
        **{f"model option {public(name)}": value for name, value in (args.get("model_kwargs") or {}).items()},
        "dataset": dataset,
        **{name: args.get(name) for name in (*_TRAINING_OPTIONS, *dependent)},
    }


def _summary(path: Path, checkpoint: dict[str, Any]) -> dict[str, int | float]:
    """Metrics in the row of summary.csv that was written with this checkpoint; none if there is no such row."""
    measured = f"eval_{getattr(checkpoint['args'], 'eval_metric', None)}"
    try:
        with open(path.parent / "summary.csv", newline="") as file:
            rows = [
                row
                for row in csv.DictReader(file)
                if row["epoch"] == str(checkpoint["epoch"]) and float(row[measured]) == float(checkpoint["metric"])
            ]
            found = {name: float(rows[-1][f"eval_{name}"]) for name in METRICS if rows[-1].get(f"eval_{name}")}
    except (OSError, csv.Error, KeyError, TypeError, ValueError, IndexError):  # absent, of another run, or damaged
        return {}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def public(value: Any) -> str:
    """A value on one line of Markdown; of what looks like a path only its last part."""
    if isinstance(value, dict):
        return ", ".join(f"{public(name)}={public(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(public(part) for part in value)
    text = str(value)
    if not text.startswith("hf-hub:"):
        text = re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    return re.sub(r"[`|\s]+", " ", text)
