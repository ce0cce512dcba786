"""The README.md of a repository on the Hub: what the model is, how it was trained, how it is loaded."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import validate_repo_id
from torch import nn

from ..convert.blocks import moe_layers
from ..info import activated_parameters, is_registered_here, parameters
from ..model_config import get_pretrained_cfg, model_input_size
from ..models.publications import PUBLICATIONS, Publication
from .export import Export
from .history import METRICS, Experts, History, public

#: The first of these that a registered name begins with tells its papers.
_FAMILIES = {
    "vmoe_pbe": ["pBE", "V-MoE"],
    "vmoe": ["V-MoE"],
    "vimoe": ["ViMoE"],
    "widenet": ["WideNet"],
    "ones": ["OneS", "WideNet"],
}


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


@dataclass(frozen=True)
class Card(ABC):
    """A model card; what differs between libraries stands in the classes below.

    Attributes:
        repo_id: ``user/name``.
        history: where the weights came from.
        statements: what the publisher states.
        revision: to load, if not main.
    """

    repo_id: str
    history: History
    statements: Statements
    revision: str | None = None

    def __str__(self) -> str:
        title = self.repo_id.split("/")[-1]
        sections = [self._model(), self._use(), self._training(), self._results(), self._license(), self._citation()]
        body = "\n\n".join([f"# {title}", *filter(None, sections)])
        return f"---\n{self._metadata().to_yaml()}\n---\n\n{body}\n"

    @property
    @abstractmethod
    def _library(self) -> str:
        """The Hub's name of what loads the model."""

    @property
    @abstractmethod
    def _tags(self) -> list[str]:
        """Beside those of this package."""

    @property
    @abstractmethod
    def _task(self) -> str | None:
        """What the Hub may offer the model for, if it is known."""

    @property
    @abstractmethod
    def _architecture(self) -> str:
        """The library's name of it."""

    @property
    @abstractmethod
    def _kind(self) -> str:
        """One sentence on what the model is."""

    @property
    @abstractmethod
    def _sizes(self) -> dict[str, int]:
        """Numbers of parameters."""

    @abstractmethod
    def _use(self) -> str:
        """How it is loaded."""

    @property
    def _has_experts(self) -> bool:
        return False

    @property
    def _experts(self) -> Experts | None:
        """Those that it has, or was made of."""
        return self.history.experts

    @property
    def _method(self) -> str | None:
        """How one network was made of the experts; None if they are still there, or never were."""
        return None if self._has_experts else self.history.method

    @property
    def _is_another_function(self) -> bool:
        """Whether the published model's outputs are not those of the expert model that was evaluated."""
        if self._experts is None or self._method is None:
            return False
        return not (self._experts.mean and self._method == "average")

    @property
    def _metrics(self) -> Mapping[str, float]:
        """Of the model that is published."""
        found = {} if self._is_another_function else self.history.metrics
        return self.statements.metrics or found

    @property
    @abstractmethod
    def _license_tag(self) -> str | None:
        """That of config.json: stated, or that of the pretrained weights that training began from."""

    @property
    def _dataset(self) -> str | None:
        """Stated, or the name that train.py was given for what is no folder of images."""
        return self.statements.dataset or self.history.dataset

    @property
    def _measured_on(self) -> str | None:
        """The images of the results, as far as it is known."""
        if self.statements.metrics:
            return self.statements.dataset
        return self._dataset or "validation images of the training run"

    @property
    def _dataset_id(self) -> str | None:
        """The same, if it is a name on the Hub."""
        if not self.statements.dataset and not self.history.dataset_on_hub:
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
                metric_type=METRICS.get(name, (name, name))[1],
                metric_name=METRICS.get(name, (name, name))[0],
                metric_value=value,
            )
            for name, value in self._metrics.items()
        ]
        return ModelCardData(
            tags=[*self._tags, "timm_moe", *(["mixture-of-experts"] if self._has_experts else [])],
            pipeline_tag=self._task,
            library_name=self._library,
            license=self._license_tag,
            base_model=self.history.base,
            datasets=[self._dataset_id] if self._dataset_id else None,
            model_name=self.repo_id.split("/")[-1],
            eval_results=results or None,
        )

    def _model(self) -> str:
        lines = [
            self._kind,
            *(["", _of_experts(self._experts, self._method)] if self._experts is not None else []),
        ]
        if self._is_another_function:
            lines.append(
                "In training the experts themselves were evaluated: this dense model is another function than theirs."
            )
        rows = self._sizes
        if not self._has_experts and self._experts is not None:
            rows["in training, with experts"] = self._experts.parameters
        return "\n".join([*lines, "", _table(("", "parameters"), {name: f"{n:,}" for name, n in rows.items()})])

    def _training(self) -> str:
        history = self.history
        if history.file is None:
            return ""
        weights = " (its EMA weights)" if history.ema else ""
        lines = ["## Training", "", f"From `{public(history.file)}`{weights}"]
        if not history.options:
            return "\n".join(lines) + "."
        epoch = "" if history.epoch is None else f" after epoch {history.epoch} (from 0)"
        lines[-1] += f", which timm's train.py wrote{epoch}"
        start = history.base or history.start
        lines[-1] += f"; it began from the weights of `{public(start)}`." if start else "."
        options = {**history.options, **({"dataset": self._dataset} if self._dataset else {})}
        shown = {public(name): f"`{public(value)}`" for name, value in options.items()}
        return "\n".join([*lines, "", _table(("option", "value"), shown)])

    def _results(self) -> str:
        if not self._metrics:
            if not self.history.metrics:
                return ""
            return (
                "## Results\n\nNone: what was measured in training belongs to the expert model, not to this dense one."
            )
        where = "Stated by the publisher" if self.statements.metrics else "Measured by train.py after that epoch"
        on = f" on {self._measured_on}" if self._measured_on else ""
        rows = {METRICS.get(name, (name,))[0]: f"{value:.6g}" for name, value in self._metrics.items()}
        return f"## Results\n\n{where}{on}.\n\n{_table(('metric', 'value'), rows)}"

    def _license(self) -> str:
        if self._license_tag:
            of = ", that of the pretrained weights." if self.history.base else ", as its config.json states."
            return f"## Licence\n\n{public(self._license_tag)}{'' if self.statements.license else of}"
        return "## Licence\n\nNot stated: ask the publisher before you use the weights."

    def _citation(self) -> str:
        papers = _papers(self._experts, self._method) if self._experts else _family_papers(self._architecture)
        if not papers:
            return ""
        entries = [_bibtex(PUBLICATIONS[name]) for name in papers]
        return "\n".join(["## Citation", "", "```bibtex", *entries, "```"])


