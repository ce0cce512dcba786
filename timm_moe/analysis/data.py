"""Classifiers and their images.

Classifiers are opened and checked against a folder of images before the first forward. Then the
images are loaded.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import ImageDataset, create_loader
from torch import Tensor, nn

from ..checkpoints.image_settings import own_numbering, stated_image_mode
from ..checkpoints.model_spec import ModelSpec
from ..checkpoints.source import load_source
from ..convert.wrappers import unwrapped
from ..files import local_path
from ..model_config import (
    MULTI_LABEL,
    classes_of,
    moved_class,
    preprocessing,
    renamed_class,
    stated_names,
)
from .images import FolderImages, UnreadableImage, class_names, image_folder, renumbered

__all__ = [
    "Inference",
    "batches",
    "class_names",
    "describe_source",
    "device_and_type",
    "image_folder",
    "image_mode",
    "load_classifiers",
    "open_model",
    "short_names",
]

_logger = logging.getLogger(__name__)

Source = nn.Module | str | Path

#: Mode of Pillow by the number of channels.
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
#: Seconds between two lines on the progress.
PROGRESS_INTERVAL = 10.0


@dataclass(frozen=True)
class Inference:
    """Settings of forwards."""

    batch_size: int = 256  #: images of a forward
    workers: int = 4  #: processes that load images; 0 loads them in this one
    #: by default the GPU if there is one; a model in memory then stays where it is
    device: str | None = None
    amp_dtype: torch.dtype | None = None  #: type of autocast; by default there is none

    def torch_device(self) -> torch.device:
        """Return the device that is stated, or else the GPU, or the CPU if there is none."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def autocast(self, x: Tensor) -> torch.autocast:
        """Return a context for a forward of x in ``amp_dtype``; without one it changes nothing."""
        return torch.autocast(
            x.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None
        )


def open_model(
    source: Source, spec: ModelSpec | None, use_ema: bool, inference: Inference
) -> nn.Module:
    """Load the model of a source and move it to the device of ``inference``.

    A model in memory is moved only if a device is stated. Where a wrapper, as of DDP or EMA, hides
    its number of classes, the model is taken out.

    ``source``, ``spec`` and ``use_ema`` go to :func:`timm_moe.checkpoints.source.load_source`.

    Raises:
        ValueError: if it does not state its number of classes; and as ``load_source``.
    """
    model = load_source(source, spec, use_ema)
    if not hasattr(model, "num_classes"):
        model = unwrapped(model)
    if not hasattr(model, "num_classes"):
        raise ValueError(
            f"This {type(model).__name__} does not state its num_classes, as models of timm do."
        )
    stays = isinstance(source, nn.Module) and inference.device is None
    return model if stays else model.to(inference.torch_device())


def device_and_type(model: nn.Module, inference: Inference) -> tuple[torch.device, torch.dtype]:
    """Return where and what a model's images must be: as its parameters, if it has any."""
    first = next(filter(torch.is_floating_point, model.parameters()), None)
    if first is None:
        return inference.torch_device(), torch.float32
    return first.device, first.dtype


