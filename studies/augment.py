"""Pillow's operations on whole batches of images, each image with its own arguments.

Images are uint8 tensors (N, 3, H, W) on any device. As in Pillow, each operation ends in whole
numbers, and positions and weights are float64: train.py allows TF32, which would round the weights
of a float32 product to 10 bits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

#: Bits of Pillow's weights behind the point. They decide how a value halfway between whole numbers
#: is rounded.
BITS = 22


def resized_crops(images: Tensor, boxes: Tensor, is_bicubic: Tensor, is_flipped: Tensor) -> Tensor:
    """Cut a box out of each image, enlarge it to the image's size and mirror it.

    It is done as by Pillow's crop and resize.

    Args:
        images: (N, 3, H, W).
        boxes: (N, 4), whole numbers: top, left, height, width.
        is_bicubic: (N,), bicubic where true and else bilinear.
        is_flipped: (N,), whether an image is mirrored horizontally.
    """
    top, left, height, width = boxes.double().view(-1, 4, 1, 1).unbind(1)
    cubic = is_bicubic.view(-1, 1, 1)
    columns = _enlarging(left, width, images.shape[3], cubic)
    columns = torch.where(is_flipped.view(-1, 1, 1), columns.flip(1), columns)
    rows = _enlarging(top, height, images.shape[2], cubic)
    across = _rounded(images.double() @ columns.mT.unsqueeze(1)).double()
    return _rounded(rows.unsqueeze(1) @ across)


def _enlarging(begin: Tensor, length: Tensor, size: int, is_bicubic: Tensor) -> Tensor:
    """Compute the weights (N, size, size) of an axis's places for the enlarged parts.

    There is a weight of each place along an axis for each place of an enlarged part.

    A part is all there is: the weights of places outside are zero, and the others are divided by
    their sum.
    """
    axis = torch.arange(size, device=begin.device, dtype=begin.dtype)
    places, centers = axis - begin + 0.5, (axis.view(-1, 1) + 0.5) * length / size
    distance = (places - centers).abs()
    near = (1.5 * distance - 2.5) * distance**2 + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    bicubic = torch.where(distance < 1, near, torch.where(distance < 2, far, 0))
    weights = torch.where(is_bicubic, bicubic, (1 - distance).clamp(min=0))
    weights = weights * ((places > 0) & (places < length))
    normalized = weights / weights.sum(2, keepdim=True)
    return (normalized * 2**BITS).round() / 2**BITS


def _rounded(values: Tensor) -> Tensor:
    return (values + 0.5).floor().clamp(0, 255).to(torch.uint8)


def affine(images: Tensor, matrices: Tensor, is_bicubic: Tensor, fill: Tensor) -> Tensor:
    """Sample each image at places that an affine map computes.

    It is done as by ``Image.transform`` with ``Transform.AFFINE``.

    Args:
        images: (N, 3, H, W).
        matrices: (N, 2, 3), from x, y and 1 of a result to x and y of an image.
        is_bicubic: (N,), bicubic where true and else bilinear.
        fill: (3,), the color of places outside of an image.
    """
    height, width = images.shape[2:]
    grid = dict(device=images.device, dtype=torch.float64)
    y, x = torch.meshgrid(
        torch.arange(height, **grid) + 0.5, torch.arange(width, **grid) + 0.5, indexing="ij"
    )
    x, y = (
        (matrices.view(-1, 2, 3, 1, 1) * torch.stack([x, y, torch.ones_like(x)])).sum(2).unbind(1)
    )
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    around = torch.arange(-1, 3, device=images.device).view(-1, 1, 1)
    left, above = (x - 0.5).floor(), (y - 0.5).floor()
    columns = (left.long().unsqueeze(1) + around).clamp(0, width - 1)
    rows = (above.long().unsqueeze(1) + around).clamp(0, height - 1)
    places = (rows.unsqueeze(2) * width + columns.unsqueeze(1)).flatten(1)
    found = images.flatten(2).gather(2, places.unsqueeze(1).expand(-1, 3, -1))
    found = found.view(-1, 3, 4, 4, height, width).double()
    cubic = is_bicubic.view(-1, 1, 1, 1)
    across = _between(found.unbind(3), (x - 0.5 - left)[:, None, None], cubic.unsqueeze(1))
    sampled = _between(across.unbind(2), (y - 0.5 - above).unsqueeze(1), cubic)
    return torch.where(is_inside.unsqueeze(1), _truncated(sampled), fill.view(3, 1, 1))


def _between(values: tuple[Tensor, ...], distance: Tensor, is_bicubic: Tensor) -> Tensor:
    """Interpolate between the second and the third of four values."""
    before, left, right, after = values
    third = -before + left - right + after
    second = 2 * (before - left) + right - after + distance * third
    first = right - before + distance * second
    return left + distance * torch.where(is_bicubic, first, right - left)


def _truncated(values: Tensor) -> Tensor:
    return values.clamp(0, 255).to(torch.uint8)


def _rotation(degrees: Tensor, height: int, width: int) -> Tensor:
    """Rotate counterclockwise around the center, as ``Image.rotate``."""
    cos, sin = torch.cos(-torch.deg2rad(degrees)), torch.sin(-torch.deg2rad(degrees))
    x, y = width / 2, height / 2
    return torch.stack([cos, sin, x - x * cos - y * sin, -sin, cos, y + x * sin - y * cos], 1).view(
        -1, 2, 3
    )


def _shear_x(factors: Tensor, height: int, width: int) -> Tensor:
    zeros, ones = torch.zeros_like(factors), torch.ones_like(factors)
    return torch.stack([ones, factors, zeros, zeros, ones, zeros], 1).view(-1, 2, 3)


#: Affine maps of timm's names, from an argument for each image, height and width to matrices (N, 2,
#: 3).
GEOMETRY: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "Rotate": _rotation,
    "ShearX": _shear_x,
}


def _auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    low, high = (
        images.amin((2, 3), keepdim=True).double(),
        images.amax((2, 3), keepdim=True).double(),
    )
    # 255 / tensor takes the reciprocal, which rounds twice.
    scale = torch.full_like(high, 255) / (high - low)
    return torch.where(high > low, _truncated(images * scale - low * scale), images)


def _equalize(images: Tensor, _: Tensor) -> Tensor:
    values = images.flatten(2).long()
    counts = values.new_zeros(*images.shape[:2], 256).scatter_add_(
        2, values, torch.ones_like(values)
    )
    of_highest = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - of_highest) // 255
    table = (step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)
    equalized = table.gather(2, values).clamp(max=255)
    return torch.where(step > 0, equalized, values).view_as(images).to(torch.uint8)


def _invert(images: Tensor, _: Tensor) -> Tensor:
    return 255 - images


def _posterize(images: Tensor, bits: Tensor) -> Tensor:
    return images & _of_each_image(256 - 2 ** (8 - bits)).to(torch.uint8)


def _solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    return torch.where(images < _of_each_image(thresholds), images, 255 - images)


def _brightness(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(torch.zeros_like(images), images, factors)


def _color(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(_gray(images), images, factors)


def _contrast(images: Tensor, factors: Tensor) -> Tensor:
    mean = _gray(images).double().mean((2, 3), keepdim=True)
    return _blend((mean + 0.5).floor(), images, factors)


def _sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with ``ImageFilter.SMOOTH``, which leaves the border as it is."""
    values = images.int()
    rows = values[..., :-2, :] + values[..., 1:-1, :] + values[..., 2:, :]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = _rounded((around + 4 * values[..., 1:-1, 1:-1]) / 13)
    return _blend(smooth, images, factors)


def _gray(images: Tensor) -> Tensor:
    """Convert to gray, as ``Image.convert("L")``."""
    red, green, blue = images.int().split(1, 1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def _blend(low: Tensor, high: Tensor, factors: Tensor) -> Tensor:
    """Blend and extrapolate, as ``Image.blend``."""
    return _truncated(low.float() + _of_each_image(factors).float() * (high.float() - low.float()))


def _of_each_image(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


#: Operations on colors of timm's names, from images and an argument for each to images.
COLORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AutoContrast": _auto_contrast,
    "Brightness": _brightness,
    "Color": _color,
    "Contrast": _contrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "PosterizeOriginal": _posterize,
    "Sharpness": _sharpness,
    "Solarize": _solarize,
}
