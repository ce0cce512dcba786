"""The routers of a model, watched while it classifies images: which experts see which classes.

``timm-moe routes`` and ``timm-moe report`` both watch by :class:`RouterWatcher` and judge by
:meth:`Routes.class_information`. The counts of classes and experts are ViMoE's analysis (arXiv 2410.15732, figures 4, 5
and 8).

Shape suffixes: I images, P patches, M members of an ensemble inside one model (1 without), C classes, E experts,
T rows, K choices of a row.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ..convert.blocks import moe_layers
from ..layers import MoeMlp, Routing
from .data import Inference, batches, class_names
from .segmentation import MaskedImages, majority_labels

#: Random assignments of labels to images over which the figure of chance is averaged.
SHUFFLES = 10


@dataclass(frozen=True)
class RouterCall:
    """One call of a router in evaluation.

    Attributes:
        name: of the expert layer; of one that is called several times in a forward, with the number of the call.
        layer: the expert layer.
        x: input of the router, of shape (B, ..., D).
        routing: the router's decision.
        kept_TK: the experts of each row; E for a choice that was dropped.
        chosen_TK: the same before capacities drop choices.
    """

    name: str
    layer: MoeMlp
    x: Tensor
    routing: Routing
    kept_TK: Tensor
    chosen_TK: Tensor


class RouterWatcher:
    """A context that notes every call of some routers and counts their choices. The forward itself does not change.

    Args:
        layers: expert layers by name, as :func:`timm_moe.convert.blocks.moe_layers` gives them.
        count: from a call and the labels of its batch to the counts (B, M, E), or (B, P, M, E) for labels of patches.
    """

    def __init__(
        self, layers: Mapping[str, MoeMlp], count: Callable[[RouterCall, Tensor], Tensor] | None = None
    ) -> None:
        self._layers = layers
        self._count = count or _count_of_images
        self._noted: list[RouterCall] = []
        self._calls: list[RouterCall] = []
        self._counts: list[list[Tensor]] = []
        self._labels: list[Tensor] = []

    def __enter__(self) -> "RouterWatcher":
        self._handles = [
            layer.router.register_forward_hook(partial(self._note, name)) for name, layer in self._layers.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def end_batch(self, labels: Tensor) -> list[RouterCall]:
        """Count the choices of a batch with labels (B,) of images or (B, P) of patches, and return its calls."""
        total, seen = Counter(call.name for call in self._noted), Counter[str]()
        self._calls = []
        for call in self._noted:
            seen[call.name] += 1
            name = call.name if total[call.name] == 1 else f"{call.name} (call {seen[call.name]})"
            self._calls.append(replace(call, name=name))
        self._noted = []
        self._counts.append([self._count(call, labels) for call in self._calls])
        self._labels.append(labels)
        return self._calls

    def routes(self, class_name: Callable[[int], str], ignore_index: int | None = None) -> list["Routes"]:
        """The routes of all batches, for each call of a forward.

        Args:
            class_name: from the number of a class.
            ignore_index: label of patches without a class.

        Raises:
            ValueError: if no patch has a class.
        """
        numbers = torch.cat(self._labels)
        known = numbers != ignore_index if ignore_index is not None else torch.ones_like(numbers, dtype=torch.bool)
        if not known.any():
            raise ValueError(f"Most pixels of every patch have the label {ignore_index}, so no patch has a class.")
        present, labels = numbers[known].unique(return_inverse=True)
        classes = [class_name(number) for number in present.tolist()]
        image_I = known.nonzero()[:, 0] if numbers.ndim == 2 else None
        return [
            Routes(
                call.name,
                call.chosen_TK.shape[1],
                call.layer.routed_by.routing_degree(),
                torch.cat(counts)[known],
                labels,
                classes,
                image_I,
            )
            for call, counts in zip(self._calls, zip(*self._counts, strict=True), strict=True)
        ]

    def _note(self, name: str, router: nn.Module, inputs: tuple[Tensor], routing: Routing) -> None:
        layer, kept_TK = self._layers[name], routing.experts()
        chosen_TK = kept_TK
        if (kept_TK == layer.num_experts).any():
            with layer.routed_by.dropping_nothing():
                chosen_TK = router.forward(inputs[0]).experts()  # forward, so that this call is not noted too
        self._noted.append(RouterCall(name, layer, inputs[0], routing, kept_TK, chosen_TK))


@dataclass(frozen=True)
class Routes:
    """The experts that images, or their patches, chose in one call of a router, before capacities drop choices.

    Attributes:
        layer: name of the call, as of :class:`RouterCall`.
        top_k: experts of each row.
        degree: number of sets of experts that a row can go to.
        count_IME: choices of each image's rows for each expert. With labels of pixels an entry is a patch.
        labels: (I,) class of each image, or patch, as an index of ``classes``.
        classes: names of the classes that have images, or patches.
        image_I: (I,) number of the image that a patch is of; None where the entries are images.
    """

    layer: str
    top_k: int
    degree: int
    count_IME: Tensor
    labels: Tensor
    classes: Sequence[str]
    image_I: Tensor | None = None

    @property
    def members(self) -> int:
        """M."""
        return self.count_IME.shape[1]

    @property
    def experts(self) -> int:
        """E."""
        return self.count_IME.shape[2]

    @property
    def count_IE(self) -> Tensor:
        """Choices of all members."""
        return self.count_IME.sum(1)

    def load(self) -> Tensor:
        """(E,) share of the choices that went to each expert."""
        count_E = self.count_IE.sum(0).double()
        return count_E / count_E.sum().clamp(min=1)

    def count_CE(self) -> Tensor:
        """Choices of each class for each expert."""
        return self._count_MCE(self.labels).sum(0)

    def share_CE(self) -> Tensor:
        """The heatmap: share of a class's choices that went to each expert; rows sum to 1."""
        count_CE = self.count_CE()
        return count_CE / count_CE.sum(1, keepdim=True).clamp(min=1)

    def images(self) -> int:
        """Number of images."""
        return len(self.labels if self.image_I is None else self.image_I.unique())

    def experts_per_image(self) -> float:
        """Number of different experts that the rows of an image go to, on average."""
        count_IE = self.count_IE
        if self.image_I is not None:
            image_I = self.image_I.unique(return_inverse=True)[1]
            count_IE = count_IE.new_zeros(self.images(), self.experts).index_add_(0, image_I, count_IE)
        return (count_IE > 0).sum(1).double().mean().item()

    def mutual_information(self) -> float:
        """I(class; expert) in nats, the mean over the members."""
        return _information(self._count_MCE(self.labels))[0]

    def class_information(self) -> float:
        """Share of the uncertainty about the expert that the class of the image removes, from 0 to 1.

        I(class; expert) / H(expert), Theil's uncertainty coefficient of the expert given the class (H. Theil,
        Statistical Decomposition Analysis, 1972; Numerical Recipes, section 14.4). It is 0 if all classes are spread
        over the experts alike and 1 if the class decides the expert, also under uneven loads. In an ensemble inside
        one model, both are means over the members. Few images give estimates that are too large: compare them with
        :meth:`class_information_by_chance`.
        """
        return _share(self._count_MCE(self.labels))

    def class_information_by_chance(self) -> float:
        """:meth:`class_information` of shuffled labels: the mean of a permutation test with 10 permutations."""
        generator = torch.Generator().manual_seed(0)
        orders = [torch.randperm(len(self.labels), generator=generator) for _ in range(SHUFFLES)]
        return sum(_share(self._count_MCE(self.labels[order])) for order in orders) / SHUFFLES

    def _count_MCE(self, labels: Tensor) -> Tensor:
        count_MCE = torch.zeros(self.members, len(self.classes), self.experts, dtype=torch.double)
        return count_MCE.index_add_(1, labels, self.count_IME.transpose(0, 1).double())


