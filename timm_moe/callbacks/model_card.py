"""The README.md of a repository on the Hub: what the model is, how it was trained, how it is loaded."""

import csv
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import validate_repo_id
from torch import nn

from ..convert import moe_layers
from ..info import activated_parameters, is_registered_here, parameters
from ..layers import EwaMlp, SharedExpertMlp
from ..model_config import get_pretrained_cfg, model_input_size
from .source import read_checkpoint

#: Of each paper: arXiv number, first author, title, year.
_PAPERS = {
    "EWA": (
        *("2308.06093", "Huang, Yongqi"),
        *("Experts Weights Averaging: A New General Training Scheme for Vision Transformers", 2023),
    ),
    "V-MoE": ("2106.05974", "Riquelme, Carlos", "Scaling Vision with Sparse Mixture of Experts", 2021),
    "ViMoE": (
        *("2410.15732", "Han, Xumeng"),
        *("ViMoE: An Empirical Study of Designing Vision Mixture-of-Experts", 2024),
    ),
    "WideNet": ("2107.11817", "Xue, Fuzhao", "Go Wider Instead of Deeper", 2021),
    "OneS": ("2201.10890", "Xue, Fuzhao", "One Student Knows All Experts Know: From Sparse to Dense", 2022),
    "pBE": ("2110.03360", "Allingham, James Urquhart", "Sparse MoEs meet Efficient Ensembles", 2021),
}
#: The first of these that a registered name begins with tells its papers.
_FAMILIES = {
    "vmoe_pbe": ["pBE", "V-MoE"],
    "vmoe": ["V-MoE"],
    "vimoe": ["ViMoE"],
    "widenet": ["WideNet"],
    "ones": ["OneS", "WideNet"],
}
#: Options of train.py that a card names where they are set. None of them is a path.
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
_METRICS = {
    "top1": ("top-1 accuracy (%)", "accuracy"),
    "top5": ("top-5 accuracy (%)", "top_5_accuracy"),
    "loss": ("loss", "loss"),
}


@dataclass(frozen=True)
class Origin:
    """Where the weights came from, as far as it is known.

    Attributes:
        file: name of the checkpoint, without its folder, or ``hf-hub:`` name; None for a model in memory.
        args: train.py's arguments.
        epoch: number of the last epoch, from 0.
        ema: these are the EMA weights.
        metrics: what train.py measured on these weights, from its ``summary.csv``.
    """

    file: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    epoch: int | None = None
    ema: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Statements:
    """What the publisher states: nothing of it is guessed.

    Attributes:
        license: as the Hub abbreviates it, ``"apache-2.0"``.
        dataset: name on the Hub, or any other name, of the images it was trained on.
        metrics: results of the model that is published, by name.

    Raises:
        ValueError: if a metric is no finite number, or a license no abbreviation.
    """

    license: str | None = None
    dataset: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.metrics.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"The metric {name} must be a finite number, got {value!r}.")
        if self.license is not None and not re.fullmatch(r"[a-z0-9.+-]+", self.license):
            raise ValueError(f"license must be an abbreviation as the Hub has it, as apache-2.0: got {self.license!r}.")


def find_origin(source: nn.Module | str | Path, use_ema: bool = False) -> Origin:
    """What a source tells about its training: all there is if it is a checkpoint of train.py."""
    if isinstance(source, nn.Module):
        return Origin()
    if str(source).startswith("hf-hub:"):
        return Origin(str(source))
    path = Path(str(source).removeprefix("local-dir:"))
    if not path.is_file() or path.suffix == ".safetensors":  # which holds nothing but weights
        return Origin(path.name)
    checkpoint = read_checkpoint(path)
    if not hasattr(checkpoint.get("args"), "model"):
        return Origin(path.name, ema=use_ema)
    args = vars(checkpoint["args"])
    measured_ema = bool(args.get("model_ema")) and not args.get("model_ema_force_cpu")
    metrics = _summary(path, checkpoint) if measured_ema == use_ema else {}
    return Origin(path.name, args, checkpoint.get("epoch"), use_ema, metrics)


def _summary(path: Path, checkpoint: dict[str, Any]) -> dict[str, float]:
    """Metrics in the row of summary.csv that was written with this checkpoint; none if there is no such row."""
    measured = f"eval_{getattr(checkpoint['args'], 'eval_metric', None)}"
    try:
        with open(path.parent / "summary.csv", newline="") as file:
            rows = [
                row
                for row in csv.DictReader(file)
                if row["epoch"] == str(checkpoint["epoch"]) and float(row[measured]) == float(checkpoint["metric"])
            ]
            return {name: float(rows[-1][f"eval_{name}"]) for name in _METRICS if rows[-1].get(f"eval_{name}")}
    except (OSError, csv.Error, KeyError, TypeError, ValueError, IndexError):  # absent, of another run, or damaged
        return {}


