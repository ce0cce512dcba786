"""One page that shows the decisions of trained models: ``timm-moe report``."""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from timm.data import ImageDataset
from torch import nn

from ...checkpoints.model_spec import ModelSpec
from ...export.history import history_of
from ...files import check_folder, local_path, written_whole
from ...model_config import get_pretrained_cfg
from ..data import (
    Inference,
    Source,
    class_names,
    describe_source,
    load_classifiers,
    short_names,
)
from ..info import measure
from .observe import observe
from .page import Section, chart_library, page
from .sections.classifier import classifier_section
from .sections.model import model_section
from .sections.routing import routing_section
from .sections.run import read_run, run_of_model, run_section
from .sections.similarity import expert_similarity, similarity_section

__all__ = ["FILE", "write_report"]

_logger = logging.getLogger(__name__)
#: Name of the page.
FILE = "index.html"


def write_report(
    sources: Sequence[Source],
    images: ImageDataset,
    output_dir: str | Path,
    ood_images: ImageDataset | None = None,
    *,
    spec: ModelSpec | None = None,
    use_ema: bool = False,
    inference: Inference | None = None,
    overwrite: bool = False,
) -> Path:
    """Run classifiers on images and write a page about them that needs no network, ``index.html``.

    The section on the training run comes from the ``summary.csv`` and ``experts.json`` beside a
    train.py checkpoint.

    Args:
        sources: of the models, as :func:`timm_moe.checkpoints.source.load_source` takes them.
        images: from :func:`timm_moe.analysis.data.image_folder`.
        output_dir: folder for the page, made if need be.
        ood_images: images of other data, which the confidence should tell apart.
        spec: model to create for files that do not name it.
        use_ema: take the EMA weights of train.py's checkpoints.
        inference: settings of the forwards.
        overwrite: replace a page that is there.

    Returns:
        The page.

    Raises:
        ValueError: if a model and the images do not fit, an output is NaN, or a file is damaged.
        OSError: if the page exists and must not be replaced, or cannot be written.
    """
    check_folder(output_dir, (FILE,), overwrite)
    chart_library()  # It may end the process, so it starts before the models run on images.
    inference = inference or Inference()
    classes = len(class_names(images))
    # A file may be damaged, so the files are read before the models run.
    read = [read_run(_run_folder(source)) for source in sources]
    models, images = load_classifiers(sources, images, spec, use_ema, inference)
    runs = [
        run_section(
            run_of_model(run, model),
            getattr(model, "num_classes", None),
            getattr(model, "origin", None),
        )
        for run, model in zip(read, models, strict=True)
    ]
    names = short_names([Path(describe_source(source)).parts for source in sources])
    architectures = [
        get_pretrained_cfg(model).get("architecture", type(model).__name__) for model in models
    ]
    described = [
        model_section(
            model,
            measure(copy.deepcopy(model).to("meta", torch.float32), name),
            history_of(model),
        )
        for name, model in zip(architectures, models, strict=True)
    ]

    sections: list[dict[str, Section]] = [{}, {}, {}, {}]
    observations = {}
    for name, model, about, run in zip(names, models, described, runs, strict=True):
        _logger.info("%s: running it on %s images ...", name, f"{len(images):,}")
        observations[name] = observe(model, name, images, ood_images, inference)
        similarity = similarity_section(expert_similarity(model, images, inference))
        of_model = (about, run, routing_section(observations[name]), similarity)
        for of_kind, section in zip(sections, of_model, strict=True):
            if section is not None:
                of_kind[name if len(names) > 1 else ""] = section  # a single model needs no name

    folder = "/".join(Path(images.reader.root).parts[-2:])
    text = page(
        f"What the experts do: {', '.join(dict.fromkeys(architectures))}",
        f"{', '.join(names)} on {len(images):,} images of {classes:,} classes in {folder}",
        [*sections, {"": classifier_section(observations)}],
    )
    file = Path(output_dir) / FILE
    with written_whole(file, overwrite) as partial:
        # The name of a file may hold bytes that are no text.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    return file


def _run_folder(source: Source) -> Path | None:
    """Return train.py's folder if a source is a file in it."""
    if isinstance(source, nn.Module) or not local_path(source).is_file():
        return None
    return local_path(source).parent