@dataclass(frozen=True, kw_only=True)
class TimmCard(Card):
    """The card of a model of timm's, or of this package's.

    Attributes:
        published: the model, loaded from what is uploaded.
    """

    published: nn.Module

    @property
    def _library(self) -> str:
        return "timm"

    @property
    def _tags(self) -> list[str]:
        return ["image-classification", "timm"]

    @property
    def _task(self) -> str:
        return "image-classification" if self.published.num_classes else "image-feature-extraction"

    @property
    def _architecture(self) -> str:
        return get_pretrained_cfg(self.published)["architecture"]

    @property
    def _kind(self) -> str:
        size = "x".join(str(length) for length in model_input_size(self.published)[1:])
        return f"A `{self._architecture}` for images of {size} pixels and {self.published.num_classes} classes."

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {"this model": parameters(self.published)}
        if self._has_experts:
            sizes["that a token passes through"] = activated_parameters(self.published)
        return sizes

    @property
    def _has_experts(self) -> bool:
        return bool(moe_layers(self.published))

    @property
    def _experts(self) -> Experts | None:
        return Experts.of(self.published) if self._has_experts else self.history.experts

    @property
    def _license_tag(self) -> str | None:
        return get_pretrained_cfg(self.published).get("license")

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


@dataclass(frozen=True, kw_only=True)
class ForeignCard(Card):
    """The card of a dense model that timm did not make.

    Attributes:
        export: what :func:`timm_moe.export_dense` said of it.
        config: its config.json.
    """

    export: Export
    config: dict[str, Any]

    @property
    def _library(self) -> str:
        return self.export.library

    @property
    def _architecture(self) -> str:
        return self.export.architecture

    @property
    def _sizes(self) -> dict[str, int]:
        return {"this model": self.export.parameters}

    @property
    def _license_tag(self) -> str | None:
        return self.config.get("license")