@dataclass(frozen=True)
class Card:
    """A model card.

    Attributes:
        repo_id: ``user/name``.
        published: the model that is published, or one with the same config and parameters.
        expert: the expert model that it is or came from, if known.
        method: how the experts became one network; None if they are still there.
        origin: where the weights came from.
        statements: what the publisher states.
        revision: to load, if not main.
    """

    repo_id: str
    published: nn.Module
    expert: nn.Module | None
    method: str | None
    origin: Origin
    statements: Statements
    revision: str | None = None

    def __str__(self) -> str:
        title = self.repo_id.split("/")[-1]
        sections = [self._model(), self._use(), self._training(), self._results(), self._license(), self._citation()]
        body = "\n\n".join([f"# {title}", *filter(None, sections)])
        return f"---\n{self._metadata().to_yaml()}\n---\n\n{body}\n"

    @property
    def _architecture(self) -> str:
        return get_pretrained_cfg(self.published)["architecture"]

    @property
    def _is_another_function(self) -> bool:
        """Whether the published model's outputs are not those of the expert model that was evaluated."""
        if self.expert is None or self.method is None:
            return False
        layers = moe_layers(self.expert).values()
        averaged = all(isinstance(layer, EwaMlp) and layer.eval_mode == "average" for layer in layers)
        return not (averaged and self.method == "average")

    @property
    def _metrics(self) -> dict[str, float]:
        """Of the model that is published."""
        found = {} if self._is_another_function else self.origin.metrics
        return self.statements.metrics or found

    @property
    def _license_tag(self) -> str | None:
        """Stated, or that of the pretrained weights that training began from."""
        base = get_pretrained_cfg(self.expert).get("license") if self.expert is not None and self._base else None
        return self.statements.license or base

    @property
    def _base(self) -> str | None:
        """Name on the Hub of the pretrained weights that training began from."""
        args = self.origin.args
        replaced = args.get("pretrained_path") or args.get("initial_checkpoint")
        if self.expert is None or not args.get("pretrained") or replaced:
            return None
        return get_pretrained_cfg(self.expert).get("hf_hub_id")

    @property
    def _start(self) -> str | None:
        """What training began from: pretrained weights of the Hub, a file, or the folder of a gathered student."""
        args = self.origin.args
        name = str(args.get("model"))
        folder = name if name.startswith(("local-dir:", "hf-hub:")) else None
        return self._base or args.get("initial_checkpoint") or args.get("pretrained_path") or folder

    @property
    def _dataset(self) -> str | None:
        """Stated, or the name that train.py was given for what is no folder of images."""
        kind, _, name = " ".join(str(self.origin.args.get("dataset") or "").split()).partition("/")
        named = kind in (*_HUB_READERS, "tfds", "torch") and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)  # not a path
        return self.statements.dataset or (name if named else None)

    @property
    def _measured_on(self) -> str | None:
        """The images of the results, as far as it is known."""
        if self.statements.metrics:
            return self.statements.dataset
        return self._dataset or "validation images of the training run"

    @property
    def _dataset_id(self) -> str | None:
        """The same, if it is a name on the Hub."""
        reader = str(self.origin.args.get("dataset")).partition("/")[0]
        if not self.statements.dataset and reader not in _HUB_READERS:
            return None
        try:
            validate_repo_id(self._dataset)
        except ValueError:
            return None
        return self._dataset

    def _metadata(self) -> ModelCardData:
        results = [
            EvalResult(
                task_type="image-classification",
                dataset_type=self._dataset_id or "imagefolder",
                dataset_name=self._measured_on or "not stated",
                metric_type=_METRICS.get(name, (name, name))[1],
                metric_name=_METRICS.get(name, (name, name))[0],
                metric_value=value,
            )
            for name, value in self._metrics.items()
        ]
        has_experts = bool(moe_layers(self.published))
        return ModelCardData(
            tags=["image-classification", "timm", "timm_moe", *(["mixture-of-experts"] if has_experts else [])],
            pipeline_tag="image-classification" if self.published.num_classes else "image-feature-extraction",
            library_name="timm",
            license=self._license_tag,
            base_model=self._base,
            datasets=[self._dataset_id] if self._dataset_id else None,
            model_name=self.repo_id.split("/")[-1],
            eval_results=results or None,
        )

    def _model(self) -> str:
        size = "x".join(str(length) for length in model_input_size(self.published)[1:])
        lines = [
            f"A `{self._architecture}` for images of {size} pixels and {self.published.num_classes} classes.",
            *(["", _experts(self.expert, self.method)] if self.expert is not None else []),
        ]
        if self._is_another_function:
            lines.append(
                "In training the experts themselves were evaluated: this dense model is another function than theirs."
            )
        rows = {"this model": parameters(self.published)}
        if self.expert is not None and self.method is not None:
            rows["in training, with experts"] = parameters(self.expert)
        elif self.expert is not None:
            rows["that a token passes through"] = activated_parameters(self.expert)
        return "\n".join([*lines, "", _table(("", "parameters"), {name: f"{n:,}" for name, n in rows.items()})])

    def _use(self) -> str:
        name = self.repo_id + (f"@{self.revision}" if self.revision else "")
        needed = "Plain timm loads it:"
        if is_registered_here(self._architecture):
            needed = "Loading it needs the package timm_moe beside timm. Once installed, timm finds it by itself."
        code = [
            "import timm",
            "",
            f'model = timm.create_model("hf-hub:{name}", pretrained=True).eval()',
            "config = timm.data.resolve_model_data_config(model)",
            "transform = timm.data.create_transform(**config, is_training=False)",
        ]
        return "\n".join(["## Use", "", needed, "", "```python", *code, "```"])

    def _training(self) -> str:
        origin, args = self.origin, self.origin.args
        if origin.file is None:
            return ""
        weights = " (its EMA weights)" if origin.ema else ""
        lines = ["## Training", "", f"From `{_public(origin.file)}`{weights}"]
        if not args:
            return "\n".join(lines) + "."
        epoch = f" after epoch {origin.epoch} (from 0)" if isinstance(origin.epoch, int) else ""
        lines[-1] += f", which timm's train.py wrote{epoch}"
        lines[-1] += f"; it began from the weights of `{_public(self._start)}`." if self._start else "."
        shown = {name: f"`{_public(value)}`" for name, value in self._options().items() if value not in _UNSET}
        return "\n".join([*lines, "", _table(("option", "value"), shown)])

    def _options(self) -> dict[str, Any]:
        args = self.origin.args
        dependent = [name for main, names in _DEPENDENT_OPTIONS.items() if args.get(main) for name in names]
        return {
            "model": args["model"],
            **{f"model option {_public(name)}": value for name, value in (args.get("model_kwargs") or {}).items()},
            "dataset": self._dataset,
            **{name: args.get(name) for name in (*_TRAINING_OPTIONS, *dependent)},
        }

    def _results(self) -> str:
        if not self._metrics:
            if not self.origin.metrics:
                return ""
            return (
                "## Results\n\nNone: what was measured in training belongs to the expert model, not to this dense one."
            )
        where = "Stated by the publisher" if self.statements.metrics else "Measured by train.py after that epoch"
        on = f" on {self._measured_on}" if self._measured_on else ""
        rows = {_METRICS.get(name, (name,))[0]: f"{value:.6g}" for name, value in self._metrics.items()}
        return f"## Results\n\n{where}{on}.\n\n{_table(('metric', 'value'), rows)}"

    def _license(self) -> str:
        if self.statements.license:
            return f"## Licence\n\n{self.statements.license}"
        if self._license_tag:
            return f"## Licence\n\n{self._license_tag}, that of the pretrained weights."
        return "## Licence\n\nNot stated: ask the publisher before you use the weights."

    def _citation(self) -> str:
        papers = _papers(self.expert, self.method) if self.expert is not None else _family_papers(self._architecture)
        if not papers:
            return ""
        entries = [_bibtex(*_PAPERS[name]) for name in papers]
        return "\n".join(["## Citation", "", "```bibtex", *entries, "```"])


