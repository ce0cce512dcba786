"""The README.md of a repository on the Hub: the model, its training, and the code that loads it."""

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData
from torch import nn

from ..console import in_layers
from ..convert.expert_layers import activated_parameters, moe_layers, parameters
from ..model_config import get_pretrained_cfg, model_input_size
from ..models.publications import PUBLICATIONS, papers_of
from ..models.registered import is_registered_here, registrar
from .export import Written
from .formats import architecture_of
from .history import HUB_NAME, METRICS, ExpertsRecord, History, public
from .options import PushOptions, is_abbreviation


@dataclass(frozen=True)
class Facts:
    """Everything in a card that depends on the library which loads the model."""

    library: str
    architecture: str
    kind: str  # a sentence that describes the model
    use: str  # Markdown that shows how it is loaded
    sizes: dict[str, int]  # numbers of parameters, by what has them
    tags: list[str]
    task: str | None
    license: str | None
    experts: ExpertsRecord | None = None  # of a model that still has them
    has_own_router: bool = False  # whether they are chosen by a router that is not of this package


def timm_facts(model: nn.Module, options: PushOptions) -> Facts:
    """Describe a model of timm or of this package, loaded from the files that are uploaded."""
    cfg = get_pretrained_cfg(model)
    architecture = cfg["architecture"]
    channels, *sides = model_input_size(model)
    size = "x".join(map(str, sides))
    with_channels = "" if channels == 3 else f" with {channels} channel{'s' * (channels > 1)}"
    sizes = {"this model": parameters(model)}
    if moe_layers(model):
        sizes["that a token passes through"] = activated_parameters(model)
    task = "image-classification" if model.num_classes else "image-feature-extraction"
    needed = "Plain timm loads it:"
    # Modules whose import registers what the model needs.
    modules = routers = _modules_of_own_routers(model)
    if routers:
        needed = (
            "Loading it needs the package timm_moe beside timm, and "
            f"{_what_registers(routers, 'its router')}:"
        )
    elif is_registered_here(architecture):
        needed = (
            "Loading it needs the package timm_moe beside timm. Once installed, timm finds it by "
            "itself."
        )
    elif module := registrar(architecture):
        modules = [module]
        needed = f"Loading it needs {_what_registers(modules, 'it with timm')}:"
    return Facts(
        library="timm",
        architecture=architecture,
        kind=(
            f"A `{architecture}` for images of {size} pixels{with_channels} and "
            f"{model.num_classes} classes."
        ),
        use=_filled(
            "use_timm.md",
            needed=needed,
            imports="\n".join(
                # A program's own module cannot be imported.
                f"import {module}"
                for module in ("timm", *modules)
                if module != "__main__"
            ),
            name=options.model_name,
        ),
        sizes=sizes,
        tags=[task, "timm"],
        task=task,
        license=cfg.get("license"),
        experts=ExpertsRecord.of(model),
        has_own_router=bool(routers),
    )


def _what_registers(modules: list[str], what: str) -> str:
    """Say which modules register a thing as they are imported; a program cannot be imported."""
    if "__main__" in modules:
        return f"the program that registers {what}"
    return f"the module `{', '.join(modules)}`, whose import registers {what}"


def _modules_of_own_routers(model: nn.Module) -> list[str]:
    """List the modules of a model's routers that are not of this package."""
    modules = {type(layer.router).__module__ for layer in moe_layers(model).values()}
    own_package = __name__.partition(".")[0]
    return sorted(module for module in modules if module.partition(".")[0] != own_package)


def foreign_facts(written: Written, made: Path, options: PushOptions) -> Facts:
    """Describe a dense model that timm did not make, from its export to a folder."""
    architecture = architecture_of(written.model)
    library = written.layout.library
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    revision = f', revision="{options.revision}"' if options.revision else ""
    place = {"repo_id": options.repo_id, "revision": revision}
    classifies = library == "transformers" and architecture.endswith("ForImageClassification")
    if library == "transformers":
        module, _, name = architecture.rpartition(".")
        needed = (
            f"Loading it needs the module `{module}`:" if module else "Plain transformers loads it:"
        )
        kind = f"A `{architecture}` of Hugging Face transformers{_purpose(config, classifies)}."
        use = _filled(
            "use_transformers.md",
            needed=needed,
            module=module or "transformers",
            name=name,
            **place,
        )
        tags = ["image-classification"] if classifies else []
    else:
        kind = f"The state dict of a `{architecture}`."
        use = _filled("use_state_dict.md", architecture=architecture, **place)
        tags = [] if config["library"] == library else [config["library"]]
    return Facts(
        library=library,
        architecture=architecture,
        kind=kind,
        use=use,
        sizes={"this model": parameters(written.model)},
        tags=tags,
        task="image-classification" if classifies else None,
        license=config.get("license"),
    )


