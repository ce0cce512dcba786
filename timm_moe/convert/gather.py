"""Ways to merge E networks into one: EWA's mean, and OneS's gathering.

OneS is arXiv 2201.10890, section 3.2. Each method takes the stacked tensors of E networks by their
dense names: weights (E, out, in), biases and all else (E, size). It returns the tensors of one
network. Biases are averaged (eq. 7), unless the method says otherwise.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from ..layers.checks import check_choice
from ..layers.experts import mean_over_experts

Weights = Mapping[str, Tensor]


def average(stacked: Weights) -> dict[str, Tensor]:
    """Mean of every tensor (EWA, arXiv 2308.06093, eq. 7; OneS, "Avg")."""
    return {name: mean_over_experts(tensor) for name, tensor in stacked.items()}


def add(stacked: Weights) -> dict[str, Tensor]:
    """Sum of the weights (OneS, "Sum").

    It is not divided by E, since in a routed model only few experts act on a token.
    """
    return singular_values(stacked, ratio=1)


def top_units(stacked: Weights) -> dict[str, Tensor]:
    """Strongest hidden units of each expert, H / E of them, side by side (OneS, "Top-K", eq. 8).

    The strength of a unit is the sum of the norms of its weights to and from it. A unit keeps its
    weights in and out, and its entries of a norm of the hidden units; biases are averaged. If E
    does not divide H, the first experts give one unit more.

    Raises:
        ValueError: unless the network has layers into one hidden layer and one layer, named
            ``fc2``, out of it.
    """
    if "fc2.weight" not in stacked or stacked["fc2.weight"].ndim != 3:
        raise ValueError("Gathering by top-k needs a network whose last layer is fc2.")
    outward_EDH = stacked["fc2.weight"]
    num_experts, _, hidden = outward_EDH.shape
    weights = [
        name for name, tensor in stacked.items() if tensor.ndim == 3 and name != "fc2.weight"
    ]
    if not weights or any(stacked[name].shape[1] % hidden for name in weights):
        raise ValueError("Gathering by top-k needs layers that lead into the hidden units of fc2.")

    # A gated network has two rows for a unit, in one layer or in two.
    inward = {name: stacked[name].unflatten(1, (-1, hidden)) for name in weights}
    strength_EH = outward_EDH.norm(dim=1) + sum(rows.norm(dim=3).sum(1) for rows in inward.values())
    sizes = [
        hidden // num_experts + (expert < hidden % num_experts) for expert in range(num_experts)
    ]
    kept = [
        row.topk(size).indices.sort().values for row, size in zip(strength_EH, sizes, strict=True)
    ]

    def of_kept(tensor: Tensor, dim: int) -> Tensor:
        """Join the entries of the kept units of all experts; ``dim`` counts without E."""
        return torch.cat(
            [part.index_select(dim, units) for part, units in zip(tensor, kept, strict=True)], dim
        )

    network = {}
    for name, tensor in stacked.items():
        if name == "fc2.weight":
            network[name] = of_kept(tensor, 1)
        elif name in inward:
            network[name] = of_kept(inward[name], 1).flatten(0, 1)
        elif name.startswith("norm."):
            network[name] = of_kept(tensor, 0)
        else:
            network[name] = mean_over_experts(tensor)
    return network


def singular_values(stacked: Weights, ratio: float = 0.75) -> dict[str, Tensor]:
    """Sum of the experts' weights, each at a low rank (OneS, "SVD", eqs. 9-13).

    The largest singular values are kept until they reach ``ratio``, above 0 and at most 1, of the
    sum of all. With 1 this is :func:`add`.

    Raises:
        ValueError: if the ratio is out of range.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise ValueError(f"svd_ratio must be above 0 and at most 1, got {ratio!r}.")
    return {
        name: _sum_truncated(tensor, ratio) if tensor.ndim == 3 else mean_over_experts(tensor)
        for name, tensor in stacked.items()
    }


def _sum_truncated(weight_EOI: Tensor, ratio: float) -> Tensor:
    """Sum of E matrices (E, out, in), each at the lowest rank whose values reach the ratio."""
    precise = torch.promote_types(weight_EOI.dtype, torch.float32)
    total = torch.zeros_like(weight_EOI[0], dtype=precise)
    for weight in weight_EOI:  # one at a time, for little memory
        if ratio == 1:
            total += weight
            continue
        u, values, v = torch.linalg.svd(weight.to(precise), full_matrices=False)
        rank = int((values.cumsum(0) < ratio * values.sum()).sum()) + 1
        total += (u[:, :rank] * values[:rank]) @ v[:rank]
    return total.to(weight_EOI.dtype)


def random_weights(stacked: Weights) -> dict[str, Tensor]:
    """New weights instead of the experts': OneS's baseline "Switch" (table 1).

    Only the other layers then come from the teacher, as in the distillation of Switch Transformers
    (arXiv 2101.03961). Weights are drawn as in timm's ViT, with standard deviation 0.02; biases are
    zero, scales of norms one.
    """
    drawn = {}
    for name, tensor in stacked.items():
        drawn[name] = torch.full_like(tensor[0], 0 if name.endswith("bias") else 1)
        if tensor.ndim > 2:
            drawn[name].copy_(
                nn.init.trunc_normal_(torch.empty(tensor.shape[1:], device=tensor.device), std=0.02)
            )
    return drawn


METHODS: dict[str, Callable[..., dict[str, Tensor]]] = dict(
    average=average, sum=add, topk=top_units, svd=singular_values, random=random_weights
)


def get_method(name: str, svd_ratio: float | None = None) -> Callable[[Weights], dict[str, Tensor]]:
    """Look up a method of :data:`METHODS`.

    Args:
        name: name of the method.
        svd_ratio: the ratio of ``"svd"``, by default 0.75.

    Raises:
        ValueError: if there is no such method, or a ratio is given to another method than
            ``"svd"``.
    """
    check_choice("method", name, METHODS)
    if svd_ratio is not None and name != "svd":
        raise ValueError(f"svd_ratio is an option of method='svd', got method={name!r}.")
    return METHODS[name] if svd_ratio is None else partial(METHODS[name], ratio=svd_ratio)