def _information(count_MCE: Tensor) -> tuple[float, float]:
    """I(class; expert) and H(expert) in nats, means over the members."""
    p_MCE = count_MCE / count_MCE.sum((1, 2), keepdim=True).clamp(min=1)
    expert, label, joint = (
        torch.special.entr(p).sum().item() / len(p_MCE) for p in (p_MCE.sum(1), p_MCE.sum(2), p_MCE)
    )
    return max(0.0, expert + label - joint), expert


def _share(count_MCE: Tensor) -> float:
    information, entropy = _information(count_MCE)
    return information / entropy if entropy > 0 else 0.0


def collect_routes(model: nn.Module, images: ImageDataset, inference: Inference | None = None) -> list[Routes]:
    """Run a model on images and count the choices of its routers, in the order of their calls.

    A token is of the class of its image.

    Args:
        model: from :func:`timm_moe.analysis.data.load_classifiers`.
        images: from :func:`timm_moe.analysis.data.image_folder`.
        inference: settings of the forwards.

    Raises:
        ValueError: if the model has no expert layers, or none with a router that depends on the images.
    """
    inference = inference or Inference()
    with torch.inference_mode(), RouterWatcher(routed_layers(model)) as watcher:
        for (x,), label_B in batches([model], images, inference):
            with inference.autocast():
                model(x)
            watcher.end_batch(label_B.cpu())
    return watcher.routes(class_names(images).__getitem__)