def _purpose(config: dict[str, Any], classifies: bool) -> str:
    size = config.get("image_size")
    sides = size if isinstance(size, list) else [size, size]
    known = [f"images of {'x'.join(map(str, sides))} pixels"] if size else []
    if classifies:
        # transformers omits id2label where it is the default, which has two classes.
        classes = len(config["id2label"]) if "id2label" in config else 2
        known.append(f"{classes} classes")
    return f" for {' and '.join(known)}" if known else ""


def card(facts: Facts, history: History, options: PushOptions) -> str:
    """Return the text of a model card; what the publisher states replaces the history's."""
    experts = facts.experts or history.experts
    # The method by which one network was made of the experts.
    method = None if facts.experts else history.method
    is_what_was_measured = bool(facts.experts) or history.is_what_was_measured
    metrics = options.metrics or (history.metrics if is_what_was_measured else {})
    measured = _measured_images(history, options)
    text = _filled(
        "card.md",
        metadata=_metadata(facts, history, options, metrics, measured).to_yaml(),
        title=_title(options),
        model=_model(facts, experts, method, is_what_was_measured),
        use=facts.use + _image_mode(history.image_mode),
        training=_training(history, options.dataset),
        results=_results(history, metrics, measured, stated=bool(options.metrics)),
        license=_license(facts, history, stated=bool(options.license)),
        citation=_citation(facts, experts, method),
    )
    return re.sub(r"## \w+\n\n\n+", "", f"{text}\n\n").rstrip() + "\n"  # without empty sections


class _Images(NamedTuple):
    """Images on which a model was measured."""

    name: str | None  # of their data set; None if nobody stated it
    split: str | None = None  # as train.py was told, of the data set or of its folder
    labels: str | None = None  # name of the data set's column, if train.py was told one


def _measured_images(history: History, options: PushOptions) -> _Images:
    if options.metrics:
        return _Images(options.dataset)
    if options.dataset and history.dataset and options.dataset != history.dataset:
        return _Images(options.dataset)
    split, labels = (history.options.get(name) for name in ("val_split", "target_key"))
    dataset = options.dataset or history.dataset
    if dataset:
        return _Images(dataset, split or "validation", labels)
    return _Images(f"{'' if split else 'validation '}images of the training run", split, labels)


def _image_mode(mode: str | None) -> str:
    """Say how images become those of the training, which config.json cannot state."""
    if mode in (None, "RGB", "L"):
        return ""
    return f"\n\nIts images have the mode `{public(mode)}` of Pillow (`image.convert`)."


def _title(options: PushOptions) -> str:
    return options.repo_id.split("/")[-1]


def _metadata(
    facts: Facts,
    history: History,
    options: PushOptions,
    metrics: dict[str, float],
    images: _Images,
) -> ModelCardData:
    """Return the head of the card, which the Hub reads."""
    dataset = options.dataset or (history.dataset if history.dataset_on_hub else None)
    on_hub = dataset if HUB_NAME.fullmatch(dataset or "") else None
    results = []
    for name, value in metrics.items():
        metric_name, metric_type = METRICS.get(name, (name, name))
        results.append(
            EvalResult(
                task_type="image-classification",
                dataset_type=on_hub if on_hub and images.name == on_hub else "imagefolder",
                dataset_name=images.name or "not stated",
                dataset_split=images.split if history.dataset else None,
                dataset_args={"labels": images.labels} if images.labels else None,
                metric_type=metric_type,
                metric_name=metric_name,
                metric_value=value,
            )
        )
    return ModelCardData(
        tags=[*facts.tags, "timm_moe", *(["mixture-of-experts"] if facts.experts else [])],
        pipeline_tag=facts.task,
        library_name=facts.library,
        license=facts.license if is_abbreviation(facts.license) else None,
        base_model=history.base,
        datasets=[on_hub] if on_hub else None,
        model_name=_title(options),
        eval_results=results or None,
    )