class TransformersCard(ForeignCard):
    """The card of a model that ``from_pretrained`` of its class in Hugging Face transformers loads."""

    @property
    def _classifies(self) -> bool:
        return self._architecture.endswith("ForImageClassification")

    @property
    def _tags(self) -> list[str]:
        return ["image-classification"] if self._classifies else []

    @property
    def _task(self) -> str | None:
        return "image-classification" if self._classifies else None

    @property
    def _kind(self) -> str:
        size = self.config.get("image_size")
        sides = size if isinstance(size, list) else [size, size]
        told = [f"images of {'x'.join(map(str, sides))} pixels"] if size else []
        if self._classifies:
            told.append(f"{len(self.config.get('id2label', 'ab'))} classes")  # two are transformers' default
        purpose = f" for {' and '.join(told)}" if told else ""
        return f"A `{self._architecture}` of Hugging Face transformers{purpose}."

    def _use(self) -> str:
        module, _, name = self._architecture.rpartition(".")
        needed = f"Loading it needs the module `{module}`:" if module else "Plain transformers loads it:"
        revision = f', revision="{self.revision}"' if self.revision else ""
        code = [
            f"from {module or 'transformers'} import {name}",
            "",
            f'model = {name}.from_pretrained("{self.repo_id}"{revision}).eval()',
        ]
        images = "An image processor is no part of it: prepare the images as for its training."
        return "\n".join(["## Use", "", needed, "", "```python", *code, "```", "", images])


class StateDictCard(ForeignCard):
    """The card of the state dict of any other module."""

    @property
    def _tags(self) -> list[str]:
        return [] if self.config["library"] == self._library else [self.config["library"]]

    @property
    def _task(self) -> None:
        return None

    @property
    def _kind(self) -> str:
        return f"The state dict of a `{self._architecture}`."

    def _use(self) -> str:
        revision = f', revision="{self.revision}"' if self.revision else ""
        code = [
            "from huggingface_hub import hf_hub_download",
            "from safetensors.torch import load_file",
            "",
            f'file = hf_hub_download("{self.repo_id}", "model.safetensors"{revision})',
            "model.load_state_dict(load_file(file))",
        ]
        needed = f"Make a `{self._architecture}` with the arguments of its training, `model`, and load the weights:"
        return "\n".join(["## Use", "", needed, "", "```python", *code, "```"])


def _of_experts(experts: Experts, method: str | None) -> str:
    """One sentence on them."""
    where = f"in each of {experts.layers} layers" if experts.layers > 1 else "in one layer"
    held = f"{experts.experts} experts {where}" + (" and a shared one" if experts.shared else "")
    if method is None:
        return f"It has {held}."
    name = public(experts.model)
    if experts.fused:
        fused = "which learned weights fuse into one network (ExFusion, arXiv 2603.27965)"
        return f"It was trained as `{name}` with {held}, {fused}; this is that network."
    return f"It was trained as `{name}` with {held}, of which one network was made (`{public(method)}`)."


def _papers(experts: Experts, method: str | None) -> list[str]:
    """The papers of a model's kind, of its averaging and of how it was made dense; of fused ones the text names it."""
    if experts.fused and not experts.averaged:
        return _family_papers(experts.model)
    found = _family_papers(experts.model)
    averaged = ["EWA"] if experts.averaged else []
    gathered = ["OneS"] if method not in (None, "average") else []
    return list(dict.fromkeys([*found, *averaged, *gathered])) or ["V-MoE"]


def _family_papers(name: str) -> list[str]:
    return next((papers for prefix, papers in _FAMILIES.items() if name.startswith(prefix)), [])


def _bibtex(paper: Publication) -> str:
    key = f"{paper.author.split(',')[0].lower()}{paper.year}"
    fields = {
        "title": paper.title,
        "author": f"{paper.author} and others",
        "journal": f"arXiv:{paper.arxiv}",
        "year": paper.year,
    }
    return "\n".join([f"@article{{{key},", *(f"  {name}={{{value}}}," for name, value in fields.items()), "}"])


def _table(head: tuple[str, str], rows: dict[str, str]) -> str:
    lines = [head, ("---", "---"), *rows.items()]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)
