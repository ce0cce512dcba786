"""The README.md of a repository on the Hub: the model, its training, and the code that loads it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.utils import validate_repo_id
from torch import nn

from ..convert.blocks import moe_layers
from ..info import activated_parameters, is_registered_here, parameters
from ..model_config import get_pretrained_cfg, model_input_size
from ..models.publications import PUBLICATIONS, papers_of
from .export import Export
from .history import METRICS, Experts, History, public
from .options import Destination, Statements

_CARD = """\
---
{metadata}
---

# {title}

{model}

## Use

{use}

## Training

{training}

## Results

{results}

## Licence

{license}

## Citation

{citation}
"""
_TIMM_USE = """\
{needed}

```python
import timm

model = timm.create_model("{name}", pretrained=True).eval()
config = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(**config, is_training=False)
```"""
_TRANSFORMERS_USE = """\
{needed}

```python
from {module} import {name}

model = {name}.from_pretrained("{repo_id}"{revision}).eval()
```

An image processor is no part of it: prepare the images as for its training."""
_STATE_DICT_USE = """\
Make a `{architecture}` with the arguments of its training, `model`, and load the weights:

```python
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file

file = hf_hub_download("{repo_id}", "model.safetensors"{revision})
model.load_state_dict(load_file(file))
```"""


@dataclass(frozen=True)
class Facts:
    """Everything in a card that depends on the library which loads the model.

    Attributes:
        library: by the Hub's name.
        architecture: name of the model in the library.
        kind: one sentence that describes the model.
        use: Markdown that shows how it is loaded.
        sizes: numbers of parameters.
        tags: of the Hub, besides those of this package.
        task: of the Hub, if it is known.
        license: the one in config.json.
        experts: of a model that still has them.
    """

    library: str
    architecture: str
    kind: str
    use: str
    sizes: dict[str, int]
    tags: list[str]
    task: str | None
    license: str | None
    experts: Experts | None = None


def timm_facts(model: nn.Module, destination: Destination) -> Facts:
    """Describe a model of timm or of this package, loaded from the files that are uploaded."""
    cfg = get_pretrained_cfg(model)
    architecture = cfg["architecture"]
    size = "x".join(str(length) for length in model_input_size(model)[1:])
    sizes = {"this model": parameters(model)}
    if moe_layers(model):
        sizes["that a token passes through"] = activated_parameters(model)
    needed = "Plain timm loads it:"
    if is_registered_here(architecture):
        needed = "Loading it needs the package timm_moe beside timm. Once installed, timm finds it by itself."
    return Facts(
        library="timm",
        architecture=architecture,
        kind=f"A `{architecture}` for images of {size} pixels and {model.num_classes} classes.",
        use=_TIMM_USE.format(needed=needed, name=destination.model_name),
        sizes=sizes,
        tags=["image-classification", "timm"],
        task="image-classification" if model.num_classes else "image-feature-extraction",
        license=cfg.get("license"),
        experts=Experts.of(model) if moe_layers(model) else None,
    )


def foreign_facts(export: Export, config: dict[str, Any], destination: Destination) -> Facts:
    """Describe a dense model that timm did not make.

    Args:
        export: of the model, by :func:`timm_moe.export_dense`.
        config: its config.json.
        destination: repository for the code that loads it.
    """
    architecture = export.architecture
    module, _, name = architecture.rpartition(".")
    place = {
        "repo_id": destination.repo_id,
        "revision": f', revision="{destination.revision}"' if destination.revision else "",
    }
    classifies = export.library == "transformers" and architecture.endswith("ForImageClassification")
    if export.library == "transformers":
        needed = f"Loading it needs the module `{module}`:" if module else "Plain transformers loads it:"
        kind = f"A `{architecture}` of Hugging Face transformers{_purpose(config, classifies)}."
        use = _TRANSFORMERS_USE.format(needed=needed, module=module or "transformers", name=name, **place)
        tags = ["image-classification"] if classifies else []
    else:
        kind = f"The state dict of a `{architecture}`."
        use = _STATE_DICT_USE.format(architecture=architecture, **place)
        tags = [] if config["library"] == export.library else [config["library"]]
    return Facts(
        library=export.library,
        architecture=architecture,
        kind=kind,
        use=use,
        sizes={"this model": export.parameters},
        tags=tags,
        task="image-classification" if classifies else None,
        license=config.get("license"),
    )


def _purpose(config: dict[str, Any], classifies: bool) -> str:
    size = config.get("image_size")
    sides = size if isinstance(size, list) else [size, size]
    known = [f"images of {'x'.join(map(str, sides))} pixels"] if size else []
    if classifies:
        known.append(f"{len(config.get('id2label', 'ab'))} classes")  # two are transformers' default
    return f" for {' and '.join(known)}" if known else ""


@dataclass(frozen=True)
class Card:
    """A model card; ``str(card)`` is its text.

    Attributes:
        facts: of the model that is published.
        history: where the weights came from.
        statements: of the publisher.
        destination: repository of the model.
    """

    facts: Facts
    history: History
    statements: Statements
    destination: Destination

    def __str__(self) -> str:
        text = _CARD.format(
            metadata=self._metadata().to_yaml(),
            title=self.destination.title,
            model=self._model(),
            use=self.facts.use,
            training=self._training(),
            results=self._results(),
            license=self._license(),
            citation=self._citation(),
        )
        return re.sub(r"## \w+\n\n\n+", "", text).rstrip() + "\n"  # without empty sections

    @property
    def _experts(self) -> Experts | None:
        """Experts of the model, or those that it was made of."""
        return self.facts.experts or self.history.experts

    @property
    def _method(self) -> str | None:
        """How one network was made of the experts; None if the model has experts or never had any."""
        return None if self.facts.experts else self.history.method

    @property
    def _is_another_function(self) -> bool:
        """Whether the outputs differ from those of the expert model that was evaluated in training."""
        if self._experts is None or self._method is None:
            return False
        return not (self._experts.mean and self._method == "average")

    @property
    def _metrics(self) -> Mapping[str, float]:
        """Results of the published model."""
        return self.statements.metrics or ({} if self._is_another_function else self.history.metrics)

    @property
    def _dataset(self) -> str | None:
        return self.statements.dataset or self.history.dataset

    @property
    def _measured_on(self) -> str | None:
        """Images of the results, as far as they are known."""
        if self.statements.metrics:
            return self.statements.dataset
        return self._dataset or "validation images of the training run"

    @property
    def _dataset_id(self) -> str | None:
        """Name of the data set on the Hub, if it is one."""
        if not self.statements.dataset and not self.history.dataset_on_hub:
            return None
        try:
            validate_repo_id(self._dataset)
        except ValueError:
            return None
        return self._dataset

    def _metadata(self) -> ModelCardData:
        facts = self.facts
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
            tags=[*facts.tags, "timm_moe", *(["mixture-of-experts"] if facts.experts else [])],
            pipeline_tag=facts.task,
            library_name=facts.library,
            license=facts.license,
            base_model=self.history.base,
            datasets=[self._dataset_id] if self._dataset_id else None,
            model_name=self.destination.title,
            eval_results=results or None,
        )

    def _model(self) -> str:
        lines = [self.facts.kind]
        if self._experts is not None:
            lines += ["", _of_experts(self._experts, self._method)]
        if self._is_another_function:
            lines.append(
                "In training the experts themselves were evaluated: this dense model is another function than theirs."
            )
        sizes = dict(self.facts.sizes)
        if self._experts is not None and not self.facts.experts:
            sizes["in training, with experts"] = self._experts.parameters
        return "\n".join([*lines, "", _table(("", "parameters"), {name: f"{n:,}" for name, n in sizes.items()})])

    def _training(self) -> str:
        history = self.history
        if history.file is None:
            return ""
        text = f"From `{public(history.file)}`{' (its EMA weights)' if history.ema else ''}"
        if not history.options:
            return f"{text}."
        text += ", which timm's train.py wrote"
        if history.epoch is not None:
            text += f" after epoch {history.epoch} (from 0)"
        start = history.base or history.start
        if start:
            text += f"; it began from the weights of `{public(start)}`"
        options = {**history.options, **({"dataset": self._dataset} if self._dataset else {})}
        shown = {public(name): f"`{public(value)}`" for name, value in options.items()}
        return f"{text}.\n\n{_table(('option', 'value'), shown)}"

    def _results(self) -> str:
        if not self._metrics:
            if not self.history.metrics:
                return ""
            return "None: what was measured in training belongs to the expert model, not to this dense one."
        where = "Stated by the publisher" if self.statements.metrics else "Measured by train.py after that epoch"
        on = f" on {self._measured_on}" if self._measured_on else ""
        rows = {METRICS.get(name, (name,))[0]: f"{value:.6g}" for name, value in self._metrics.items()}
        return f"{where}{on}.\n\n{_table(('metric', 'value'), rows)}"

    def _license(self) -> str:
        if not self.facts.license:
            return "Not stated: ask the publisher before you use the weights."
        license = public(self.facts.license)
        if self.statements.license:
            return license
        return f"{license}, {'that of the pretrained weights' if self.history.base else 'as its config.json states'}."

    def _citation(self) -> str:
        papers = _papers(self._experts, self._method) if self._experts else papers_of(self.facts.architecture)
        entries = [PUBLICATIONS[name].bibtex() for name in papers]
        return "\n".join(["```bibtex", *entries, "```"]) if entries else ""


def _of_experts(experts: Experts, method: str | None) -> str:
    """Describe the experts in one sentence."""
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
    """List the papers of a model's family, its averaging and its method; the text names the paper of fused experts."""
    found = papers_of(experts.model)
    if experts.fused and not experts.averaged:
        return found
    averaged = ["EWA"] if experts.averaged else []
    gathered = ["OneS"] if method not in (None, "average") else []
    return list(dict.fromkeys([*found, *averaged, *gathered])) or ["V-MoE"]


def _table(head: tuple[str, str], rows: dict[str, str]) -> str:
    lines = [head, ("---", "---"), *rows.items()]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)
