"""Several images in one forward (MIMO, arXiv 2010.06610; pBE, 2110.03360, appendix C): which go together.

Shape suffixes: M members, B images, R repetitions, T = R B rows of a mixed batch.
"""

import torch
from torch import Tensor


def draw_mixture(
    batch: int, members: int, input_repetition: float, batch_repetitions: int, device: torch.device | None = None
) -> Tensor:
    """(T, M) numbers of images: row t of a mixed batch shows image ``[t, m]`` to member m, who sees each image R times.

    Args:
        batch: B.
        members: M.
        input_repetition: share of the rows that show all members the same image.
        batch_repetitions: R.
        device: of the result.

    Raises:
        ValueError: if so few rows are left to be shuffled that all members would see the same image in each.
    """
    rows = batch * batch_repetitions
    shuffled = int(rows * (1 - input_repetition))
    if members > 1 and shuffled < 2:
        raise ValueError(
            f"A batch of {batch} with input_repetition={input_repetition} leaves nothing to shuffle, so that no member "
            "would learn to tell its image from the others: take a larger batch."
        )
    image_T = torch.randperm(rows, device=device) % batch
    first_T, others_T = image_T[:shuffled], image_T[shuffled:]
    drawn = [first_T[torch.randperm(shuffled, device=device)] for _ in range(members)]
    return torch.stack([torch.cat([own_T, others_T]) for own_T in drawn], 1)


def mix(x: Tensor, image_TM: Tensor) -> Tensor:
    """Images (B, C, H, W) as rows (T, M C, H, W), those of the members one after the other in the channels."""
    return x[image_TM].flatten(1, 2)


def unmix(output: Tensor, image_TM: Tensor, batch: int) -> Tensor:
    """Outputs (T, M, ...) in the order of the B images: (B, R M, ...), of each all that its members put out for it."""
    row_TM = image_TM.argsort(dim=0, stable=True)
    member_M = torch.arange(image_TM.shape[1], device=output.device)
    return output[row_TM, member_M].unflatten(0, (batch, -1)).flatten(1, 2)
