"""Which classes go to which experts: the routing analysis of ViMoE (arXiv 2410.15732, figures 4, 5 and 8).

Shape suffixes: I images, C classes, E experts, T rows, K choices of a row.
"""

import csv
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ..convert.blocks import moe_layers
from ..files import check_folder, dump_json, publish, staged
from ..layers import EwaMlp, MoeMlp, Routing
from .data import Inference, batches, class_names
from .segmentation import MaskedImages, majority_labels

_logger = logging.getLogger(__name__)

#: What is written; routes.json says of what the others are.
_FILES = ("routes.png", "routes.csv", "routes.json")
#: Random assignments of labels to images over which the mutual information by chance is averaged.
SHUFFLES = 10
#: Widest and highest that the panels of the plot may get together, and one of them, in inches.
PLOT_WIDTH, PANEL_HEIGHT = 22.0, 11.0


@dataclass(frozen=True)
class Routes:
    """Where the images, or their patches, went in one call of a router.

    Attributes:
        layer: name of the expert layer; of one that is called several times in a forward, with the number of the call.
        top_k: experts of each row.
        degree: number of sets of experts that a row can go to.
        count_IE: choices of each image's rows for each expert. With labels of pixels an entry is a patch.
        labels: (I,) class of each image, or patch, as an index of ``classes``.
        classes: names of the classes that have images, or patches.
        image_I: (I,) number of the image that a patch is of; None where the entries are images.
    """

    layer: str
    top_k: int
    degree: int
    count_IE: Tensor
    labels: Tensor
    classes: list[str]
    image_I: Tensor | None = None

    def images(self) -> int:
        """Number of images."""
        return len(self.labels if self.image_I is None else self.image_I.unique())

    def experts_per_image(self) -> float:
        """Number of different experts that the rows of an image go to, on average."""
        count_IE = self.count_IE
        if self.image_I is not None:
            image_I = self.image_I.unique(return_inverse=True)[1]
            count_IE = count_IE.new_zeros(self.images(), count_IE.shape[1], dtype=torch.int)
            count_IE.index_add_(0, image_I, self.count_IE.int())
        return (count_IE > 0).sum(1).double().mean().item()

    def count_CE(self) -> Tensor:
        """Choices of each class for each expert."""
        return _sum_by_class(self.count_IE, self.labels, len(self.classes))

    def share_CE(self) -> Tensor:
        """The heatmap: share of a class's choices that went for each expert; rows sum to 1."""
        count_CE = self.count_CE()
        return count_CE / count_CE.sum(1, keepdim=True)


def collect_routes(model: nn.Module, images: ImageDataset, inference: Inference | None = None) -> list[Routes]:
    """Run a model on images and note what its routers decide, in the order of their calls.

    Capacities are not in force, so that every choice has a place at its expert. A token is of the class of its image.

    Args:
        model: from :func:`timm_moe.analysis.data.load_classifiers`.
        images: from :func:`timm_moe.analysis.data.image_folder`.
        inference: how forwards are run.

    Raises:
        ValueError: if the model has no expert layers, or all of them are random partitions.
    """
    inference = inference or Inference()
    counts, labels = [], []
    layers = routed_layers(model)
    with torch.inference_mode(), _watched(layers) as calls:
        for (inputs,), batch_labels in batches([model], images, inference):
            calls.clear()
            with inference.autocast():
                model(inputs)
            counts.append([_count_choices(routing, len(batch_labels)) for _, routing in calls])
            labels.append(batch_labels.cpu())
    return _routes(layers, calls, counts, torch.cat(labels), class_names(images).__getitem__)


def collect_patch_routes(model: nn.Module, images: MaskedImages, inference: Inference | None = None) -> list[Routes]:
    """As :func:`collect_routes`, but a token is of the class that most pixels of its patch have.

    Patches most of whose pixels have no class are left out, as are the class token and registers. With
    ``routing_unit=image`` all patches of an image go where their image goes.

    Args:
        model: on its device, in eval mode.
        images: at the size that the model takes.
        inference: how forwards are run.

    Raises:
        ValueError: as ``collect_routes``; if a router does not see the patches of the images one by one; if a pair of
            image and mask cannot be used; or if no patch has a class.
    """
    inference = inference or Inference()
    counts, labels, numbers = [], [], []
    layers = routed_layers(model)
    grid, prefix = patch_grid(model)
    done = 0
    with torch.inference_mode(), _watched(layers) as calls:
        for inputs, labels_BHW in images.batches(inference):
            calls.clear()
            with inference.autocast():
                model(inputs)
            labels_BP = majority_labels(labels_BHW, grid)
            known_BP = labels_BP != images.ignore_index
            counts.append(
                [_count_of_patches(name, routing, labels_BP.shape, prefix)[known_BP] for name, routing in calls]
            )
            labels.append(labels_BP[known_BP])
            numbers.append(done + known_BP.nonzero()[:, 0])
            done += len(labels_BP)
    if not any(map(len, labels)):
        raise ValueError(f"Most pixels of every patch have the label {images.ignore_index}, so no patch has a class.")
    return _routes(layers, calls, counts, torch.cat(labels), images.class_name, torch.cat(numbers))