def collect_patch_routes(model: nn.Module, images: MaskedImages, inference: Inference | None = None) -> list[Routes]:
    """Count the choices of a model's routers as :func:`collect_routes`, with a class for each patch.

    It is the class that most pixels of the patch have. Patches most of whose pixels have no class are left out, as are
    the class token and registers. With ``routing_unit=image`` all patches of an image go where their image goes.

    Args:
        model: on its device, in eval mode.
        images: at the size that the model takes.
        inference: settings of the forwards.

    Raises:
        ValueError: as ``collect_routes``; if a router does not see the patches of the images one by one; if a pair of
            image and mask cannot be used; or if no patch has a class.
    """
    inference = inference or Inference()
    layers = routed_layers(model)
    grid, prefix = patch_grid(model)
    with torch.inference_mode(), RouterWatcher(layers, partial(_count_of_patches, prefix)) as watcher:
        for x, labels_BHW in images.batches(inference):
            with inference.autocast():
                model(x)
            watcher.end_batch(majority_labels(labels_BHW, grid))
    return watcher.routes(images.class_name, images.ignore_index)


def routed_layers(model: nn.Module) -> dict[str, MoeMlp]:
    """The expert layers whose router depends on the images.

    Raises:
        ValueError: if there are none.
    """
    layers = moe_layers(model)
    if not layers:
        raise ValueError(f"This {type(model).__name__} has no expert layers, so nothing is routed.")
    routed = {name: layer for name, layer in layers.items() if layer.routed_by.depends_on_input}
    if not routed:
        raise ValueError(
            "All expert layers of this model are random partitions or fused, which do not depend on the images."
        )
    return routed


def patch_grid(model: nn.Module) -> tuple[tuple[int, int], int]:
    """(rows, columns) of a Vision Transformer's patches, and the number of tokens before them.

    Raises:
        ValueError: if the model does not state them.
    """
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    prefix = getattr(model, "num_prefix_tokens", None)
    if grid is None or prefix is None:
        raise ValueError(f"This {type(model).__name__} does not say which of its tokens are which patches of an image.")
    return tuple(grid), prefix


def _count_of_images(call: RouterCall, label_B: Tensor) -> Tensor:
    """(B, M, E) choices of each image for each expert; an ensemble's layer sees an image once for each member."""
    copies = len(call.x) // len(label_B)
    return _count(call.chosen_TK.reshape(len(label_B), copies, -1), call.layer.num_experts).int().cpu()


def _count_of_patches(prefix: int, call: RouterCall, labels_BP: Tensor) -> Tensor:
    """(B, P, M, E) choices of each patch for each expert, after so many other tokens."""
    images, patches = labels_BP.shape
    rows, top_k = call.chosen_TK.shape
    if rows % (images * (prefix + patches)):
        raise ValueError(
            f"{call.name} routes {rows // images} rows of an image, which are not its {patches} patches and {prefix} "
            "other tokens."
        )
    expert_BMPK = call.chosen_TK.view(images, -1, prefix + patches, top_k)[:, :, prefix:]
    return _count(expert_BMPK.transpose(1, 2), call.layer.num_experts).to(torch.uint8).cpu()


def _count(expert: Tensor, num_experts: int) -> Tensor:
    """(..., E) how often each expert is in the last dimension of (..., N)."""
    count = expert.new_zeros(*expert.shape[:-1], num_experts + 1)  # a plugged-in router may still drop choices
    return count.scatter_add_(-1, expert, torch.ones_like(expert))[..., :-1]


def summarize(routes: Routes, threshold: float) -> dict[str, Any]:
    """The numbers of one layer.

    Returns:
        ``load``, share of each expert of all choices; ``mean_largest_share``, the largest share of a class, on average;
        ``mutual_information`` of class and expert in nats; ``normalized``, :meth:`Routes.class_information`, and
        ``by_chance``, the same for shuffled labels; ``experts_per_image``, the mean number of different ones; and
        ``kept``: whether ``normalized`` exceeds ``by_chance`` by at least ``threshold``, so that the layer's experts
        are worth keeping.
    """
    known, by_chance = routes.class_information(), routes.class_information_by_chance()
    return {
        "layer": routes.layer,
        "experts": routes.experts,
        "top_k": routes.top_k,
        "load": routes.load().tolist(),
        "mean_largest_share": routes.share_CE().amax(1).mean().item(),
        "mutual_information": routes.mutual_information(),
        "normalized": known,
        "by_chance": by_chance,
        "experts_per_image": routes.experts_per_image(),
        "kept": known - by_chance >= threshold,
    }


def summarize_all(all_routes: Sequence[Routes], threshold: float) -> dict[str, Any]:
    """The numbers of all layers, and of the model: images, experts of an image in all layers, routing degree.

    The routing degree is the number of ways through the experts, C(E, K)^L in L layers. In an ensemble the ways of all
    members count together.
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
