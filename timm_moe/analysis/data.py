"""Opens classifiers and a folder of images, and checks them against each other before the first forward."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import ImageDataset, create_dataset, create_loader
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..checkpoints.source import ModelSpec, describe, load_source
from ..model_config import get_pretrained_cfg, preprocessing

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


def image_folder(data_dir: str | Path, split: str = "validation", class_map: str = "") -> ImageDataset:
    """Open the images of a split, a folder for each class, as timm's validate.py does.

    Args:
        data_dir: folder that holds the split's folder.
        split: ``validation`` may also be called ``val``, ``eval`` and the like; ``""`` is ``data_dir`` itself.
        class_map: file that numbers the classes, as in timm's scripts; by default they are sorted.

    Raises:
        FileNotFoundError: if there is no such folder or split, or no image of a class in it.
        ValueError: if the class map is damaged, or a pickle.
    """
    folder = Path(data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no data folder {folder}.")
    if class_map.endswith(".pkl"):
        raise ValueError(f"{class_map} may run code when it is read: write the names of the classes to a text file.")
    try:
        dataset = create_dataset("", root=str(folder), split=split, class_map=class_map)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise FileNotFoundError(f"{folder} has no image of a class in its split {split!r}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"The class map {class_map} is no text.") from error
    numbers = sorted(dataset.reader.class_to_idx.values())
    if numbers != list(range(len(numbers))):
        raise ValueError(f"The class map {class_map} names a class twice.")
    if split and dataset.reader.root == str(folder):  # timm takes the whole folder if it finds no split
        found = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())[:5])
        raise FileNotFoundError(
            f"{folder} has no split {split!r}; its folders begin with {found}: name one with --split, or --split '' if "
            "they are the classes."
        )
    return dataset


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

    ``sources``, ``spec`` and ``use_ema`` go to :func:`timm_moe.checkpoints.source.load_source`. A warning says if a
    model's config names other classes (``label_names``) than the folders of the images.

    Raises:
        ValueError: if models and images have different numbers of classes; and as ``load_source``.
    """
    models: list[Any] = []
    for source in sources:
        if not isinstance(source, nn.Module):
            _logger.info("Loading %s ...", source)
        models.append(load_source(source, spec, use_ema))
    found, folder = class_names(images), Path(images.reader.root)
    for source, model in zip(sources, models, strict=True):
        name, own, first = describe_source(source), model.num_classes, models[0].num_classes
        if own != first:
            others = f"{describe_source(sources[0])} has {first}: the members of an ensemble need the same."
            raise ValueError(f"{name} has {own} classes, but {others}")
        if own != len(found):
            raise ValueError(f"{folder} has {len(found)} classes, but {name} has {own}.")
        stated = get_pretrained_cfg(model).get("label_names") or found
        by_number = stated if isinstance(stated, dict) else {str(number): label for number, label in enumerate(stated)}
        for number, label in enumerate(found):
            known = by_number.get(str(number))
            if known not in (label, f"LABEL_{number}"):  # as transformers calls a class without a name
                _logger.warning(
                    f"{folder} has other classes than {name}, whose class {number} is {known} and not {label}: the "
                    "labels do not mean the same."
                )
                break
    return [model.to((inference or Inference()).torch_device()).eval() for model in models]


def describe_source(source: Source) -> str:
    """Name a source in messages."""
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)


def batches(
    models: Sequence[nn.Module], images: ImageDataset, inference: Inference, indices: Sequence[int] | None = None
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Load all images, or the ones with these indices, in order: batches (B, C, H, W) for each model, and labels (B,).

    Models of the same preprocessing share a loader. An image that cannot be read is a ValueError.
    """
    configs = [preprocessing(model) for model in models]
    distinct = [config for index, config in enumerate(configs) if config not in configs[:index]]
    wanted = range(len(images)) if indices is None else indices
    loaders: list[Any] = [
        create_loader(
            _Images(images, wanted, "RGB" if config["input_size"][0] == 3 else "L"),  # type: ignore[arg-type]
            **config,
            batch_size=inference.batch_size,
            num_workers=inference.workers,
            persistent_workers=inference.workers > 0,
            device=inference.torch_device(),
        )
        for config in distinct
    ]
    for parts in reading(zip(*loaders, strict=True), Path(images.reader.root), len(wanted), inference):
        yield [parts[distinct.index(config)][0] for config in configs], parts[0][1]


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


class _Images(Dataset):
    """Images without timm's way to take the next one if one is unreadable."""

    def __init__(self, images: ImageDataset, wanted: Sequence[int], mode: str):
        self.samples, self.wanted, self.mode = images.reader.samples, wanted, mode
        self.transform: Any = None  # timm's create_loader sets it

    def __len__(self) -> int:
        return len(self.wanted)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        file, label = self.samples[self.wanted[number]]
        return self.transform(read_image(file, self.mode)), label


class UnreadableImage(ValueError):
    """Error that names the file."""


def read_image(file: str | Path, mode: str | None = None) -> Image.Image:
    """Open and decode an image, and convert it to a mode of Pillow if one is given; or raise UnreadableImage."""
    try:
        image: Image.Image = Image.open(file)
        if image.format == "PNG":  # decoding does not look at its checksums
            image.verify()
            image = Image.open(file)
        image.load()
        return image if mode is None else image.convert(mode)
    except Exception as error:  # a damaged image may end in anything
        raise UnreadableImage(f"The image {file} cannot be read: {describe(error)}") from error
