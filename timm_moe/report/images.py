"""Small pictures that stand in the page itself."""

import base64
from collections.abc import Sequence
from io import BytesIO

from PIL import Image
from torch import Tensor

#: Side in pixels of a picture on a sheet, and the largest of an image that is shown.
CELL, LARGEST = 48, 224


def data_uri(pixels: Tensor) -> str:
    """Bytes (3, H, W) as a ``data:`` address of a JPEG."""
    image = _image(pixels)
    image.thumbnail((LARGEST, LARGEST))
    return _jpeg(image)


def sheet(rows: Sequence[Sequence[Tensor]]) -> str:
    """Rows of pictures (3, H, W) as one, each a square of CELL pixels; white where a row has no more."""
    columns = max(1, *map(len, rows))
    whole = Image.new("RGB", (columns * CELL, len(rows) * CELL), "white")
    for row, pictures in enumerate(rows):
        for column, pixels in enumerate(pictures):
            picture = _image(pixels).resize((CELL, CELL), Image.Resampling.BILINEAR)
            whole.paste(picture, (column * CELL, row * CELL))
    return _jpeg(whole)


def _image(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def _jpeg(image: Image.Image) -> str:
    stream = BytesIO()
    image.save(stream, "JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()