def _model(
    facts: Facts, experts: ExpertsRecord | None, method: str | None, is_what_was_measured: bool
) -> str:
    lines, sizes = [facts.kind], dict(facts.sizes)
    if experts is not None:
        lines += ["", _of_experts(experts, method)]
        if not facts.experts:
            sizes["in training, with experts"] = experts.parameters
    if not is_what_was_measured:
        lines.append(
            "In training the experts themselves were evaluated: this dense model is another "
            "function than theirs."
        )
    return "\n".join(
        [*lines, "", _table(("", "parameters"), {name: f"{n:,}" for name, n in sizes.items()})]
    )


def _of_experts(experts: ExpertsRecord, method: str | None) -> str:
    shared = " and a shared one" if experts.shared else ""
    held = f"{experts.experts} experts {in_layers(experts.layers)}{shared}"
    if method is None:
        return f"It has {held}."
    name = public(experts.model)
    made = f"of which one network was made (`{public(method)}`)"
    return f"It was trained as `{name}` with {held}, {made}."


def _training(history: History, stated_dataset: str | None) -> str:
    if history.file is None:
        return ""
    text = f"From `{public(history.file)}`{' (its EMA weights)' if history.ema else ''}"
    if not history.options:
        return f"{text}."
    text += ", which timm's train.py wrote"
    if history.epoch is not None:
        # train.py writes a recovery file every few updates.
        when = "in" if history.file.startswith("recovery-") else "after"
        text += f" {when} epoch {history.epoch} (from 0)"
    start = history.base or history.start
    if start:
        # train.py gives the files of all runs the same names.
        another = "another " if public(start) == history.file else ""
        text += f"; it began from the weights of {another}`{public(start)}`"
    if stated_dataset:
        name = stated_dataset if HUB_NAME.fullmatch(stated_dataset) else public(stated_dataset)
        text += f". The publisher states that its images were those of `{name}`"
    shown = {public(name): f"`{public(value)}`" for name, value in history.options.items()}
    return f"{text}.\n\n{_table(('option', 'value'), shown)}"


def _results(history: History, metrics: dict[str, float], images: _Images, stated: bool) -> str:
    if not metrics:
        absent = (
            "None: what was measured in training belongs to the expert model, not to this dense "
            "one."
        )
        return absent if history.metrics else ""
    where = "Stated by the publisher" if stated else "Measured by train.py after that epoch"
    is_best = not stated and (history.file or "").startswith("model_best.")
    on = f" on {images.name}" if images.name else ""
    for word, value in (("split", images.split), ("labels", images.labels)):
        on += f", {word} `{public(value)}`" if value else ""
    rows = {METRICS.get(name, (name,))[0]: f"{value:.6g}" for name, value in metrics.items()}
    chosen = ", by which this epoch was chosen" if is_best else ""
    return f"{where}{on}{chosen}.\n\n{_table(('metric', 'value'), rows)}"


def _license(facts: Facts, history: History, stated: bool) -> str:
    if not facts.license:
        return "Not stated: ask the publisher before you use the weights."
    name, of_base = _license_name(facts.license), history.base_license
    if of_base == facts.license:
        return name if stated else f"{name}, that of the pretrained weights."
    text = name if stated else f"{name}, as its config.json states."
    return f"{text}\n\nThe pretrained weights have {_license_name(of_base)}." if of_base else text


def _license_name(license: str) -> str:
    """Write a licence as text for Markdown."""
    return license if is_abbreviation(license) else f"`{public(license)}`"


def _citation(facts: Facts, experts: ExpertsRecord | None, method: str | None) -> str:
    """Cite the papers of a model's family, its averaging and its method."""
    papers = papers_of(facts.architecture if experts is None else experts.model)
    if experts is not None:
        averaged = ["EWA"] if experts.averaged else []
        gathered = ["OneS"] if method not in (None, "average") else []
        papers = list(dict.fromkeys([*papers, *averaged, *gathered]))
        if not papers and not facts.has_own_router:
            papers = ["V-MoE"]
    entries = [PUBLICATIONS[name].bibtex() for name in papers]
    return "\n".join(["```bibtex", *entries, "```"]) if entries else ""


def _table(head: tuple[str, str], rows: dict[str, str]) -> str:
    lines = [head, ("---", "---"), *rows.items()]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)


def _filled(template: str, **parts: str) -> str:
    """Fill a template of this folder."""
    return (
        files(__package__)
        .joinpath(template)
        .read_text(encoding="utf-8")
        .rstrip("\n")
        .format(**parts)
    )
