"""One page that shows what trained models do: ``timm-moe report``."""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path

from timm.data import ImageDataset
from torch import nn

from ..analysis.data import Inference, Source, class_names, describe_source, load_classifiers
from ..checkpoints.source import ModelSpec
from ..export.history import find_history
from ..files import check_folder, publish, staged
from ..info import measure
from .alike import likeness
from .observe import observe
from .page import page
from .sections import (
    Section,
    alike_section,
    classifier_section,
    model_section,
    origin_of,
    routing_section,
    run_section,
)

__all__ = ["check_report", "write_report"]

_logger = logging.getLogger(__name__)
FILE = "index.html"


def check_report(output_dir: str | Path, overwrite: bool = False) -> None:
    """Raise OSError if the page cannot be written."""
    check_folder(output_dir, (FILE,), overwrite)


def write_report(
    sources: Sequence[Source],
    images: ImageDataset,
    output_dir: str | Path,
    ood_images: ImageDataset | None = None,
    *,
    spec: ModelSpec | None = None,
    use_ema: bool = False,
    inference: Inference | None = None,
) -> Path:
    """Run classifiers on images and write a page about them that needs no network, ``index.html``.

    What it shows of the training run comes from the ``summary.csv`` and ``experts.json`` beside a train.py checkpoint.

    Args:
        sources: of the models, as :func:`timm_moe.checkpoints.source.load_source` takes them.
        images: from :func:`timm_moe.analysis.data.image_folder`.
        output_dir: folder for the page, which is made if need be.
        ood_images: images of other data, which the confidence should tell apart.
        spec: model to create for files that do not name it.
        use_ema: take the EMA weights of train.py's checkpoints.
        inference: how forwards are run.

    Returns:
        The page.

    Raises:
        ValueError: if a model and the images do not fit, an output is NaN, or a file is damaged.
        OSError: if the page cannot be written.
    """
    runs = _runs(sources, images)  # before the long part: a file may be damaged
    models = load_classifiers(sources, images, spec, use_ema, inference)
    names = _distinct([describe_source(source) for source in sources])
    observations, alike = {}, {}
    for name, model in zip(names, models, strict=True):
        _logger.info("%s: running it on %s images ...", name, f"{len(images):,}")
        observations[name] = observe(model, name, images, ood_images, inference)
        alike[name] = likeness(model, images, inference)
    sections: list[Sequence[Section | None]] = [
        [_model_section(source, model, use_ema) for source, model in zip(sources, models, strict=True)],
        runs,
        [routing_section(seen) for seen in observations.values()],
        [alike_section(layers) for layers in alike.values()],
    ]
    text = page(
        f"What the experts do: {_titles(models)}",
        _subtitle(names, images),
        [*(_of_models(names, of_one_kind) for of_one_kind in sections), {"": classifier_section(observations)}],
    )
    return _write(Path(output_dir), text)


def _of_models(names: Sequence[str], sections: Sequence[Section | None]) -> dict[str, Section]:
    """Sections by the names of their models; one model alone needs no name."""
    shown = names if len(names) > 1 else [""]
    return {name: section for name, section in zip(shown, sections, strict=True) if section is not None}


def _titles(models: Sequence[nn.Module]) -> str:
    """Registered names, each once."""
    return ", ".join(dict.fromkeys(origin_of(model) for model in models))


def _runs(sources: Sequence[Source], images: ImageDataset) -> list[Section | None]:
    classes = len(class_names(images))
    return [run_section(_run_folder(source), classes) for source in sources]


def _distinct(names: Sequence[str]) -> list[str]:
    """Short names, all different: the last parts of paths, or more of them where those are alike."""
    for parts in range(1, 9):
        short = ["/".join(Path(name).parts[-parts:]) for name in names]
        if len(set(short)) == len(short):
            return short
    return [f"{number}: {name}" for number, name in enumerate(names, 1)]


def _model_section(source: Source, model: nn.Module, use_ema: bool) -> Section:
    history = find_history(source, model, use_ema)
    name = origin_of(model)
    return model_section(model, measure(copy.deepcopy(model).to("meta"), name), history)


def _run_folder(source: Source) -> Path | None:
    """train.py's folder, if a source is a file in it."""
    if isinstance(source, nn.Module) or str(source).startswith("hf-hub:"):
        return None
    path = Path(str(source).removeprefix("local-dir:"))
    return path.parent if path.is_file() else None


def _subtitle(names: Sequence[str], images: ImageDataset) -> str:
    folder = "/".join(Path(images.reader.root).parts[-2:])
    return f"{', '.join(names)} on {len(images):,} images of {len(class_names(images)):,} classes in {folder}"


def _write(output_dir: Path, text: str) -> Path:
    with staged(output_dir) as temporary:
        folder = temporary / "report"
        folder.mkdir()
        (folder / FILE).write_text(text, encoding="utf-8")
        publish(folder, output_dir, (FILE,))
    return output_dir / FILE