def _routes(
    layers: Mapping[str, MoeMlp],
    calls: Sequence[tuple[str, Routing]],
    counts: Sequence[Sequence[Tensor]],
    numbers: Tensor,
    class_name: Callable[[int], str],
    image_I: Tensor | None = None,
) -> list[Routes]:
    """Of each call, from the counts of each batch and the numbers of the classes."""
    present, labels = numbers.unique(return_inverse=True)
    classes = [class_name(number) for number in present.tolist()]
    degrees = [layers[layer].routed_by.routing_degree() for layer, _ in calls]
    return [
        Routes(name, routing.slots.shape[1], degree, torch.cat(parts), labels, classes, image_I)
        for name, (_, routing), degree, parts in zip(
            call_names([layer for layer, _ in calls]), calls, degrees, zip(*counts, strict=True), strict=True
        )
    ]


def patch_grid(model: nn.Module) -> tuple[tuple[int, int], int]:
    """(rows, columns) of a Vision Transformer's patches, and the number of tokens before them.

    Raises:
        ValueError: if the model does not say them.
    """
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    prefix = getattr(model, "num_prefix_tokens", None)
    if grid is None or prefix is None:
        raise ValueError(f"This {type(model).__name__} does not say which of its tokens are which patches of an image.")
    return tuple(grid), prefix


def routed_layers(model: nn.Module) -> dict[str, MoeMlp]:
    """The expert layers that have a router which looks at the rows.

    Raises:
        ValueError: if there are none.
    """
    layers = moe_layers(model)
    if not layers:
        raise ValueError(f"This {type(model).__name__} has no expert layers, so nothing is routed.")
    routed = {name: layer for name, layer in layers.items() if layer.routed_by.depends_on_input}
    if not routed:
        kinds = "random partitions" if all(isinstance(layer, EwaMlp) for layer in layers.values()) else "so made"
        raise ValueError(f"All expert layers of this model are {kinds}, which do not depend on the images.")
    return routed


@contextmanager
def _watched(layers: Mapping[str, MoeMlp]) -> Iterator[list[tuple[str, Routing]]]:
    """A list to which every call of a router adds its layer and decision; meanwhile nothing is dropped."""
    calls: list[tuple[str, Routing]] = []

    def note(name: str, router: nn.Module, inputs: tuple[Tensor], routing: Routing) -> None:
        calls.append((name, routing))

    handles = [layer.router.register_forward_hook(partial(note, name)) for name, layer in layers.items()]
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        for layer in layers.values():
            stack.enter_context(layer.routed_by.dropping_nothing())
        yield calls


def _count_choices(routing: Routing, images: int) -> Tensor:
    """(I, E) choices of each image for each expert; the rows of an image stand together."""
    expert_IN = routing.experts().reshape(images, -1)
    count_IE = expert_IN.new_zeros(images, len(routing.offsets))
    return count_IE.scatter_add_(1, expert_IN, torch.ones_like(expert_IN)).int().cpu()


def _count_of_patches(layer: str, routing: Routing, patches: Sequence[int], prefix: int) -> Tensor:
    """(B, P, E) choices of each patch for each expert; an image may be there several times, for each member."""
    images, tokens = patches[0], prefix + patches[1]
    rows, top_k = routing.slots.shape
    if rows % (images * tokens):
        raise ValueError(
            f"{layer} routes {rows // images} rows of an image, which are not its {patches[1]} patches and {prefix} "
            "other tokens."
        )
    expert_BMTK = routing.experts().view(images, -1, tokens, top_k)
    expert_BPN = expert_BMTK[:, :, prefix:].transpose(1, 2).flatten(2)
    count_BPE = expert_BPN.new_zeros(*patches, len(routing.offsets))
    return count_BPE.scatter_add_(2, expert_BPN, torch.ones_like(expert_BPN)).to(torch.uint8).cpu()


