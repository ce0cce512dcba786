"""Shifted patches (SPT) and locality self-attention (LSA).

Both help transformers learn from small data sets and come from "Vision Transformer for Small-Size
Datasets" (arXiv 2112.13492); details follow the authors' code. Shape suffixes: B images, C
channels, H and W pixels or tokens of a grid, N tokens, D width.
"""

from typing import Any

import torch
from timm.layers import Attention, PatchEmbed, resolve_self_attn_mask
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn
from torch.nn.functional import pad, pixel_unshuffle

from ..layers.checks import check_flag


def check_flags(shifted_patches: bool, locality_attention: bool) -> None:
    """Raise ValueError unless the two options of a small-data model are booleans."""
    check_flag("shifted_patches", shifted_patches)
    check_flag("locality_attention", locality_attention)


class ShiftedPatches(nn.Module):
    """Tokens of patches that see beyond their edges: Shifted Patch Tokenization (section 3.1).

    The input and four copies, shifted diagonally by half a patch and padded with zeros, are cut
    into patches together. Each patch is flattened, normalised and projected.

    Args:
        in_channels: C.
        dim: D, width of the tokens.
        patch_size: side of a square patch, in pixels.
        norm_layer: class of the norm; LayerNorm by default.
        bias: add a bias in the projection.
        like: ``device`` and ``dtype`` of the parameters.
    """

    def __init__(
        self,
        in_channels: int,
        dim: int,
        patch_size: int,
        norm_layer: Any = None,
        bias: bool = True,
        **like: Any,
    ):
        super().__init__()
        if not isinstance(patch_size, int):
            raise ValueError(
                "patch_size must be an integer with shifted_patches=True, the side of a square: "
                f"got {patch_size!r}."
            )
        self.patch_size = patch_size
        width = 5 * in_channels * patch_size**2
        self.norm = (norm_layer or nn.LayerNorm)(width, **like)
        self.linear = nn.Linear(width, dim, bias=bias, **like)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map images (B, C, H, W) to tokens (B, D, H / patch_size, W / patch_size).

        Sides are rounded up.
        """
        height, width = x_BCHW.shape[2:]
        x_BCHW = pad(x_BCHW, (0, -width % self.patch_size, 0, -height % self.patch_size))
        patches = pixel_unshuffle(shifted(x_BCHW, self.patch_size // 2), self.patch_size)
        return self.linear(self.norm(patches.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def shifted(x_BCHW: Tensor, shift: int) -> Tensor:
    """Stack images with four copies that are shifted diagonally by ``shift`` pixels.

    The copies are padded with zeros. The result has the shape (B, 5 C, H, W).
    """
    diagonals = ((shift, shift), (-shift, shift), (shift, -shift), (-shift, -shift))
    copies = [pad(x_BCHW, (right, -right, down, -down)) for right, down in diagonals]
    return torch.cat([x_BCHW, *copies], 1)


class ShiftedPatchEmbed(PatchEmbed):
    """timm's PatchEmbed with shifted patches, whose size cannot change, instead of its convolution.

    It takes PatchEmbed's arguments; ``norm_layer`` acts on the flattened patches, see
    :class:`ShiftedPatches`.
    """

    def __init__(
        self, img_size: Any, patch_size: int, in_chans: int, embed_dim: int, **kwargs: Any
    ):
        own = ("norm_layer", "bias", "device", "dtype")
        options = {name: kwargs.pop(name) for name in own if name in kwargs}
        super().__init__(img_size, patch_size, in_chans, embed_dim, **kwargs, device="meta")
        self.proj: Any = ShiftedPatches(in_chans, embed_dim, patch_size, **options)


class ShiftedPatchMerging(nn.Module):
    """Swin's patch merging by shifted patches: (B, H, W, dim) -> (B, H / 2, W / 2, out_dim)."""

    def __init__(self, dim: int, out_dim: int, **like: Any):
        super().__init__()
        self.patches = ShiftedPatches(dim, out_dim, 2, **like)

    def forward(self, x_BHWD: Tensor) -> Tensor:
        """Merge each 2 x 2 tokens to one; sides are rounded up."""
        return self.patches(x_BHWD.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class ShiftedPooling(nn.Module):
    """PiT's pooling by shifted patches.

    It maps tokens (B, dim, H, W) to (B, out_dim, H / 2, W / 2), and class tokens (B, N, dim) to (B,
    N, out_dim).
    """

    def __init__(self, dim: int, out_dim: int, **like: Any):
        super().__init__()
        self.patches = ShiftedPatches(dim, out_dim, 2, **like)
        self.fc = nn.Linear(dim, out_dim, **like)

    def forward(self, x_BDHW: Tensor, cls_token_BND: Tensor) -> tuple[Tensor, Tensor]:
        """Merge each 2 x 2 tokens to one, and project class tokens to the new width."""
        return self.patches(x_BDHW), self.fc(cls_token_BND)


class _Locality(nn.Module):
    """LSA's learned scale for an attention of timm, which multiplies its queries by ``scale``."""

    def __init__(self: Any, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        initial = self.qkv.weight.new_full((self.num_heads, 1, 1), self.scale)
        del self.scale
        # The authors learn the inverse of the temperature and decay it. timm's optimizers decay it
        # too, as it has more than one dimension.
        self.scale = nn.Parameter(initial)
        self.fused_attn = False  # Fused attention has a scale of its own.


# mypy objects to fused_attn, which is final for TorchScript.
class LocalityAttention(_Locality, Attention):  # type: ignore[misc]
    """timm's Attention with a learned temperature per head; no token attends to itself.

    This is LSA (section 3.2). The constructor takes timm's arguments. The parameter ``scale``
    (heads, 1, 1) is the inverse of the temperature, initially 1 / sqrt(head dimension).
    """

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Attend as timm does, from tokens (B, N, D) to tokens of the same shape."""
        mask = resolve_self_attn_mask(x.shape[1], x, attn_mask, is_causal)
        diagonal_NN = diagonal(x.shape[1], x)
        return super().forward(x, diagonal_NN if mask is None else mask + diagonal_NN)


class LocalityWindowAttention(_Locality, WindowAttention):  # type: ignore[misc]  # likewise
    """Swin's attention with LSA in each window, as :class:`LocalityAttention`."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend as timm does, within windows of N tokens, (windows B, N, D)."""
        diagonal_NN = diagonal(x.shape[1], x)
        return super().forward(x, diagonal_NN[None] if mask is None else mask + diagonal_NN)


def diagonal(tokens: int, like: Tensor) -> Tensor:
    """Make a mask (N, N) with a very low number on the diagonal and 0 elsewhere.

    The number is finite, like the authors' -987654321, so that a token without others attends to
    itself.
    """
    index = torch.arange(tokens, device=like.device)
    lowest = max(-987654321.0, torch.finfo(like.dtype).min / 2)
    # This takes the place of torch.eye, of which ONNX has no boolean form.
    return like.new_zeros(tokens, tokens).masked_fill(index == index[:, None], lowest)
