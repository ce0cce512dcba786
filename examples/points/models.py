"""Point-BERT's classifier and Pix4Point's encoder, with the parameter names of the published code.

All parts of a ViT are timm's, so ``timm_moe.convert_to_moe`` finds the feed-forward networks by
itself.
"""

from functools import partial
from os import PathLike

import torch
from timm.layers import LayerNorm2d
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from .grouping import farthest_points, gather_points, group_points, nearest_points


class GroupEncoder(nn.Module):
    """A small PointNet that maps each group of points to one vector (Point-BERT, section 3.1).

    Args:
        widths: widths of the first three layers; the paper's are (128, 256, 512).
        out_width: width of the vector.
    """

    def __init__(self, widths: tuple[int, int, int] = (128, 256, 512), out_width: int = 256):
        super().__init__()
        first, second, third = widths
        self.first_conv = nn.Sequential(
            nn.Conv1d(3, first, 1),
            nn.BatchNorm1d(first),
            nn.ReLU(inplace=True),
            nn.Conv1d(first, second, 1),
        )
        self.second_conv = nn.Sequential(
            nn.Conv1d(2 * second, third, 1),
            nn.BatchNorm1d(third),
            nn.ReLU(inplace=True),
            nn.Conv1d(third, out_width, 1),
        )

    def forward(self, groups: Tensor) -> Tensor:
        """Maps groups (B, G, K, 3) to vectors (B, G, out_width)."""
        runs = groups.shape[:3]
        points = self.first_conv(groups.reshape(1, -1, 3).transpose(1, 2)).unflatten(
            2, runs
        )  # as one long cloud, which is faster
        points = torch.cat([points.amax(-1, keepdim=True).expand_as(points), points], 1)
        return self.second_conv(points.flatten(2)).unflatten(2, runs).amax(-1)[0].permute(1, 2, 0)


class Encoder(nn.Module):
    """Transformer blocks, each of which adds the positions to its input."""

    def __init__(self, width: int, depth: int, num_heads: int, drop_path: float):
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(
                width,
                num_heads,
                drop_path=drop_path * index / max(1, depth - 1),
                norm_layer=nn.LayerNorm,
            )
            for index in range(depth)
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + positions)
        return x


