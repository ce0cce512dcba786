"""Opens classifiers, checks them against a folder of images before the first forward, and loads the images."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageDataset, create_loader
from torch import Tensor, nn

from ..checkpoints.source import ModelSpec, load_source
from ..model_config import get_pretrained_cfg, preprocessing
from .images import FolderImages, UnreadableImage, image_folder

__all__ = ["Inference", "batches", "class_names", "describe_source", "image_folder", "image_mode", "load_classifiers"]

_logger = logging.getLogger(__name__)

Source = nn.Module | str | Path

#: Modes of images that timm's loaders take, and their channels.
_CHANNELS = {"L": 1, "LA": 2, **dict.fromkeys(("RGB", "HSV", "LAB", "YCbCr"), 3), **dict.fromkeys(("RGBA", "CMYK"), 4)}
#: Seconds between two lines on the progress.
PROGRESS_INTERVAL = 10.0


@dataclass(frozen=True)
class Inference:
    """Settings of forwards."""

    batch_size: int = 256  #: images of a forward
    workers: int = 4  #: processes that load images; 0 loads them in this one
    device: str | None = None  #: by default the GPU if there is one
    amp_dtype: torch.dtype | None = None  #: type of autocast; by default there is none

    def torch_device(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.torch_device().type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None)


def class_names(images: ImageDataset) -> list[str]:
    """List the classes in the order of their numbers."""
    return list(images.reader.class_to_idx)


def load_classifiers(
    sources: Sequence[Source],
    images: ImageDataset,
    spec: ModelSpec | None = None,
    use_ema: bool = False,
    inference: Inference | None = None,
) -> list[nn.Module]:
    """Load models with the classes of the images, on the device of ``inference`` and in eval mode.

    ``sources``, ``spec`` and ``use_ema`` go to :func:`timm_moe.checkpoints.source.load_source`. If a model's config
    names the classes of the folders in another order (``label_names``), its order is taken, unless a class map states
    one. A warning says if it names other classes, or if a model was trained with a class map and there is none here.

    Raises:
        ValueError: if models and images have different numbers of classes, or different numbers for the same class; and
            as ``load_source``.
    """
    models: list[Any] = []
    for source in sources:
        if not isinstance(source, nn.Module):
            _logger.info("Loading %s ...", source)
        models.append(load_source(source, spec, use_ema))
    numbered_by = "its class map" if getattr(images.reader, "numbers_stated", True) else ""
    for source, model in zip(sources, models, strict=True):
        name, own, first = describe_source(source), model.num_classes, models[0].num_classes
        if own != first:
            others = f"{describe_source(sources[0])} has {first}: the members of an ensemble need the same."
            raise ValueError(f"{name} has {own} classes, but {others}")
        numbered_by = _compare_classes(model, name, images, numbered_by)
    return [model.to((inference or Inference()).torch_device()).eval() for model in models]


def _compare_classes(model: Any, name: str, images: ImageDataset, numbered_by: str) -> str:
    """Compare the classes by name; where nothing else has numbered the images' classes, number them as the model does.

    Returns:
        What numbers the classes; "" for the order of the folders.
    """
    root, found, own = Path(images.reader.root), class_names(images), model.num_classes
    stated = get_pretrained_cfg(model).get("label_names") or found
    by_number = stated if isinstance(stated, dict) else dict(enumerate(stated))
    if own != len(found):
        others = [repr(label) for label in found if label not in by_number.values()]
        without = f", without {', '.join(others[:3])}" if others else ""
        raise ValueError(f"{root} has {len(found)} classes, but {name} has {own}{without}.")
    if (class_map := getattr(model, "args_of_images", {}).get("class_map")) and not numbered_by:
        _logger.warning(
            f"{name} was trained with the class map {class_map!r}: without it (--class-map) the labels may not mean "
            "the same."
        )
    known: list[Any] = [by_number.get(number, by_number.get(str(number))) for number in range(own)]
    if known != found and set(known) == set(found) and not numbered_by:
        _logger.info("%s: classes are numbered as in %s.", root, name)
        images.reader.renumber(known)
        return name
    pairs = [*enumerate(zip(found, known, strict=True))]
    for number, (label, own_label) in pairs:
        if label in known and label != own_label:
            raise ValueError(
                f"{root} has {label!r} as class {number} (by {numbered_by or 'the order of its folders'}), but {name} "
                f"as class {known.index(label)}: state the model's order with --class-map (class_map=)."
            )
    for number, (label, own_label) in pairs:
        if own_label not in (label, f"LABEL_{number}"):  # as transformers calls a class without a name
            _logger.warning(
                f"{root} has other classes than {name}, whose class {number} is {own_label} and not {label}: the "
                "labels do not mean the same."
            )
            break
    return numbered_by


def describe_source(source: Source) -> str:
    """Name a source in messages."""
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)


def batches(
    models: Sequence[nn.Module], images: ImageDataset, inference: Inference, indices: Sequence[int] | None = None
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Load all images, or the ones with these indices, in order: batches (B, C, H, W) for each model, and labels (B,).

    Models of the same preprocessing share a loader. An image that cannot be read is a ValueError.
    """
    configs = [(preprocessing(model), image_mode(model)) for model in models]
    distinct = [config for index, config in enumerate(configs) if config not in configs[:index]]
    wanted = range(len(images)) if indices is None else indices
    loaders: list[Any] = [
        create_loader(
            FolderImages(images.reader, wanted, mode, _shorter_side(config)),
            **config,
            batch_size=inference.batch_size,
            num_workers=inference.workers,
            persistent_workers=inference.workers > 0,
            device=inference.torch_device(),
        )
        for config, mode in distinct
    ]
    for parts in reading(zip(*loaders, strict=True), Path(images.reader.root), len(wanted), inference):
        yield [parts[distinct.index(config)][0] for config in configs], parts[0][1]


def image_mode(model: nn.Module) -> str:
    """Return the mode of Pillow that a model's images have: that of its training, or RGB, or of one channel L.

    Raises:
        ValueError: if it does not have the model's number of channels, or is not known.
    """
    channels = preprocessing(model)["input_size"][0]
    mode = getattr(model, "args_of_images", {}).get("input_img_mode") or {1: "L", 3: "RGB"}.get(channels)
    if mode is None:
        raise ValueError(
            f"This {type(model).__name__} takes images of {channels} channels, whose mode only a checkpoint of "
            "train.py states (--input-img-mode)."
        )
    if _CHANNELS.get(mode) != channels:
        raise ValueError(
            f"The images of this {type(model).__name__} should have {channels} channels, but its checkpoint states the "
            f"mode {mode!r}."
        )
    return mode


def _shorter_side(config: Mapping[str, Any]) -> float:
    """Length to which an image's shorter side is resized; 0 if its longer side is, or both."""
    return max(config["input_size"][1:]) / config["crop_pct"] if config["crop_mode"] == "center" else 0


def reading(loader: Iterable[Any], folder: Path, total: int, inference: Inference) -> Iterator[Any]:
    """Yield the batches of a loader of so many images, and log the progress.

    An image that cannot be read is a ValueError, without the traceback that a worker process adds.
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
        raise ValueError(str(error).rpartition(f"{UnreadableImage.__name__}: ")[2].strip()) from error