def load_classifiers(
    sources: Sequence[Source],
    images: ImageDataset,
    spec: ModelSpec | None = None,
    use_ema: bool = False,
    inference: Inference | None = None,
) -> tuple[list[nn.Module], ImageDataset]:
    """Load models, and number the images' classes as they do.

    ``sources``, ``spec`` and ``use_ema`` go to :func:`open_model`.

    Unless a class map states the order of the classes, it is the one in the first model's config
    (``label_names``), which may name classes without images, or timm's order of the folders for a
    model that names none. A warning says if a model names other classes, or was trained with a
    class map, or on a data set that numbers its classes itself, and there is no class map here.

    Raises:
        ValueError: if a source is named twice; if a model was trained with several labels for an
            image, has another number of classes than the images, or another number for the same
            class; and as ``open_model``.
    """
    inference = inference or Inference()
    require_different(sources)
    models: list[nn.Module] = []
    by_folder = class_names(images)
    is_stated = getattr(images, "numbers_stated", True)
    order = "its class map" if is_stated else "the order of its folders"
    for source in sources:
        if not isinstance(source, nn.Module):
            _logger.info("Loading %s ...", source)
        model, name = open_model(source, spec, use_ema, inference), describe_source(source)
        if getattr(model, "problem_type", None) == MULTI_LABEL:
            raise ValueError(
                f"{name} was trained with several labels for an image; only one can be measured "
                "here."
            )
        known = _classes_of(model, name, images.reader.root, by_folder)
        if not models and not is_stated and known != by_folder and {*by_folder} <= {*known}:
            _logger.info("%s: classes are numbered as in %s.", images.reader.root, name)
            images, order = renumbered(images, known), name
        numbering = own_numbering(model)
        if numbering and not is_stated:
            _logger.warning(
                f"{name} was trained {numbering}: without a class map (--class-map) the labels may "
                "not mean the same."
            )
        _compare_classes(known, name, images, order)
        models.append(model)
    return models, images


def _classes_of(model: Any, name: str, root: Any, by_folder: list[str]) -> list[str]:
    """List the classes of a model, by default the folders.

    Raises:
        ValueError: if the model has another number of classes than there are folders, unless it
            names all of them and has all folders among them.
    """
    if model.num_classes == len(by_folder):
        return classes_of(model, by_folder)
    names = stated_names(model)
    others = [repr(label) for label in by_folder if label not in names] if names else []
    if len({*names}) == model.num_classes and None not in names and not others:
        return names
    remedy = ""
    if others:
        remedy = f", without {', '.join(others[:3])}"
    elif len(by_folder) < model.num_classes:
        remedy = ": if one has no images here, name all with --class-map (class_map=)"
    raise ValueError(
        f"{Path(root)} has {len(by_folder)} classes, but {name} has {model.num_classes}{remedy}."
    )


def _compare_classes(known: list[str], name: str, images: ImageDataset, order: str) -> None:
    """Raise ValueError if a class has another number in a model than in the images.

    ``order`` says by what the images' classes are numbered.
    """
    root, found = Path(images.reader.root), class_names(images)
    if len(known) != len(found):
        raise ValueError(
            f"{name} has {len(known)} classes, but {root} has {len(found)} (by {order})."
        )
    moved, other = moved_class(known, found), renamed_class(known, found)
    if moved is not None:
        raise ValueError(
            f"{root} has {found[moved]!r} as class {moved} (by {order}), but {name} as class "
            f"{known.index(found[moved])}: state the model's order with --class-map (class_map=)."
        )
    if other is not None:
        _logger.warning(
            f"{root} has other classes than {name}, whose class {other} is {known[other]} and not "
            f"{found[other]}: the labels do not mean the same."
        )


@contextmanager
def in_eval_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put models into eval mode, and each of their modules back into its own."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.train(mode)  # experts hide their network from modules()
        for module, mode in modes.items():
            module.training = mode


def require_different(sources: Sequence[Source]) -> None:
    """Raise ValueError if a file or folder is named twice, also by another path."""
    seen: dict[str, Source] = {}
    for source in sources:
        if isinstance(source, nn.Module):
            continue
        path, place = local_path(source), str(source)
        if path.exists():
            # train.py's last, best and numbered checkpoints may be one file, by hard links.
            found = path.stat()
            place = f"{found.st_dev} {found.st_ino}"
        if place in seen:
            raise ValueError(f"{source} is named twice, as {seen[place]}: name each model once.")
        seen[place] = source


def describe_source(source: Source) -> str:
    """Name a source in messages."""
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)