class PointTransformer(nn.Module):
    """Point-BERT's classifier (arXiv 2111.14819, section 4.2).

    The defaults are its ModelNet40 model, a ViT-S.

    Args:
        num_classes: classes.
        num_groups: G, tokens besides the class token.
        group_size: K, points in each group.
        width: width of the transformer.
        depth: number of blocks.
        num_heads: heads of its attention.
        drop_path: rate in the last block; it grows linearly.
        group_widths: widths of the layers of the group encoder, its output last.
        head_dropout: dropout in the classification head.
    """

    def __init__(
        self,
        num_classes: int = 40,
        num_groups: int = 64,
        group_size: int = 32,
        width: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        drop_path: float = 0.1,
        group_widths: tuple[int, int, int, int] = (128, 256, 512, 256),
        head_dropout: float = 0.5,
    ):
        super().__init__()
        self.num_groups, self.group_size = num_groups, group_size
        self.encoder = GroupEncoder(group_widths[:3], group_widths[3])
        self.reduce_dim = nn.Linear(group_widths[3], width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.cls_pos = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Sequential(nn.Linear(3, 128), nn.GELU(), nn.Linear(128, width))
        self.blocks = Encoder(width, depth, num_heads, drop_path)
        self.norm = nn.LayerNorm(width)
        self.cls_head_finetune = nn.Sequential(
            nn.Linear(2 * width, 256),
            nn.ReLU(inplace=True),
            nn.Dropout(head_dropout),
            nn.Linear(256, num_classes),
        )

    def no_weight_decay(self) -> set[str]:
        """Parameters without weight decay in timm's optimizers, besides biases and norms."""
        return {"cls_token"}

    def forward(self, clouds: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Maps clouds (B, N, 3), or groups of :func:`group_points`, to logits (B, num_classes)."""
        if isinstance(clouds, Tensor):
            clouds = group_points(clouds, self.num_groups, self.group_size)
        groups, centers = clouds
        tokens = self.reduce_dim(self.encoder(groups))
        x = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1)
        positions = torch.cat(
            [self.cls_pos.expand(len(tokens), -1, -1), self.pos_embed(centers)], 1
        )
        x = self.norm(self.blocks(x, positions))
        return self.cls_head_finetune(torch.cat([x[:, 0], x[:, 1:].amax(1)], -1))


def load_point_bert(model: PointTransformer, path: str | PathLike) -> list[str]:
    """Load a checkpoint of Point-BERT's code.

    All of a fine-tuned checkpoint is loaded, of a pre-trained one all but the head.

    Args:
        model: dense; convert it afterwards.
        path: the checkpoint. Pre-trained weights have the names ``transformer_q.*``.

    Returns:
        Names of parameters that the file does not have: the head's, or none.

    Raises:
        ValueError: if the file is not such a checkpoint, or does not fit the model.
    """
    try:
        file = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or foreign pickle may raise anything
        raise ValueError(
            f"{path} is no checkpoint that can be read without running code from it."
        ) from error
    kept = next(
        (file[key] for key in ("model", "base_model") if isinstance(file, dict) and key in file),
        None,
    )
    if not isinstance(kept, dict):
        raise ValueError(
            f"{path} has neither of the entries that Point-BERT's checkpoints have, model and "
            "base_model."
        )
    state = {name.removeprefix("module."): value for name, value in kept.items()}
    if pretrained := {
        name: value for name, value in state.items() if name.startswith("transformer_q.")
    }:
        state = {name.removeprefix("transformer_q."): value for name, value in pretrained.items()}
        tasks = ("mask_token", "lm_head.", "cls_head.")  # of pre-training
        state = {name: value for name, value in state.items() if not name.startswith(tasks)}
    head = (
        [name for name in model.state_dict() if name.startswith("cls_head_finetune.")]
        if pretrained
        else []
    )
    expected = model.state_dict()
    state.update({name: expected[name] for name in head})
    wrong = [
        name
        for name in {**expected, **state}
        if _shape(expected.get(name)) != _shape(state.get(name))
    ]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{path} does not fit the model in {len(wrong)} tensors: of {name} the file has the "
            f"shape {_shape(state.get(name))}, the model {_shape(expected.get(name))}."
        )
    model.load_state_dict(state)
    return head


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


class PatchEmbed(nn.Module):
    """Pix4Point's progressive point patch embedding (arXiv 2208.12259, section 3.2).

    Each stage keeps a quarter of the points.

    Args:
        in_channels: channels of the points' features, including coordinates if wanted.
        width: width of the tokens; each stage before the last has half of the next one's.
        stages: 2 leave 1/16 of the points.
        group_size: K, neighbours of each kept point.
    """

    def __init__(self, in_channels: int, width: int, stages: int = 2, group_size: int = 32):
        super().__init__()
        self.group_size, self.convs = group_size, nn.ModuleList()
        for stage in range(stages):
            hidden = width // 2 ** (stages - 1 - stage)
            first = nn.Sequential(
                _conv(3 + in_channels, hidden), nn.Sequential(nn.Conv2d(hidden, hidden, 1))
            )
            second = nn.Sequential(_conv(2 * hidden, 2 * hidden), _conv(2 * hidden, hidden))
            self.convs.append(nn.ModuleList([first, second]))
            in_channels = hidden

    def forward(self, points: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Embed points (B, N, 3) with features (B, N, C).

        Returns:
            The points (B, G, 3) and features (B, G, width) of the last stage.
        """
        for first, second in self.convs:
            chosen = farthest_points(points, len(points[0]) // 4)
            centers, own = gather_points(points, chosen), gather_points(features, chosen)
            neighbors = nearest_points(points, centers, self.group_size)
            places = gather_points(points, neighbors) - centers[:, :, None]
            differences = gather_points(features, neighbors) - own[:, :, None]
            # (B, channels, G, K).
            x = first(torch.cat([places, differences], -1).permute(0, 3, 1, 2))
            x = second(torch.cat([x.amax(-1, keepdim=True).expand_as(x), x], 1))
            points, features = centers, x.amax(-1).transpose(1, 2)
        return points, features


def _conv(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, bias=False),
        LayerNorm2d(out_channels, eps=1e-5),
        nn.ReLU(inplace=True),
    )


class PointViT(nn.Module):
    """Pix4Point's encoder for segmentation (arXiv 2208.12259, section 3).

    The defaults are its S3DIS model, a ViT-S.

    Its decoder, which holds no experts, is not included.

    Args:
        in_channels: channels of the points' features: coordinates, colour and height on S3DIS.
        width: width of the transformer.
        depth: number of blocks.
        num_heads: heads of its attention.
        drop_path: rate in the last block; it grows linearly.
        stages: stages of the patch embedding, each of which keeps a quarter of the points.
        group_size: K, points in each group.
    """

    def __init__(
        self,
        in_channels: int = 7,
        width: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        drop_path: float = 0.1,
        stages: int = 2,
        group_size: int = 32,
    ):
        super().__init__()
        self.patch_embed = PatchEmbed(in_channels, width, stages, group_size)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.cls_pos = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos_embed = nn.Sequential(
            nn.Sequential(nn.Linear(3, 128), nn.GELU()), nn.Linear(128, width)
        )
        rates = [drop_path * index / max(1, depth - 1) for index in range(depth)]
        options = dict(qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6))
        self.blocks = nn.ModuleList(
            Block(width, num_heads, drop_path=rate, **options) for rate in rates
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, points: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Encode points (B, N, 3) and features (B, N, C).

        Returns:
            The G centres (B, G, 3) and tokens (B, 1 + G, width).
        """
        centers, x = self.patch_embed(points, features)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        positions = torch.cat([self.cls_pos.expand(len(x), -1, -1), self.pos_embed(centers)], 1)
        for block in self.blocks:
            x = block(x + positions)
        return centers, self.norm(x)