def call_names(layers: Sequence[str]) -> list[str]:
    """Names of the calls of routers, by the layers that they are of: with their number where one is called again."""
    total, seen = Counter(layers), Counter[str]()
    names = []
    for name in layers:
        seen[name] += 1
        names.append(name if total[name] == 1 else f"{name} (call {seen[name]})")
    return names


def _sum_by_class(count_IE: Tensor, labels: Tensor, classes: int) -> Tensor:
    return torch.zeros(classes, count_IE.shape[1], dtype=torch.double).index_add_(0, labels, count_IE.double())


def mutual_information(count_CE: Tensor) -> float:
    """Nats that the expert of a choice tells about its class, and the other way round, from counts of both."""
    p_CE = count_CE / count_CE.sum()
    entropies = [torch.special.entr(p).sum() for p in (p_CE.sum(0), p_CE.sum(1), p_CE)]
    return max(0.0, (entropies[0] + entropies[1] - entropies[2]).item())


def mutual_information_by_chance(routes: Routes) -> float:
    """The mutual information of experts and labels that are shuffled over the images.

    It is above 0, the more so the fewer images a class has.
    """
    generator = torch.Generator().manual_seed(0)
    shuffled = [routes.labels[torch.randperm(len(routes.labels), generator=generator)] for _ in range(SHUFFLES)]
    counts = (_sum_by_class(routes.count_IE, labels, len(routes.classes)) for labels in shuffled)
    return sum(map(mutual_information, counts)) / SHUFFLES


def summarize(routes: Routes, threshold: float) -> dict[str, Any]:
    """The numbers of one layer.

    Returns:
        ``load``, share of each expert of all choices; ``mean_largest_share``, the largest share of a class, on average;
        ``mutual_information`` of class and expert in nats; ``normalized``, that divided by log E, and ``by_chance``,
        the same for shuffled labels; ``experts_per_image``, the mean number of different ones; and ``kept``, whether
        the layer's experts are worth keeping: ``normalized`` exceeds ``by_chance`` by at least ``threshold``.
    """
    count_CE = routes.count_CE()
    experts = count_CE.shape[1]
    limit = math.log(experts) or 1.0  # a single expert tells nothing
    information = mutual_information(count_CE)
    normalized, by_chance = information / limit, mutual_information_by_chance(routes) / limit
    return {
        "layer": routes.layer,
        "experts": experts,
        "top_k": routes.top_k,
        "load": (count_CE.sum(0) / count_CE.sum()).tolist(),
        "mean_largest_share": routes.share_CE().amax(1).mean().item(),
        "mutual_information": information,
        "normalized": normalized,
        "by_chance": by_chance,
        "experts_per_image": routes.experts_per_image(),
        "kept": normalized - by_chance >= threshold,
    }


def summarize_all(all_routes: Sequence[Routes], threshold: float) -> dict[str, Any]:
    """The numbers of all layers, and of the model: images, experts of an image in all layers, routing degree.

    The routing degree is the number of ways through the experts, C(E, K)^L in L layers; of an ensemble, those of all
    members together.
    """
    layers = [summarize(routes, threshold) for routes in all_routes]
    kept = [routes.degree for routes, layer in zip(all_routes, layers, strict=True) if layer["kept"]]
    patches = {} if all_routes[0].image_I is None else {"patches": len(all_routes[0].labels)}
    return {
        "images": all_routes[0].images(),
        **patches,
        "layers": layers,
        "experts_per_image": sum(layer["experts_per_image"] for layer in layers),
        "routing_degree": math.prod(routes.degree for routes in all_routes),
        "routing_degree_of_kept": math.prod(kept),
    }


def table(summary: Mapping[str, Any]) -> str:
    """A summary to be read."""
    layers = summary["layers"]
    width = max(len("layer"), *(len(layer["layer"]) for layer in layers))
    lines = [f"{'layer':<{width}}  experts  largest share  I(class; expert)  / log E  by chance  experts/image  kept"]
    for layer in layers:
        lines += [
            f"{layer['layer']:<{width}}  {layer['experts']:>7}  {layer['mean_largest_share']:>13.1%}"
            f"  {layer['mutual_information']:>11.3f} nats  {layer['normalized']:>7.3f}"
            f"  {layer['by_chance']:>9.3f}  {layer['experts_per_image']:>13.2f}"
            f"  {'yes' if layer['kept'] else 'no':>4}",
            f"{'  load, %':<{width}}  " + " ".join(f"{100 * share:.1f}" for share in layer["load"]),
        ]
    kept = ", ".join(layer["layer"] for layer in layers if layer["kept"]) or "none"
    images = f"images {summary['images']:,}" + (f", patches {summary['patches']:,}" if "patches" in summary else "")
    return "\n".join(
        [
            *lines,
            f"{images}, experts of an image in all layers {summary['experts_per_image']:.2f}",
            f"routing degree {summary['routing_degree']:,}",
            f"layers worth keeping: {kept}; routing degree {summary['routing_degree_of_kept']:,}",
        ]
    )