def _experts(expert: nn.Module, method: str | None) -> str:
    """One sentence on the experts."""
    layers = list(moe_layers(expert).values())
    name = get_pretrained_cfg(expert).get("architecture", type(expert).__name__)
    where = f"in each of {len(layers)} layers" if len(layers) > 1 else "in one layer"
    held = f"{layers[0].num_experts} experts {where}"
    if any(isinstance(layer, SharedExpertMlp) for layer in layers):
        held += " and a shared one"
    if method is None:
        return f"It has {held}."
    return f"It was trained as `{name}` with {held}, of which one network was made (`{method}`)."


def _papers(expert: nn.Module, method: str | None) -> list[str]:
    """The papers of a model's kind, of its averaging and of how it was made dense."""
    found = _family_papers(get_pretrained_cfg(expert).get("architecture", ""))
    layers = moe_layers(expert).values()
    averaged = ["EWA"] if any(isinstance(layer, EwaMlp) or layer.share_rate for layer in layers) else []
    gathered = ["OneS"] if method not in (None, "average") else []
    return list(dict.fromkeys([*found, *averaged, *gathered])) or ["V-MoE"]


def _family_papers(name: str) -> list[str]:
    return next((papers for prefix, papers in _FAMILIES.items() if name.startswith(prefix)), [])


def _bibtex(arxiv: str, author: str, title: str, year: int) -> str:
    key = f"{author.split(',')[0].lower()}{year}"
    fields = {"title": title, "author": f"{author} and others", "journal": f"arXiv:{arxiv}", "year": year}
    return "\n".join([f"@article{{{key},", *(f"  {name}={{{value}}}," for name, value in fields.items()), "}"])


def _table(head: tuple[str, str], rows: dict[str, str]) -> str:
    lines = [head, ("---", "---"), *rows.items()]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)


def _public(value: Any) -> str:
    """A value on one line of Markdown; of what looks like a path only its last part."""
    if isinstance(value, dict):
        return ", ".join(f"{_public(name)}={_public(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_public(part) for part in value)
    text = str(value)
    if not text.startswith("hf-hub:"):
        text = re.split(r"[/\\]", text.rstrip("/\\"))[-1]
    return re.sub(r"[`|\s]+", " ", text)
