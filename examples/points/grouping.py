"""Group the points of clouds with their neighbours, in plain PyTorch, for a whole batch at once."""

import torch
from torch import Tensor


def farthest_points(points: Tensor, count: int) -> Tensor:
    """Return the indices of points that are far from each other.

    This is farthest point sampling (PointNet++, section 3.2).

    The first point of the cloud is chosen first. Each further one is the farthest from all chosen
    before. A cloud with fewer distinct points repeats its first one.

    Args:
        points: (B, N, C).
        count: how many to choose.

    Returns:
        Indices, (B, count).

    Raises:
        ValueError: if a cloud has fewer than ``count`` points, or coordinates that are not finite.
    """
    check_clouds(points, count)
    rows = torch.arange(len(points), device=points.device)
    chosen = torch.zeros(len(points), count, dtype=torch.long, device=points.device)
    distance = points.new_full(points.shape[:2], torch.inf)
    for place in range(1, count):
        latest = points[rows, chosen[:, place - 1]]
        distance = torch.minimum(distance, (points - latest[:, None]).square().sum(-1))
        chosen[:, place] = distance.argmax(1)
    return chosen


def check_clouds(points: Tensor, count: int) -> None:
    """Raise ValueError unless these are clouds (B, N, C) of enough points.

    There must be at least ``count`` points, with finite coordinates.
    """
    if points.dim() != 3:
        raise ValueError(
            "A batch of clouds has the shape (clouds, points, coordinates), not "
            f"{tuple(points.shape)}."
        )
    if points.shape[1] < count:
        raise ValueError(f"{count} points are needed of each cloud, these have {points.shape[1]}.")
    if not points.isfinite().all():
        cloud = (~points.isfinite()).flatten(1).any(1).nonzero()[0].item()
        raise ValueError(f"Cloud {cloud} of the batch has coordinates that are not finite.")


def nearest_points(points: Tensor, centers: Tensor, count: int) -> Tensor:
    """Indices (B, G, count) of the points (B, N, C) nearest to each of the centres (B, G, C)."""
    check_clouds(points, count)
    # The faster way loses small distances far from the origin.
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(centers, points, compute_mode=exact).topk(count, largest=False).indices


def gather_points(values: Tensor, indices: Tensor) -> Tensor:
    """Take the rows of values (B, N, C) at indices (B, ...): (B, ..., C)."""
    rows = torch.arange(len(values), device=values.device)
    return values[rows.view(-1, *[1] * (indices.dim() - 1)), indices]


def group_points(points: Tensor, num_groups: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Choose far centres and the neighbours of each; groups may overlap (Point-BERT, section 3.1).

    Args:
        points: (B, N, 3).
        num_groups: G, how many centres.
        group_size: K, neighbours of each, including the centre.

    Returns:
        The neighbours' places relative to their centre, (B, G, K, 3), and the centres, (B, G, 3).

    Raises:
        ValueError: if a cloud has fewer points than that, or coordinates that are not finite.
    """
    centers = gather_points(points, farthest_points(points, num_groups))
    neighbors = gather_points(points, nearest_points(points, centers, group_size))
    return neighbors - centers[:, :, None], centers


def normalize(points: Tensor) -> Tensor:
    """Move the mean of clouds (B, N, C) to 0 and scale the farthest point to distance 1.

    Single points stay at 0.
    """
    points = points - points.mean(1, keepdim=True)
    return points / points.norm(dim=-1).amax(1).clamp_min(1e-9)[:, None, None]