def check_output(output_dir: str | Path, overwrite: bool = False) -> None:
    """Raise OSError if the results cannot be written; say so in the log if there will be no plot."""
    check_folder(output_dir, _FILES, overwrite)
    if find_spec("matplotlib") is None:
        _logger.warning("There will be no routes.png, which needs matplotlib: pip install 'timm_moe[evaluate]'.")


def write_routes(all_routes: Sequence[Routes], contents: dict[str, Any], output_dir: str | Path) -> None:
    """Write ``routes.json``, ``routes.csv`` and, if matplotlib is installed, ``routes.png`` to a folder.

    Args:
        all_routes: from :func:`collect_routes`.
        contents: of the JSON file.
        output_dir: folder, which is made if need be, as are its parents. An old plot does not stay beside new numbers.
    """
    with staged(output_dir) as temporary:
        folder = temporary / "routes"
        folder.mkdir()
        _write_files(all_routes, contents, folder)
        publish(folder, Path(output_dir), _FILES)


def _write_files(all_routes: Sequence[Routes], contents: dict[str, Any], folder: Path) -> None:
    dump_json(folder / "routes.json", contents)
    with open(folder / "routes.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["layer", "class", "expert", "share"])
        for routes in all_routes:
            for name, shares in zip(routes.classes, routes.share_CE().tolist(), strict=True):
                writer.writerows([routes.layer, name, expert, share] for expert, share in enumerate(shares))
    if find_spec("matplotlib") is not None:
        plot(all_routes, folder / "routes.png")


def display_order(share_CE: Tensor) -> list[int]:
    """Classes sorted by their most chosen expert, then by its share, the largest first."""
    largest_C, expert_C = share_CE.max(1)
    return sorted(range(len(share_CE)), key=lambda index: (expert_C[index].item(), -largest_C[index].item()))


def plot(all_routes: Sequence[Routes], file: Path) -> None:
    """A heatmap for each layer in one PNG, of the same colours and order of classes, that of the deepest layer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    heatmaps = [routes.share_CE() for routes in all_routes]
    order, deepest = display_order(heatmaps[-1]), all_routes[-1]
    highest = max(share_CE.max().item() for share_CE in heatmaps)
    width = min(max(0.2 * max(share_CE.shape[1] for share_CE in heatmaps), 1.5), 3.0)
    height = min(max(0.11 * len(order), 2.5), PANEL_HEIGHT)
    rows = math.ceil(len(heatmaps) * width / PLOT_WIDTH)
    columns = math.ceil(len(heatmaps) / rows)
    size = (width * columns + 2.5, (height + 0.8) * rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel, routes, share_CE in zip(panels, all_routes, heatmaps, strict=False):
        image = panel.imshow(
            share_CE[order].numpy(), vmin=0, vmax=highest, cmap="cividis_r", aspect="auto", interpolation="nearest"
        )
        panel.set_title(routes.layer, fontsize=8)
        panel.set_xlabel("expert", fontsize=8)
        panel.tick_params(labelsize=7, left=False)
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    for panel in panels[len(heatmaps) :]:
        panel.set_visible(False)
    for panel in panels[::columns]:
        panel.set_ylabel(f"{len(order)} classes, in the order of {deepest.layer}", fontsize=8)
        panel.tick_params(left=True)
        if height / len(order) >= 0.1:  # room for the names
            panel.set_yticks(range(len(order)), [deepest.classes[index] for index in order], fontsize=6)
    length = min(4.0, 0.8 * size[1])
    bar = figure.colorbar(
        image,
        ax=panels.tolist(),
        fraction=0.2 / size[0],
        pad=0.2 / size[0],
        shrink=length / size[1],
        aspect=length / 0.15,
    )
    bar.set_label("share of the class", fontsize=8)
    figure.suptitle("Which expert sees which class? Darker is more.", fontsize=9, fontweight="bold")
    bar.ax.tick_params(labelsize=7)
    figure.savefig(file, format="png", dpi=130)
