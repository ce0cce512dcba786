"""Images that stay on the device.

They are augmented there as timm's loaders augment them on the CPU.

``python -m studies.script on_device train.py OPTIONS`` does to tensors what train.py tells timm's
loaders to do to files: the same transforms, with the same distributions for each image. The order
of the images, mixup and cutmix are timm's own code with its random numbers; crops, flips, colors
and erasing have a generator of their own, which the seed begins. What is not known here is refused.

Many batches are augmented at once, so that a batch costs the host a slice, and mixup where it is
mixed.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import timm.data.loader
import torch
from PIL import Image
from timm.data import FastCollateMixup, Mixup, RandomResizedCropAndInterpolation
from timm.data.auto_augment import AugmentOp, AutoAugment
from timm.data.loader import PrefetchLoader, fast_collate
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import MaybePILToTensor
from torch import Generator, Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import CenterCrop, ColorJitter, Compose, RandomHorizontalFlip, Resize
from torchvision.transforms.functional import pil_to_tensor

from .augment import COLORS, GEOMETRY, affine, resized_crops

#: Batches that are augmented at once: 8,192 images of 32 pixels need about 2 GiB for a moment.
CHUNK = 64
#: Attempts of timm to draw a box that fits.
ATTEMPTS = 10
#: Transforms that have no random numbers.
FIXED = {Resize, CenterCrop, MaybePILToTensor}
RANDOM = {
    RandomResizedCropAndInterpolation,
    RandomHorizontalFlip,
    AutoAugment,
    ColorJitter,
    MaybePILToTensor,
}


class DeviceLoader(PrefetchLoader):
    """Yields what a loader of timm yields, from images that it reads once.

    Args:
        loader: loader of a data set whose transform ends in uint8 tensors.
        options: as in the base class.

    Raises:
        ValueError: if it has transforms, collates or erases in a way that is not known here.
    """

    def __init__(self, loader: DataLoader, **options: Any) -> None:
        super().__init__(loader, **options)
        self.generator = Generator().manual_seed(random.getrandbits(63))
        self.noise = Generator(self.device).manual_seed(random.getrandbits(63))
        dataset, mixup = loader.dataset, loader.collate_fn
        if mixup is not fast_collate and not (
            isinstance(mixup, FastCollateMixup) and mixup.mode == "batch"
        ):
            raise ValueError(f"Batches cannot be collated on the device by {mixup}.")
        if self.random_erasing is not None:
            _check_erasing(self.random_erasing)
        self.augmentation = None
        if not {type(step) for step in dataset.transform.transforms} <= FIXED:
            self.augmentation = Augmentation(dataset.transform, self.generator)
            dataset.transform = pil_to_tensor
        images, targets = _read(dataset, loader.num_workers)
        self.images, self.targets = images.to(self.device), targets.to(self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # Draws from torch's generator what the loader itself draws.
        orders = iter(DataLoader(range(len(self.images)), batch_sampler=self.loader.batch_sampler))
        while chunk := list(islice(orders, CHUNK)):
            yield from self._batches(chunk)

    def _batches(self, orders: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.cat(orders).to(self.device)
        images, targets = self.images[order], self.targets[order]
        if self.augmentation is not None:
            images = self.augmentation(images)
        sizes = [len(batch) for batch in orders]
        batches = list(zip(images.float().split(sizes), targets.split(sizes), strict=True))
        if isinstance(self.loader.collate_fn, FastCollateMixup):
            batches = [Mixup.__call__(self.loader.collate_fn, *batch) for batch in batches]
        images = torch.cat([images for images, _ in batches]).round_()
        images = images.to(self.img_dtype).sub_(self.mean).div_(self.std)
        if self.random_erasing is not None:
            boxes = draw_erasing(len(images), images.shape[2:], self.random_erasing, self.generator)
            images = erase(images, boxes.to(self.device), self.noise)
        yield from zip(images.split(sizes), [targets for _, targets in batches], strict=True)


def _read(dataset: Any, workers: int) -> tuple[Tensor, Tensor]:
    """Read all images (N, 3, H, W), uint8, and targets (N,)."""
    batches = list(DataLoader(dataset, batch_size=500, num_workers=workers, generator=Generator()))
    images, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    if images.dtype != torch.uint8:
        raise ValueError(f"Images on the device are uint8 and not {images.dtype}.")
    return images, targets


def put_images_on_the_device() -> None:
    """Make timm's ``create_loader`` return such loaders."""
    timm.data.loader.PrefetchLoader = DeviceLoader


@dataclass
class Change:
    """An operation of one name on some images.

    Attributes:
        name: of :data:`COLORS` or :data:`GEOMETRY`.
        chosen: (n,), their numbers.
        values: (n,), its argument for each, float64.
        is_bicubic: (n,), how it interpolates.
    """

    name: str
    chosen: Tensor
    values: Tensor
    is_bicubic: Tensor


