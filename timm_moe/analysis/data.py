"""Opens classifiers, checks them against a folder of images before the first forward, and loads the images."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageDataset, create_loader
from torch import Tensor, nn

from ..checkpoints.source import ModelSpec, load_source
from ..model_config import get_pretrained_cfg, preprocessing
from .images import FolderImages, FolderReader, UnreadableImage, image_folder

__all__ = ["Inference", "batches", "class_names", "describe_source", "image_folder", "image_mode", "load_classifiers"]

_logger = logging.getLogger(__name__)

Source = nn.Module | str | Path

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
        ValueError: if a model and the images have different numbers of classes, or different numbers for the same
            class; and as ``load_source``.
    """
    models = []
    numbered_by = "its class map" if getattr(images.reader, "numbers_stated", True) else ""
    for source in sources:
        if not isinstance(source, nn.Module):
            _logger.info("Loading %s ...", source)
        model = load_source(source, spec, use_ema)
        numbered_by = _compare_classes(model, describe_source(source), images, numbered_by)
        models.append(model.to((inference or Inference()).torch_device()).eval())
    return models


def _compare_classes(model: Any, name: str, images: ImageDataset, numbered_by: str) -> str:
    """Compare the classes by name; where nothing else has numbered the images' classes, number them as the model does.

    Returns:
        What numbers the classes; "" for the order of the folders.
    """
    root, found = Path(images.reader.root), class_names(images)
    stated = get_pretrained_cfg(model).get("label_names") or found
    by_number = stated if isinstance(stated, dict) else dict(enumerate(stated))
    known: list[Any] = [by_number.get(number, by_number.get(str(number))) for number in range(model.num_classes)]
    if len(known) != len(found):
        others = [repr(label) for label in found if label not in by_number.values()]
        without = f", without {', '.join(others[:3])}" if others else ""
        raise ValueError(f"{root} has {len(found)} classes, but {name} has {len(known)}{without}.")
    if (class_map := getattr(model, "args_of_images", {}).get("class_map")) and not numbered_by:
        _logger.warning(
            f"{name} was trained with the class map {class_map!r}: without it (--class-map) the labels may not mean "
            "the same."
        )
    if known != found and set(known) == set(found) and not numbered_by:
        _logger.info("%s: classes are numbered as in %s.", root, name)
        images.reader.renumber(known)
        return name
    # transformers calls a class without a name LABEL_ and its number
    other = [number for number, label in enumerate(found) if known[number] not in (label, f"LABEL_{number}")]
    for number in other:
        if found[number] in known:
            raise ValueError(
                f"{root} has {found[number]!r} as class {number} (by {numbered_by or 'the order of its folders'}), but "
                f"{name} as class {known.index(found[number])}: state the model's order with --class-map (class_map=)."
            )
    if other:
        _logger.warning(
            f"{root} has other classes than {name}, whose class {other[0]} is {known[other[0]]} and not "
            f"{found[other[0]]}: the labels do not mean the same."
        )
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
    reader = images.reader
    if indices is not None:
        reader = FolderReader(reader.root, [reader.samples[index] for index in indices], class_names(images), True)
    loaders: list[Any] = [
        create_loader(
            FolderImages(reader.root, reader=reader, input_img_mode=mode),
            **config,
            batch_size=inference.batch_size,
            num_workers=inference.workers,
            persistent_workers=inference.workers > 0,
            device=inference.torch_device(),
        )
        for config, mode in distinct
    ]
    for parts in reading(zip(*loaders, strict=True), Path(reader.root), len(reader), inference):
        yield [parts[distinct.index(config)][0] for config in configs], parts[0][1]


def image_mode(model: nn.Module) -> str:
    """Return the mode of Pillow that a model's images have: that of its training, or as in timm's validate.py."""
    stated = getattr(model, "args_of_images", {}).get("input_img_mode")
    return stated or ("RGB" if preprocessing(model)["input_size"][0] == 3 else "L")


def image_bytes(images: Tensor, model: nn.Module) -> Tensor:
    """Return a model's images, (B, 3, H, W), as the bytes that they were before they were normalised."""
    config = preprocessing(model)
    mean, std = (torch.tensor(config[name], device=images.device).view(-1, 1, 1) for name in ("mean", "std"))
    pixels = ((images.float() * std + mean) * 255).round().clamp(0, 255).byte().cpu()
    return pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels[:, :3]


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
