"""Output of ``timm-moe routes``: a table to read, a JSON and a CSV file, a plot."""

import csv
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from ...console import printable
from ...files import check_folder, publish, staged, write_json
from .mixtures import Mixture
from .statistics import Routes

_logger = logging.getLogger(__name__)

#: The files, the one that explains the others last.
FILES = ("routes.png", "routes.csv", "routes.json")
#: Most classes whose names the plot has room for.
NAMED = 110
#: Largest width and height of the plot, and of one of its panels, in inches.
PLOT_WIDTH, PANEL_HEIGHT = 22.0, 11.0


def table(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the summary by :func:`timm_moe.analysis.routes.statistics.summarize_all` in lines."""
    layers = summary["layers"]
    width = max(len("layer"), *(len(layer["layer"]) for layer in layers))
    yield (
        f"{'layer':<{width}}  experts  largest share  I(class; expert)  / H(expert)  by chance  "
        "experts/image  kept"
    )
    for layer in layers:
        yield (
            f"{layer['layer']:<{width}}  {layer['experts']:>7}  "
            f"{layer['mean_largest_share']:>13.1%}  {layer['mutual_information']:>11.3f} nats  "
            f"{layer['normalized']:>11.3f}  {layer['by_chance']:>9.3f}  "
            f"{layer['experts_per_image']:>13.2f}  {'yes' if layer['kept'] else 'no':>4}"
        )
        yield f"{'  load, %':<{width}}  " + " ".join(
            f"{100 * share:.1f}" for share in layer["load"]
        )
    kept = ", ".join(layer["layer"] for layer in layers if layer["kept"]) or "none"
    images = f"images {summary['images']:,}" + (
        f", patches {summary['patches']:,}" if "patches" in summary else ""
    )
    yield f"{images}, experts of an image in all layers {summary['experts_per_image']:.2f}"
    yield f"routing degree {summary['routing_degree']:,}"
    yield (
        f"layers worth keeping in an efficient ViMoE: {kept}; routing degree "
        f"{summary['routing_degree_of_kept']:,}"
    )


def class_shares(all_routes: Sequence[Routes]) -> Iterator[list[Any]]:
    """Yield the rows of ``routes.csv``, the head first."""
    yield ["layer", "class", "expert", "share"]
    for routes in all_routes:
        for name, shares in zip(routes.classes, routes.share_CE().tolist(), strict=True):
            yield from ([routes.layer, name, expert, share] for expert, share in enumerate(shares))


def write_routes(
    contents: dict[str, Any],
    rows: Iterable[Sequence[Any]] | None,
    draw: Callable[[Path], None],
    output_dir: str | Path,
    overwrite: bool = False,
) -> None:
    """Write ``routes.json``, ``routes.csv`` and ``routes.png`` to a folder.

    Without matplotlib there is no ``routes.png``, and a warning says so.

    Args:
        contents: content of the JSON file.
        rows: of the CSV file; None for no such file.
        draw: draws the plot.
        output_dir: folder to make or fill. An old plot does not stay beside new numbers.
        overwrite: replace results that are there, maybe since another process wrote them meanwhile.

    Raises:
        OSError: if there are some and they must not be replaced, or the folder cannot be written.
    """
    with staged(output_dir) as temporary:
        check_folder(output_dir, FILES, overwrite)
        folder = temporary / "routes"
        folder.mkdir()
        write_json(folder / "routes.json", contents)
        if rows is not None:
            with open(
                folder / "routes.csv", "w", encoding="utf-8", errors="backslashreplace", newline=""
            ) as stream:
                csv.writer(stream).writerows(rows)
        if find_spec("matplotlib") is None:
            _logger.warning(
                "There is no routes.png, which needs matplotlib: pip install 'timm_moe[evaluate]'."
            )
        else:
            from matplotlib import rc_context

            # A class may have a name such as $x$, which is not mathematics.
            with rc_context({"text.parse_math": False, "text.usetex": False}):
                draw(folder / "routes.png")
        publish(folder, Path(output_dir), FILES)


def display_order(share_CE: Tensor) -> list[int]:
    """Sort classes by their most chosen expert, then by its share, the largest first."""
    largest_C, expert_C = share_CE.max(1)
    return sorted(
        range(len(share_CE)), key=lambda index: (expert_C[index].item(), -largest_C[index].item())
    )


def _write_numbers(panel: Any, share_CE: Tensor, highest: float) -> None:
    """Write the share, in percent, into each cell of a heatmap."""
    for row, shares in enumerate(share_CE.tolist()):
        for column, share in enumerate(shares):
            colour = "white" if share > highest / 2 else "black"
            place = dict(ha="center", va="center", fontsize=6, color=colour)
            panel.text(column, row, f"{share:.0%}", **place)


def plot(all_routes: Sequence[Routes], file: Path) -> None:
    """Draw a heatmap for each layer into one PNG.

    All of them have the same colours, and the order of classes of the deepest layer. Small ones
    have the numbers in their cells.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    heatmaps = [routes.share_CE() for routes in all_routes]
    order, deepest = display_order(heatmaps[-1]), all_routes[-1]
    has_room = len(deepest.classes) <= NAMED
    names = [printable(name) for name in deepest.classes] if has_room else []
    highest = max(share_CE.max().item() for share_CE in heatmaps)
    width = min(max(0.2 * max(share_CE.shape[1] for share_CE in heatmaps), 1.5), 3.0)
    height = min(max(0.11 * len(order), 2.5), PANEL_HEIGHT)
    rows = math.ceil(len(heatmaps) * width / PLOT_WIDTH)
    columns = math.ceil(len(heatmaps) / rows)
    size = width * columns + 2.5, (height + 0.8) * rows
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel, routes, share_CE in zip(panels, all_routes, heatmaps, strict=False):
        look = dict(cmap="cividis_r", aspect="auto", interpolation="nearest")
        image = panel.imshow(share_CE[order].numpy(), vmin=0, vmax=highest, **look)
        panel.set_title(routes.layer, fontsize=8)
        panel.set_xlabel("expert", fontsize=8)
        if width / share_CE.shape[1] >= 0.3 and height / len(order) >= 0.15:  # room for numbers
            _write_numbers(panel, share_CE[order], highest)
        panel.tick_params(labelsize=7, left=False)
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    for panel in panels[len(heatmaps) :]:
        panel.set_visible(False)
    for panel in panels[::columns]:
        panel.set_ylabel(f"{len(order)} classes, in the order of {deepest.layer}", fontsize=8)
        panel.tick_params(left=True)
        if names:
            panel.set_yticks(range(len(order)), [names[index] for index in order], fontsize=6)
    length = min(4.0, 0.8 * size[1])
    share, shrink = 0.2 / size[0], length / size[1]
    bar = figure.colorbar(
        image, ax=panels.tolist(), fraction=share, pad=share, shrink=shrink, aspect=length / 0.15
    )
    bar.set_label("share of the class", fontsize=8)
    figure.suptitle("Which expert sees which class? Darker is more.", fontsize=9, fontweight="bold")
    bar.ax.tick_params(labelsize=7)
    figure.savefig(file, format="png", dpi=130)


def plot_mixtures(mixtures: Sequence[Mixture], image: Tensor, file: Path) -> None:
    """Draw an image and the maps of its patches beside it into one PNG.

    The image is (3, H, W) bytes. There is a row for each layer.
    """
    from matplotlib.figure import Figure

    maps = [mixture.maps() for mixture in mixtures]
    columns = 1 + max(map(len, maps))
    figure = Figure(figsize=(1.8 * columns, 2.2 * len(maps)), layout="constrained")
    panels = figure.subplots(len(maps), columns, squeeze=False)
    for row, mixture, of_layer in zip(panels, mixtures, maps, strict=True):
        row[0].imshow(image.permute(1, 2, 0).numpy())
        row[0].set_title(mixture.layer, fontsize=8)
        for panel, (name, weights) in zip(row[1:], of_layer.items(), strict=False):
            panel.imshow(weights[0].numpy(), cmap="cividis_r", vmin=0, interpolation="nearest")
            panel.set_title(f"{name}\n0 to {weights[0].max():.3g}", fontsize=8)
    for panel in panels.flat:
        panel.set_axis_off()
    figure.suptitle(
        "Which patches go to the experts? Darker is more.", fontsize=9, fontweight="bold"
    )
    figure.savefig(file, format="png", dpi=130)