@dataclass
class Draw:
    """All that is random about N images.

    Attributes:
        boxes: (N, 4), whole numbers: top, left, height, width.
        is_bicubic: (N,), how the boxes are enlarged.
        is_flipped: (N,).
        changes: operations, one after the other.
    """

    boxes: Tensor
    is_bicubic: Tensor
    is_flipped: Tensor
    changes: list[Change]


class Augmentation:
    """The random transforms of timm's training loaders, for many images at once.

    Args:
        transform: crop, flip, and AutoAugment or color jitter, as timm makes them.
        generator: draws all random numbers, on the CPU.

    Raises:
        ValueError: if a transform is not known here.
    """

    def __init__(self, transform: Compose, generator: Generator) -> None:
        by_type = {type(step): step for step in transform.transforms}
        if unknown := set(by_type) - RANDOM:
            names = ", ".join(sorted(kind.__name__ for kind in unknown))
            raise ValueError(f"Images cannot be augmented on the device by {names}.")
        self.generator = generator
        self.crop = by_type[RandomResizedCropAndInterpolation]
        self.flip = by_type.get(RandomHorizontalFlip, RandomHorizontalFlip(0))
        auto: AutoAugment | None = by_type.get(AutoAugment)
        self.policy = [] if auto is None else auto.policy
        self.jitter: ColorJitter | None = by_type.get(ColorJitter)
        for operation in {
            operation.name: operation for policy in self.policy for operation in policy
        }.values():
            _check_operation(operation)
        if self.jitter is not None and self.jitter.hue is not None:
            raise ValueError("Hues are not changed on the device.")
        self.fill = self.policy[0][0].kwargs["fillcolor"] if self.policy else (0, 0, 0)

    def __call__(self, images: Tensor) -> Tensor:
        """Augment images (N, 3, H, W), uint8."""
        return self.apply(images, self.draw(len(images), images.shape[2:]))

    def draw(self, number: int, size: tuple[int, int]) -> Draw:
        """Draw for a number of images of a size."""
        height, width = size
        if tuple(self.crop.size) != (height, width):
            raise ValueError(
                f"Images of {height} x {width} pixels keep their size here: not {self.crop.size}."
            )
        if not self.crop.ratio[0] <= width / height <= self.crop.ratio[1]:
            raise ValueError(
                f"The ratios of crops must include the images' own: {self.crop.ratio}."
            )
        boxes = _boxes(
            number, size, size, self.crop.scale, _logarithms(self.crop.ratio), self.generator
        )
        whole = torch.tensor([0, 0, height, width])
        return Draw(
            boxes=torch.where(boxes[:, 2:3] > 0, boxes, whole),
            is_bicubic=self._draw_bicubic(self.crop.interpolation, number),
            is_flipped=self._uniform(number) < self.flip.p,
            changes=[*self._draw_policy(number), *self._draw_jitter(number)],
        )

    def apply(self, images: Tensor, draw: Draw) -> Tensor:
        """Augment images as drawn."""
        device = images.device
        images = resized_crops(
            images, draw.boxes.to(device), draw.is_bicubic.to(device), draw.is_flipped.to(device)
        )
        fill = torch.tensor(self.fill, dtype=torch.uint8).to(device)
        for change in draw.changes:
            chosen, values = change.chosen.to(device), change.values.to(device)
            before = images[chosen]
            if change.name in GEOMETRY:
                matrices = GEOMETRY[change.name](values, *images.shape[2:])
                images[chosen] = affine(before, matrices, change.is_bicubic.to(device), fill)
            else:
                images[chosen] = COLORS[change.name](before, values)
        return images

    def _draw_policy(self, number: int) -> Iterator[Change]:
        """Draw a policy for each image.

        Its operations follow each other, each with its own probability.
        """
        which = torch.randint(max(1, len(self.policy)), (number,), generator=self.generator)
        for operations in zip(*self.policy, strict=True):
            chances = torch.tensor([op.prob for op in operations], dtype=torch.float64)
            arguments = torch.tensor([_argument(op) for op in operations], dtype=torch.float64)
            is_applied = self._uniform(number) <= chances[which]
            sign = (self._uniform(number) < 0.5).double() * 2 - 1
            for name in sorted({op.name for op in operations}):
                has_name = torch.tensor([op.name == name for op in operations])[which]
                signs = sign if name in GEOMETRY else torch.ones_like(sign)
                values = arguments[which] * signs
                yield self._change(
                    name, is_applied & has_name, values, operations[0].kwargs["resample"]
                )

    def _draw_jitter(self, number: int) -> Iterator[Change]:
        """Draw brightness, contrast and saturation for each image, and their order."""
        if self.jitter is None:
            return
        jitter = self.jitter
        ranges = {
            "Brightness": jitter.brightness,
            "Contrast": jitter.contrast,
            "Color": jitter.saturation,
        }
        order = torch.rand(number, len(ranges), generator=self.generator).argsort(1)
        values = {
            name: self._uniform(number, *(limits or (1, 1))) for name, limits in ranges.items()
        }
        for place in range(len(ranges)):
            for kind, (name, limits) in enumerate(ranges.items()):
                if limits is not None:
                    yield self._change(
                        name, order[:, place] == kind, values[name], Image.Resampling.BILINEAR
                    )

    def _change(self, name: str, is_chosen: Tensor, values: Tensor, interpolation: Any) -> Change:
        chosen = is_chosen.nonzero().squeeze(1)
        return Change(name, chosen, values[chosen], self._draw_bicubic(interpolation, len(chosen)))

    def _draw_bicubic(self, interpolation: Any, number: int) -> Tensor:
        """Choose one of the interpolations for each image."""
        choices = interpolation if isinstance(interpolation, tuple | list) else (interpolation,)
        names = [choice.name.lower() for choice in choices]
        if not set(names) <= {"bilinear", "bicubic"}:
            raise ValueError(f"Images are not interpolated on the device by {', '.join(names)}.")
        which = torch.randint(len(names), (number,), generator=self.generator)
        return torch.tensor([name == "bicubic" for name in names])[which]

    def _uniform(self, number: int, low: float = 0, high: float = 1) -> Tensor:
        return low + (high - low) * torch.rand(
            number, generator=self.generator, dtype=torch.float64
        )


