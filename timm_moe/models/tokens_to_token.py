"""T2T-ViT (arXiv 2101.11986) in the size of arXiv 2112.13492.

The second paper is "Vision Transformer for Small-Size Datasets". Overlapping windows of the image
become tokens, which attend to each other and are merged again. Details follow that paper's code.
Shape suffixes: B images, C channels, H and W pixels or tokens of a grid, N tokens, D width.
"""

from functools import partial
from typing import Any

import torch
from timm.layers import Attention, Mlp, PatchEmbed
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, unfold

from .locality import LocalityAttention, check_flags, diagonal, shifted
from .vision_transformer import PreLogitsVisionTransformer

#: Side, stride and padding of the windows that become tokens.
WINDOW = dict(kernel_size=3, stride=2, padding=1)
WINDOW_AREA = 9
#: Width of the tokens between splits.
TOKEN_DIM = 64


class TokenAttention(nn.Module):
    """Attention of one head from tokens (B, N, dim) to (B, N, out_dim).

    Its shortcut adds the values. Queries are scaled by 1 / sqrt(dim).

    Args:
        dim: width of the tokens.
        out_dim: width of the result.
        locality: no token attends to itself, and the scale is learned (LSA).
        like: ``device`` and ``dtype`` of the parameters.
    """

    def __init__(self, dim: int, out_dim: int, locality: bool, **like: Any):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * out_dim, bias=False, **like)
        self.proj = nn.Linear(out_dim, out_dim, **like)
        scale = dim**-0.5
        self.scale = nn.Parameter(torch.full((1, 1, 1), scale, **like)) if locality else scale

    def forward(self, x_BND: Tensor) -> Tensor:
        """Attend, and add the values."""
        # The one head gets a dimension, which ONNX needs.
        queries, keys, values = self.qkv(x_BND).unsqueeze(1).chunk(3, -1)
        mask = diagonal(x_BND.shape[1], queries) if isinstance(self.scale, nn.Parameter) else None
        attended = scaled_dot_product_attention(
            queries * self.scale, keys, values, attn_mask=mask, scale=1.0
        )
        return (values + self.proj(attended)).squeeze(1)


class TokenTransformer(nn.Module):
    """Attention and MLP between two splits; it takes the arguments of :class:`TokenAttention`."""

    def __init__(self, dim: int, out_dim: int, locality: bool, **like: Any):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, **like)
        self.attn = TokenAttention(dim, out_dim, locality, **like)
        self.norm2 = nn.LayerNorm(out_dim, **like)
        # A module of the name "mlp" would get experts.
        self.feed_forward = Mlp(out_dim, out_dim, **like)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Map tokens (B, N, dim) to (B, N, out_dim)."""
        x_BND = self.attn(self.norm1(x_BND))
        return x_BND + self.feed_forward(self.norm2(x_BND))


class TokensToToken(nn.Module):
    """Embedding of images as tokens: (B, C, H, W) -> (B, D, H / 2^splits, W / 2^splits).

    Args:
        in_channels: C.
        dim: D.
        splits: number of splits, each of which halves the grid; tokens attend to each other in
            between.
        shifted_patches: stack the image with four shifted copies (SPT).
        locality_attention: use LSA between the splits.
        like: ``device`` and ``dtype`` of the parameters.
    """

    def __init__(
        self,
        in_channels: int,
        dim: int,
        splits: int,
        shifted_patches: bool,
        locality_attention: bool,
        **like: Any,
    ):
        super().__init__()
        self.shifted_patches = shifted_patches
        widths = [in_channels * (5 if shifted_patches else 1), *[TOKEN_DIM] * (splits - 1)]
        self.transformers = nn.ModuleList(
            TokenTransformer(width * WINDOW_AREA, TOKEN_DIM, locality_attention, **like)
            for width in widths[:-1]
        )
        self.project = nn.Linear(widths[-1] * WINDOW_AREA, dim, **like)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Make tokens on a grid; sides are rounded up at each split."""
        if self.shifted_patches:
            x_BCHW = shifted(x_BCHW, 1)
        for transformer in self.transformers:
            x_BCHW = _split(x_BCHW, transformer)
        return _split(x_BCHW, self.project)


