"""Pictures in a report: patches in the colours of their experts, and each expert's surest ones."""

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import to_pil_image

from ..observe import LayerObservation, Observation, Patch
from ..page import Part

#: Side in pixels of a picture on a sheet.
CELL = 48
#: Largest side in pixels of an image that is shown.
LARGEST = 224
#: Titles and first words on Soft MoE and on Expert Choice.
SLOTS = (
    "Which patches feed which slot?",
    "Each expert computes slots, which are weighted means of the tokens of an image. Shown are "
    "the slots of each layer that mix the fewest tokens. The brightest patch of an image has the "
    "largest weight.",
)
CHOICES = (
    "How many experts does a patch go to?",
    "Each expert takes equally many tokens of an image, or of a group of images. The brightest "
    "patch of an image has the most experts.",
)


def patches_part(seen: Observation) -> Part:
    """Show images with the first choice of each patch."""
    title = "Which patches go to which expert?"
    layers = [layer for layer in seen.layers if layer.grid is not None]
    if not layers:
        return Part(title, "The rows of these layers are not patches of an image.")
    drawn = [
        {
            "name": f"{layer.name}, member {member + 1}"
            if layer.routes.members > 1
            else layer.name,
            "grid": layer.grid,
            "experts": layer.routes.experts,
            "expert": layer.expert_SMP[:, member].tolist(),
            "gate": (100 * layer.gate_SMP[:, member]).round().int().tolist(),
        }
        for layer in layers
        for member in range(layer.routes.members)
    ]
    labels = [
        f"{seen.classes[seen.labels[number]]}, predicted {seen.classes[seen.predicted[number]]}"
        for number in seen.shown
    ]
    images = [to_pil_image(pixels) for pixels in seen.shown_pixels]
    for image in images:
        image.thumbnail((LARGEST, LARGEST))
    routes = {"kind": "patches", "images": [*map(_jpeg, images)], "labels": labels, "layers": drawn}
    return Part(title, _sentences(layers), routes=routes)


def _sentences(layers: Sequence[LayerObservation]) -> str:
    text = (
        "Each patch has the colour and number of its first choice, the more opaque the surer the "
        "router is."
    )
    if all(layer.by_image for layer in layers):
        text += " An image goes to its experts as a whole, so all of its patches have one colour."
    if any((layer.expert_SMP == layer.routes.experts).any() for layer in layers):
        top_k = max(layer.routes.top_k for layer in layers)
        choice = "its only choice" if top_k == 1 else f"the first of its {top_k} choices"
        text += f" Of a patch without colour, {choice} found no place and was dropped."
    members = max(layer.routes.members for layer in layers)
    if members > 1:
        text += f" The model has {members} members inside; the list has each one's choices."
    return text


def surest_part(seen: Observation) -> Part | None:
    """Show the patches with the largest gates of each expert.

    None is returned where the rows are not patches.
    """
    layers = [layer for layer in seen.layers if any(layer.surest)]
    if not layers:
        return None
    drawn = [
        {
            "name": layer.name,
            "sheet": _sheet([[patch.pixels for patch in patches] for patches in layer.surest]),
            "columns": max(map(len, layer.surest)),
            "rows": [f"expert {expert}" for expert in range(len(layer.surest))],
            "told": [_caption(patches, seen.classes) for patches in layer.surest],
        }
        for layer in layers
    ]
    if layers[0].by_image:
        text = "The images with the largest gates."
    else:
        text = (
            "The patches with the largest gates, with what is around them, at most one of an image."
        )
    return Part("What is each expert surest of?", text, routes={"kind": "surest", "layers": drawn})


def mixture_part(seen: Observation) -> Part | None:
    """Show images as bright as their patches weigh in slots of Soft MoE.

    In Expert Choice they are as bright as their patches have experts.
    """
    if not seen.mixtures:
        return None
    title, text = SLOTS if seen.mixtures[0].is_soft else CHOICES
    drawn = [
        {
            "name": mixture.layer,
            "sheet": _sheet(
                [[*map(_shaded, seen.shown_pixels, weights)] for weights in maps.values()]
            ),
            "columns": len(seen.shown),
            "rows": [*maps],
            "told": [f"at most {weights.max():.3g}" for weights in maps.values()],
        }
        for mixture in seen.mixtures
        if (maps := mixture.maps())
    ]
    routes: dict[str, Any] | None = {"kind": "surest", "layers": drawn}
    if not drawn:
        text += " The tokens of these layers are not patches of an image, so none are shown."
        routes = None
    return Part(title, " ".join([text, *map(str, seen.mixtures)]), routes=routes)


def _shaded(pixels: Tensor, weights: Tensor) -> Tensor:
    """Darken an image where its patches weigh less than the heaviest.

    The image is (3, H, W) bytes, the weights are (rows, columns).
    """
    # Expert Choice may leave out all patches, whose weights then are 0 / 0.
    light = 0.15 + 0.85 * (weights / weights.max()).nan_to_num()
    return (pixels * nn.functional.interpolate(light[None, None], pixels.shape[1:])[0]).byte()


def _caption(patches: Sequence[Patch], classes: Sequence[str]) -> str:
    if not patches:
        return "never chosen first"
    of = ", ".join(dict.fromkeys(classes[patch.label] for patch in patches))
    return f"gates {patches[-1].gate:.2f} to {patches[0].gate:.2f}; of {of}"


def _sheet(rows: Sequence[Sequence[Tensor]]) -> str:
    """Paste rows of pictures (3, H, W) into one.

    Each becomes a square of CELL pixels. A place without a picture is white.
    """
    whole = Image.new("RGB", (max(map(len, rows)) * CELL, len(rows) * CELL), "white")
    for row, pictures in enumerate(rows):
        for column, pixels in enumerate(pictures):
            picture = to_pil_image(pixels).resize((CELL, CELL), Image.Resampling.BILINEAR)
            whole.paste(picture, (column * CELL, row * CELL))
    return _jpeg(whole)


def _jpeg(image: Image.Image) -> str:
    """Return the ``data:`` address of a JPEG."""
    stream = BytesIO()
    image.save(stream, "JPEG", quality=75)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()