def _argument(operation: AugmentOp) -> float:
    """Compute an operation's argument from its magnitude; 0 if it has none.

    Its sign may be random.
    """
    if operation.level_fn is None:
        return 0.0
    (argument,) = operation.level_fn(operation.magnitude, operation.hparams)
    return float(argument)


def _check_operation(operation: AugmentOp) -> None:
    if (
        operation.name not in {*COLORS, *GEOMETRY}
        or operation.magnitude_std
        or operation.magnitude_max
    ):
        raise ValueError(f"Images cannot be augmented on the device by {operation}.")


def _check_erasing(erasing: RandomErasing) -> None:
    if not erasing.per_pixel or (erasing.min_count, erasing.max_count, erasing.num_splits) != (
        1,
        1,
        0,
    ):
        raise ValueError(f"Images cannot be erased on the device by {erasing}.")


def _logarithms(ratio: tuple[float, float]) -> tuple[float, float]:
    return math.log(ratio[0]), math.log(ratio[1])


def _boxes(
    number: int,
    size: tuple[int, int],
    largest: tuple[int, int],
    scale: tuple[float, float],
    log_ratio: tuple[float, float],
    generator: Generator,
) -> Tensor:
    """Draw boxes (N, 4) in images of a size.

    The first of some attempts that is not too large counts.

    Args:
        number: number N of boxes.
        size: height and width of the images.
        largest: height and width that fit.
        scale: range of the area, as a fraction of the image's.
        log_ratio: range of the logarithm of the width over the height.
        generator: source of random numbers.

    Returns:
        Top, left, height and width; the last two are 0 if no attempt fitted.
    """
    drawn = torch.rand(number, 2, ATTEMPTS, generator=generator, dtype=torch.float64)
    area = (scale[0] + (scale[1] - scale[0]) * drawn[:, 0]) * size[0] * size[1]
    ratio = (log_ratio[0] + (log_ratio[1] - log_ratio[0]) * drawn[:, 1]).exp()
    sides = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], 1).round()
    fits = (sides <= torch.tensor(largest).view(2, 1)).all(1)
    first = fits.int().argmax(1)  # the first of equal values
    sides = sides[torch.arange(number), :, first] * fits.any(1, keepdim=True)
    free = torch.tensor(size) - sides + 1
    corners = (torch.rand(number, 2, generator=generator, dtype=torch.float64) * free).floor()
    return torch.cat([corners, sides], 1).long()


def draw_erasing(
    number: int, size: tuple[int, int], erasing: RandomErasing, generator: Generator
) -> Tensor:
    """Draw the boxes (N, 4) that are erased; of height and width 0 where nothing is."""
    scale, (low, high) = (erasing.min_area, erasing.max_area), erasing.log_aspect_ratio
    # Height over width.
    boxes = _boxes(number, size, (size[0] - 1, size[1] - 1), scale, (-high, -low), generator)
    is_erased = torch.rand(number, 1, generator=generator) <= erasing.probability
    return boxes * is_erased


def erase(images: Tensor, boxes: Tensor, noise: Generator) -> Tensor:
    """Put normal noise in boxes of normalized images."""
    top, left, height, width = boxes.view(-1, 4, 1, 1, 1).unbind(1)
    rows = torch.arange(images.shape[2], device=images.device).view(-1, 1)
    columns = torch.arange(images.shape[3], device=images.device)
    is_inside = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
    drawn = torch.randn(images.shape, generator=noise, device=images.device, dtype=images.dtype)
    return torch.where(is_inside, drawn, images)
