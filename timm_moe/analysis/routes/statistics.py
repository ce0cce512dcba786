"""Routers watched while a model classifies images: which experts see which classes.

The counts of classes and experts are ViMoE's analysis (arXiv 2410.15732, figures 4, 5 and 8).

Shape suffixes: I images, P patches, M members of an ensemble inside one model (1 without), C
classes, E experts, N rows of an image, T rows of a batch, K choices of a row.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ...convert.expert_layers import moe_layers
from ...layers import AnyRouting, MoeMlp, Routing
from ...timm_classes import is_from
from ..data import Inference, batches, class_names, device_and_type, in_eval_mode
from ..rows import Rows
from .segmentation import MaskedImages, majority_labels

#: Permutations of labels over which the figure of chance is averaged.
SHUFFLES = 10
#: Entries that are summed at once, in double precision.
_AT_ONCE = 2**14
#: Modules of timm whose models do not have patches in the order of an image's rows. Hiera has them
#: by units of masks, NesT by blocks.
OTHER_ORDER = ("hiera", "nest")


def patch_grid(model: Any, x: Tensor, size: Sequence[int]) -> tuple[int, int] | None:
    """Find the rows and columns of an image's patches in the input of a layer.

    Args:
        model: that the layer is in.
        x: (B, ..., D), the input of the layer.
        size: (height, width) of the image.

    Returns:
        None if the rows of the input are not patches in the image's order.
    """
    if is_from(model, *OTHER_ORDER):
        return None
    if x.ndim == 4:  # (B, H, W, D)
        return (x.shape[1], x.shape[2])
    patches = math.prod(x.shape[1:-1]) - int(getattr(model, "num_prefix_tokens", 0))
    embedding: Any = getattr(model, "patch_embed", None)
    if hasattr(embedding, "dynamic_feat_size"):
        grid = embedding.dynamic_feat_size(tuple(size))
        if math.prod(grid) == patches:
            return grid
    side = round((patches * size[0] / size[1]) ** 0.5)
    return (side, patches // side) if side and side * (patches // side) == patches else None


@dataclass(frozen=True)
class RouterCall:
    """One call of a router in evaluation."""

    name: str  #: of the expert layer, with the number of the call if a forward has several
    layer: MoeMlp
    x: Tensor  #: (B, ..., D), input of the router
    routing: Any  #: the routing, or what the router of Soft MoE gives instead
    kept_TK: Tensor  #: experts of each row; E for a choice that was dropped; empty in Soft MoE
    chosen_TK: Tensor  #: the same before capacities drop choices


class RouterWatcher(ExitStack):
    """Context that notes every call of some routers and counts their choices.

    The forward itself does not change.

    Args:
        layers: expert layers by name, as :func:`timm_moe.convert.expert_layers.moe_layers`
            gives them.
        prefix: number of tokens before an image's patches, if these have the labels.
    """

    def __init__(self, layers: Mapping[str, MoeMlp], prefix: int = 0):
        super().__init__()
        self._prefix = prefix
        self._noted: list[RouterCall] = []
        self._calls: list[RouterCall] = []
        self._counts: list[Rows] = []
        self._labels = Rows()
        for name, layer in layers.items():
            hook = layer.router.register_forward_hook(partial(self._note, name, layer))
            self.callback(hook.remove)

    def end_batch(self, labels: Tensor) -> list[RouterCall]:
        """Count the choices of a batch, and return all of its calls.

        Args:
            labels: (B,) of images or (B, P) of patches.
        """
        names = [call.name for call in self._noted]
        calls = [
            replace(call, name=f"{name} (call {names[: index + 1].count(name)})")
            if names.count(name) > 1
            else call
            for index, (name, call) in enumerate(zip(names, self._noted, strict=True))
        ]
        self._calls = [call for call in calls if call.layer.router.depends_on_input]
        self._noted = []
        self._counts = self._counts or [Rows() for _ in self._calls]
        for counts, call in zip(self._counts, self._calls, strict=True):
            counts.add(self._count(call, labels))
        self._labels.add(labels)
        return calls

    def routes(self, class_name: Callable[[int], str], ignore_index: int = -1) -> list["Routes"]:
        """Return the routes of all batches, one for each call of a forward.

        Args:
            class_name: gives the name of a class by its number.
            ignore_index: label of what has no class.

        Raises:
            ValueError: if all labels are ``ignore_index``.
        """
        numbers = self._labels.tensor()
        known = numbers != ignore_index
        if not known.any():
            raise ValueError(
                f"Most pixels of every patch have the label {ignore_index}, so no patch has a "
                "class."
            )
        present, indices = numbers[known].unique(return_inverse=True)
        labels = torch.full_like(numbers, -1).masked_scatter(known, indices)
        classes = [class_name(number) for number in present.tolist()]
        routes = []
        for call, counts in zip(self._calls, self._counts, strict=True):
            top_k, degree = call.chosen_TK.shape[1], call.layer.router.routing_degree()
            routes.append(Routes(call.name, top_k, degree, counts.tensor(), labels, classes))
        return routes

    def _count(self, call: RouterCall, labels: Tensor) -> Tensor:
        """Count the choices of images, (B, M, E), or patches, (B, P, M, E)."""
        chosen_BMNK = call.chosen_TK.unflatten(0, (len(labels), call.layer.router.copies(), -1))
        if labels.ndim == 1:
            chosen = chosen_BMNK.flatten(2)
        else:
            rows, patches = chosen_BMNK.shape[2], labels.shape[1]
            if rows != self._prefix + patches:
                raise ValueError(
                    f"{call.name} routes {rows} rows of an image, which are not its {patches} "
                    f"patches and {self._prefix} other tokens."
                )
            chosen = chosen_BMNK[:, :, self._prefix :].transpose(1, 2)
        # A router from outside this package may drop choices. They have the number E.
        count = chosen.new_zeros(*chosen.shape[:-1], call.layer.num_experts + 1)
        count.scatter_add_(-1, chosen, torch.ones_like(chosen))
        return count[..., :-1].to(torch.int32 if labels.ndim == 1 else torch.uint8)

    def _note(
        self, name: str, layer: MoeMlp, router: nn.Module, inputs: tuple[Tensor, ...], routing: Any
    ) -> None:
        kept_TK = chosen_TK = torch.empty(0, 0, dtype=torch.long)
        if isinstance(routing, AnyRouting):
            kept_TK = chosen_TK = routing.experts()
        if isinstance(routing, Routing) and routing.chosen is not None:
            chosen_TK = routing.chosen
        self._noted.append(RouterCall(name, layer, inputs[0], routing, kept_TK, chosen_TK))


@dataclass(frozen=True)
class Routes:
    """Experts that images, or their patches, chose in one call of a router.

    These are the choices before capacities drop some.
    """

    layer: str  #: name of the call
    top_k: int  #: experts of each row
    degree: int  #: number of sets of experts that a row can go to
    #: choices of each image's rows for each expert, (I, M, E), or of each patch, (I, P, M, E)
    counts: Tensor
    #: class of each image, (I,), or patch, (I, P), as an index of ``classes``; -1 is none
    labels: Tensor
    classes: Sequence[str]  #: names of the classes that are there

    @property
    def members(self) -> int:
        """Number of members of an ensemble inside the model; 1 without."""
        return self.counts.shape[-2]

    @property
    def experts(self) -> int:
        """Number of experts of the layer."""
        return self.counts.shape[-1]

    def load(self) -> Tensor:
        """Return the share of all choices that went to each expert, (E,)."""
        count_E = self._count_MCE(self.labels).sum((0, 1))
        return count_E / count_E.sum().clamp(min=1)

    def share_CE(self) -> Tensor:
        """Return the share of a class's choices that went to each expert; rows sum to 1."""
        count_CE = self._count_MCE(self.labels).sum(0)
        return count_CE / count_CE.sum(1, keepdim=True).clamp(min=1)

    def images(self) -> int:
        """Return the number of images that have a class, or a patch with one."""
        return int((self.labels >= 0).view(len(self.labels), -1).any(1).sum())

    def patches(self) -> int:
        """Return the number of patches, or images, that have a class."""
        return int((self.labels >= 0).sum())

    def experts_per_image(self) -> float:
        """Return the mean number of different experts that the rows of an image go to."""
        used = (self.counts > 0).any(-2) & (self.labels >= 0).unsqueeze(-1)
        used_IE = used.view(len(used), -1, self.experts).any(1)
        return used_IE.sum().item() / self.images()

    def mutual_information(self) -> float:
        """Return I(class; expert) in nats, the mean over the members."""
        return self._information(self.labels)[0]

    def class_information(self) -> float:
        """Return the share of the uncertainty about the expert that the class removes.

        It is from 0 to 1: I(class; expert) / H(expert), Theil's uncertainty coefficient (Numerical
        Recipes, section 14.4), both means over the members of an ensemble. It is 0 if all classes
        are spread over the experts alike and 1 if the class decides the expert, also under uneven
        loads. Few images give estimates that are too large: compare them with
        :meth:`class_information_by_chance`.
        """
        return self._information(self.labels)[1]

    def class_information_by_chance(self) -> float:
        """Return the mean :meth:`class_information` of shuffled labels: a permutation test.

        The patches of an image are alike, so their labels stay together, each at its place. What
        has no class after the shuffle is left out.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        images = len(self.labels)
        orders = [
            torch.randperm(images, generator=generator, device="cpu") for _ in range(SHUFFLES)
        ]
        return sum(self._information(self.labels[order])[1] for order in orders) / SHUFFLES

    def _count_MCE(self, labels: Tensor) -> Tensor:
        count_MCE = torch.zeros(self.members, len(self.classes), self.experts, dtype=torch.double)
        parts = labels.flatten().split(_AT_ONCE), self.counts.flatten(0, -3).split(_AT_ONCE)
        for label, count in zip(*parts, strict=True):
            known = label >= 0
            count_MCE.index_add_(1, label[known], count[known].transpose(0, 1).double())
        return count_MCE

    def _information(self, labels: Tensor) -> tuple[float, float]:
        """Return I(class; expert) in nats, and its share of H(expert)."""
        count_MCE = self._count_MCE(labels)
        p_MCE = count_MCE / count_MCE.sum((1, 2), keepdim=True).clamp(min=1)
        parts = (p_MCE.sum(1), p_MCE.sum(2), p_MCE)
        expert, label, joint = (torch.special.entr(p).sum().item() / self.members for p in parts)
        information = max(0.0, expert + label - joint)
        return information, information / expert if expert > 0 else 0.0


def collect_routes(model: nn.Module, images: ImageDataset, inference: Inference) -> list[Routes]:
    """Run a model on images and count the choices of its routers, in the order of their calls.

    The model is from :func:`timm_moe.analysis.data.load_classifiers`. A token is of the class of
    its image. Capacities are off.

    Raises:
        ValueError: if the model has no expert layers, or none that routes by the images in
            evaluation.
    """
    of_images = ((x, label_B.cpu()) for (x,), label_B in batches([model], images, inference))
    return _watch(model, of_images, inference).routes(class_names(images).__getitem__)


def collect_patch_routes(
    model: nn.Module, images: MaskedImages, inference: Inference
) -> list[Routes]:
    """Count the choices of a model's routers, with a class for each patch.

    Otherwise it is as :func:`collect_routes`. The class of a patch is the one that most of its
    pixels have.

    Patches most of whose pixels have no class are left out, as are the class token and registers.
    With ``routing_unit=image`` all patches of an image go where their image goes.

    Raises:
        ValueError: as ``collect_routes``; if the model does not say where its patches are, or a
            router does not see them one by one; if a pair of image and mask cannot be used; or if
            no patch has a class.
    """
    prefix: Any = getattr(model, "num_prefix_tokens", None)
    embedding: Any = getattr(model, "patch_embed", None)
    if prefix is None or not hasattr(embedding, "feat_ratio"):
        raise ValueError(
            f"A {type(model).__name__} lacks num_prefix_tokens or patch_embed.feat_ratio, so the "
            "patches that its tokens stand for are not known: give a ViT."
        )
    patch_size = embedding.feat_ratio(as_scalar=False)
    place = device_and_type(model, inference)
    of_patches = (
        (x.to(*place), majority_labels(labels_BHW, patch_size))
        for x, labels_BHW in images.batches(inference)
    )
    with in_eval_mode([model]):
        return _watch(model, of_patches, inference, prefix).routes(
            images.class_name, images.ignore_index
        )


@torch.inference_mode()
def _watch(
    model: nn.Module,
    labelled: Iterable[tuple[Tensor, Tensor]],
    inference: Inference,
    prefix: int = 0,
) -> RouterWatcher:
    layers = routed_layers(model)
    if not layers and moe_layers(model):
        raise ValueError(
            "No token of this model chooses its experts in evaluation (random partitions, Expert "
            "Choice, Soft MoE, experts that are one network then), so there are no routes of "
            "classes: give a model whose tokens choose, such as vmoe_b16."
        )
    if not layers:
        raise ValueError(f"This {type(model).__name__} has no expert layers, so nothing is routed.")
    with RouterWatcher(layers, prefix) as watcher:
        for layer in layers.values():
            watcher.enter_context(layer.router.dropping_nothing())
        for x, labels in labelled:
            with inference.autocast(x):
                model(x)
            watcher.end_batch(labels)
    return watcher


def routed_layers(model: nn.Module) -> dict[str, MoeMlp]:
    """Find the expert layers that route by the images in evaluation, by their paths."""
    return {
        path: layer
        for path, layer in moe_layers(model).items()
        if layer.router.depends_on_input and not layer.deploys_dense
    }


def summarize(routes: Routes, threshold: float) -> dict[str, Any]:
    """Return the numbers of one layer, mostly methods of :class:`Routes`.

    ``mean_largest_share`` is the largest share of a class, on average; ``normalized`` is the
    class's information, ``by_chance`` the same for shuffled labels. If they differ by
    ``threshold``, the layer's experts are worth keeping.
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
    """Return the numbers of all layers, and of the model.

    The model's are its images, the experts of an image in all layers, and the routing degree.

    The routing degree is the number of ways through the experts, C(E, K)^L in L layers, of all
    members together. If a token takes up to K experts, sets of all sizes count.
    """
    layers = [summarize(routes, threshold) for routes in all_routes]
    kept = [
        routes.degree for routes, layer in zip(all_routes, layers, strict=True) if layer["kept"]
    ]
    first = all_routes[0]
    return {
        "images": first.images(),
        **({"patches": first.patches()} if first.labels.ndim == 2 else {}),
        "layers": layers,
        "experts_per_image": sum(layer["experts_per_image"] for layer in layers),
        "routing_degree": math.prod(routes.degree for routes in all_routes),
        "routing_degree_of_kept": math.prod(kept),
    }