def short_names(
    paths: Sequence[tuple[str, ...]], is_name: Callable[[str], bool] = bool
) -> list[str]:
    """Return different names of paths: the last part of each, or more parts where these are equal.

    Args:
        paths: the parts of each path; equal paths are numbered.
        is_name: whether a text is a name; if one is not, more parts are taken too.
    """
    for number in range(1, max(map(len, paths), default=0) + 1):
        names = [Path(*parts[-number:]).as_posix() for parts in paths]
        if len({*names}) == len(names) and all(map(is_name, names)):
            return names
    return [f"{number}: {Path(*parts).as_posix()}" for number, parts in enumerate(paths, 1)]


def batches(
    models: Sequence[nn.Module],
    images: ImageDataset,
    inference: Inference,
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Load all images in order.

    The batches are (B, C, H, W) for each model, of the device and type of its parameters, and
    labels (B,).

    The models are in eval mode. Models of the same preprocessing and device share a loader.

    Raises:
        ValueError: if an image cannot be read.
    """
    places = [device_and_type(model, inference) for model in models]
    configs = [
        (preprocessing(model), image_mode(model), device)
        for model, (device, _) in zip(models, places, strict=True)
    ]
    distinct = [config for index, config in enumerate(configs) if config not in configs[:index]]
    reader = images.reader
    loaders: list[Any] = [
        create_loader(
            FolderImages(reader.root, reader=reader, input_img_mode=mode),
            **config,
            batch_size=inference.batch_size,
            num_workers=inference.workers,
            persistent_workers=inference.workers > 0,
            device=device,
        )
        for config, mode, device in distinct
    ]
    with in_eval_mode(models):
        for parts in reading(zip(*loaders, strict=True), Path(reader.root), len(reader), inference):
            batch = [
                parts[distinct.index(config)][0].to(dtype)
                for config, (_, dtype) in zip(configs, places, strict=True)
            ]
            yield batch, parts[0][1]


def image_mode(model: nn.Module) -> str:
    """Return the mode of Pillow that a model's images have.

    It is the mode of its training, or else that of its number of channels.

    Raises:
        ValueError: if no mode has so many channels.
    """
    if stated := stated_image_mode(model):
        return stated
    channels = preprocessing(model)["input_size"][0]
    if channels not in MODES:
        raise ValueError(f"Files of images have 1 to 4 channels, but the model takes {channels}.")
    return MODES[channels]


def image_bytes(images: Tensor, model: nn.Module) -> Tensor:
    """Return a model's images as bytes (B, 3, H, W), in RGB, as before their normalisation."""
    config = preprocessing(model)
    mean, std = (
        torch.tensor(config[name], device=images.device).view(-1, 1, 1) for name in ("mean", "std")
    )
    pixels = ((images.float() * std + mean) * 255).round().clamp(0, 255).byte().cpu()
    mode = "L" if pixels.shape[1] == 1 else image_mode(model)
    size = (pixels.shape[3], pixels.shape[2])
    shown = [
        Image.frombytes(mode, size, image.permute(1, 2, 0).numpy().tobytes()).convert("RGB")
        for image in pixels
    ]
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in shown])


def reading(loader: Iterable[Any], folder: Path, total: int, inference: Inference) -> Iterator[Any]:
    """Yield the batches of a loader, and log the progress.

    Args:
        loader: of the images.
        folder: of the images, for the log.
        total: number of images.
        inference: settings of the loader.

    Raises:
        ValueError: if an image cannot be read; without the traceback that a worker process adds.
    """
    done, logged = 0, time.monotonic()
    try:
        for batch in loader:
            yield batch
            done = min(done + inference.batch_size, total)
            if time.monotonic() - logged > PROGRESS_INTERVAL:
                logged = time.monotonic()
                _logger.info("%s: %s of %s images ...", folder, f"{done:,}", f"{total:,}")
    except UnreadableImage as error:
        raise ValueError(
            str(error).rpartition(f"{UnreadableImage.__name__}: ")[2].strip()
        ) from error