def _split(x_BCHW: Tensor, layer: nn.Module) -> Tensor:
    """Cut images into overlapping windows (B, N, 9 C), and put a layer's output on their grid."""
    x_BND = layer(unfold(x_BCHW, **WINDOW).transpose(1, 2))
    height = -(-x_BCHW.shape[2] // 2)
    width = -(-x_BCHW.shape[3] // 2)
    return x_BND.transpose(1, 2).reshape(x_BCHW.shape[0], x_BND.shape[2], height, width)


class TokensToTokenEmbed(PatchEmbed):
    """timm's PatchEmbed with :class:`TokensToToken` instead of its convolution.

    It takes the arguments of both; ``bias`` is not used. The patch size is a power of 2 and cannot
    change.
    """

    def __init__(
        self, img_size: Any, patch_size: int, in_chans: int, embed_dim: int, **kwargs: Any
    ):
        own = ("shifted_patches", "locality_attention", "device", "dtype")
        options = {name: kwargs.pop(name) for name in own if name in kwargs}
        if not isinstance(patch_size, int) or patch_size < 2 or patch_size.bit_count() != 1:
            raise ValueError(f"patch_size must be a power of 2 from 2 on, got {patch_size!r}.")
        super().__init__(img_size, patch_size, in_chans, embed_dim, **kwargs, device="meta")
        self.proj: Any = TokensToToken(in_chans, embed_dim, patch_size.bit_length() - 1, **options)


register_notrace_module(TokensToTokenEmbed)  # Its forward branches on the size of the grid.


class _Shortcut(nn.Module):
    """A second shortcut around an attention, inside the block's, as in the authors' code."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        return x + super().forward(x, attn_mask, **kwargs)


class T2TAttention(_Shortcut, Attention):  # type: ignore[misc]
    """timm's Attention with a shortcut."""


class T2TLocalityAttention(_Shortcut, LocalityAttention):  # type: ignore[misc]
    """:class:`LocalityAttention` with a shortcut."""


class LocalT2TVisionTransformer(PreLogitsVisionTransformer):
    """A T2T-ViT for small data sets; its position embedding is fixed (sines and cosines).

    Args:
        args: as :class:`PreLogitsVisionTransformer`.
        shifted_patches: stack the image with shifted copies (SPT).
        locality_attention: attend by :class:`LocalityAttention` (LSA), also while tokens are made.
        kwargs: as :class:`PreLogitsVisionTransformer`.
    """

    def __init__(
        self,
        *args: Any,
        shifted_patches: bool = False,
        locality_attention: bool = False,
        **kwargs: Any,
    ):
        check_flags(shifted_patches, locality_attention)
        options = dict(shifted_patches=shifted_patches, locality_attention=locality_attention)
        kwargs["embed_layer"] = partial(TokensToTokenEmbed, **options)
        kwargs["attn_layer"] = T2TLocalityAttention if locality_attention else T2TAttention
        super().__init__(*args, **kwargs)
        self._fix_positions()

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """Initialise as timm does, but with fixed position embeddings."""
        super().init_weights(*args, **kwargs)
        self._fix_positions()

    @torch.no_grad()
    def _fix_positions(self: Any) -> None:
        self.pos_embed.requires_grad_(False)
        self.pos_embed.copy_(_sinusoids(*self.pos_embed.shape[1:]))


def _sinusoids(positions: int, dim: int) -> Tensor:
    """Compute embeddings (positions, D) with sines in the even and cosines in the odd columns."""
    column = torch.arange(dim, dtype=torch.float64, device="cpu")  # MPS has no float64
    angle = torch.arange(positions, device="cpu")[:, None] / 10000 ** (2 * (column // 2) / dim)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos()).float()
