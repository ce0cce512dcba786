"""WideNet (arXiv 2107.11817): blocks with own norms share one attention and one expert layer."""

from typing import Any

import torch
from timm.models import register_notrace_module
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.fx import Proxy

from ..convert.expert_layers import moe_layers
from ..convert.hooks import note_padding
from ..layers.checks import check_flag
from ..layers.functional import kept_whole
from .mixin import MoeMixin
from .variants import SIZES, Variant, register_variants
from .vision_transformer import PreLogitsVisionTransformer, create_moe_vit

__all__ = ["SharedVisionTransformer", "WideNet"]  # timm adds the entrypoints

#: Part of names that torch's wrapper for activation checkpointing keeps out of state dicts.
CHECKPOINTED = "_checkpoint_wrapped_module."


class SharedVisionTransformer(PreLogitsVisionTransformer):
    """A ViT whose blocks share one attention and one feed-forward network.

    This is WideNet without experts (section 4.4). The shared parts belong to the first block. The
    state dict has them once, under the first block's name: safetensors refuses shared tensors, and
    a weight average over state dicts (timm's ModelEmaV3) moves each tensor once.

    Args:
        args: as timm's VisionTransformer.
        shared_norm: share the two norms of the blocks too (section 4.4).
        zero_class_token: the class token is a constant zero, not a parameter, as in the authors'
            code.
        kwargs: as timm's VisionTransformer.

    Raises:
        ValueError: if ``zero_class_token`` has no class token to replace.
    """

    def __init__(
        self, *args: Any, shared_norm: bool = False, zero_class_token: bool = False, **kwargs: Any
    ):
        check_flag("shared_norm", shared_norm)
        check_flag("zero_class_token", zero_class_token)
        super().__init__(*args, block_fn=_block_of_own_norms, **kwargs)
        self.shared_parts = ("attn", "mlp", *(("norm1", "norm2") if shared_norm else ()))
        for block in self.blocks[1:]:
            for part in self.shared_parts:
                setattr(block, part, getattr(self.blocks[0], part))
        self.zero_class_token = zero_class_token
        if zero_class_token:
            if self.cls_token is None:
                raise ValueError("zero_class_token=True needs a class token: class_token=True.")
            zero = torch.zeros_like(self.cls_token)
            del self.cls_token
            self.register_buffer("cls_token", zero)
        self.register_state_dict_post_hook(_drop_repeated)
        self.register_load_state_dict_pre_hook(_repeat)

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """Initialise as timm does, but keep a constant class token zero."""
        super().init_weights(*args, **kwargs)
        # The attribute is missing when the stock class's constructor calls this method.
        if getattr(self, "zero_class_token", False):
            nn.init.zeros_(self.cls_token)  # type: ignore[arg-type]

    def load_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, since each block of such a file has networks of its own, and the last would win.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"A {type(self).__name__} shares its networks among the blocks, so it cannot load a "
            "NumPy checkpoint of a ViT, whose blocks have networks of their own."
        )

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's groups, with the shared parts in the group of the last block.

        In the first block's group, layer decay would treat them as early layers. A block that is in
        a routing group is a group of timm's by itself, as without routing groups.
        """
        groups = super().group_matcher(coarse)
        shared = rf"^blocks\.0\.(?:0\.)?(?:{'|'.join(self.shared_parts)})\."
        last: tuple[int, ...] = (len(self.blocks) - 1,)
        if isinstance(self.blocks[-1], RoutingGroup):
            last = (*last, len(self.blocks[-1]) - 1)
        in_routing_group = r"^blocks\.(\d+)\.(\d+)\."
        return {**groups, "blocks": [(shared, last), (in_routing_group, None), *groups["blocks"]]}


def _block_of_own_norms(**kwargs: Any) -> Block:
    """Build a block; from the second on, only norms and drop paths belong to it."""
    if kwargs["depth"]:
        kwargs |= dict(attn_layer=nn.Identity, mlp_layer=nn.Identity)
    return Block(**kwargs)


def _first_names(module: nn.Module) -> dict[str, str]:
    """Map each further name of a shared parameter or buffer in the state dict to its first."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for long_name, tensor in every:
        name = long_name.replace(CHECKPOINTED, "")
        earlier = first.setdefault(id(tensor), name)
        if earlier != name:
            further[name] = earlier
    return further


def _drop_repeated(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Leave each shared tensor in the state dict once; a state-dict post-hook."""
    for name in _first_names(module):
        state_dict.pop(prefix + name, None)


def _repeat(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Give each shared tensor all of its names again; a load-state-dict pre-hook."""
    for name, first in _first_names(module).items():
        if prefix + name in state_dict:
            raise RuntimeError(  # as torch's load_state_dict
                f"The checkpoint has weights of its own in {prefix}{name}, which this model shares "
                f"with {first}."
            )
        if prefix + first in state_dict:
            state_dict[prefix + name] = state_dict[prefix + first]


class RoutingGroup(nn.Sequential):
    """Consecutive blocks with one expert layer and one routing (section 4.5, figure 3).

    The first block routes.
    """

    def forward(self, x: Tensor, **attention: Any) -> Tensor:  # type: ignore[override]
        """Map tokens (B, N, D) to the same shape.

        Args:
            x: the tokens.
            attention: options of timm's attention.
        """
        if isinstance(x, Proxy):
            return kept_whole(self, x)
        layer: Any = self[0].mlp
        routing = None
        block: Any
        for block in self:
            x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x), **attention)))
            z = block.norm2(x)
            # No block is called as a whole, so its hook does not note the padding.
            note_padding(block, (), attention, masks={"attn_mask": 1})
            if routing is None:
                padding = layer.padding_of(z)
                routing = layer.router(z if padding is None else z[~padding])
            x = x + block.drop_path2(block.ls2(block.mlp(z, routing=routing)))
        return x


register_notrace_module(RoutingGroup)  # torch.fx follows tensors only, and a routing is none.


class WideNet(MoeMixin, SharedVisionTransformer):
    """A ViT whose blocks share one attention and one expert layer (section 3).

    Args:
        args: as :class:`SharedVisionTransformer`.
        routing_groups: G, number of groups of consecutive blocks; the first block of a group routes
            the tokens for the whole group, and the balance loss has G terms. By default every block
            routes.
        router: name of the router; groups of blocks need ``"top_k"``.
        kwargs: as :class:`SharedVisionTransformer`, and options of :func:`timm_moe.convert_to_moe`
            but ``moe_layers``.

    Raises:
        ValueError: if ``routing_groups`` does not divide the number of blocks, or goes with another
            router than ``"top_k"``; if ``moe_layers`` is given.
    """

    stock_class = SharedVisionTransformer

    def __init__(
        self, *args: Any, routing_groups: int | None = None, router: str = "top_k", **kwargs: Any
    ):
        if kwargs.pop("moe_layers", "every-1") != "every-1":
            raise ValueError(
                "A WideNet has one expert layer for all blocks, so it has no moe_layers."
            )
        if routing_groups is not None and router != "top_k":
            raise ValueError(
                f"routing_groups is an option of router='top_k', got router={router!r}."
            )
        super().__init__(*args, router=router, moe_layers="every-1", **kwargs)
        if routing_groups is None:
            return
        blocks = list(self.blocks)
        if type(routing_groups) is not int or routing_groups < 1 or len(blocks) % routing_groups:
            raise ValueError(
                f"routing_groups must be an integer that divides the {len(blocks)} blocks, got "
                f"{routing_groups!r}."
            )
        size = len(blocks) // routing_groups
        self._set_blocks(
            [RoutingGroup(*blocks[first : first + size]) for first in range(0, len(blocks), size)]
        )

    def _set_blocks(self, blocks: list[nn.Module]) -> None:
        """Put other modules in the place of the blocks."""
        self.blocks = nn.Sequential(*blocks)
        self.feature_info = [
            {**self.feature_info[0], "module": f"blocks.{index}"} for index in range(len(blocks))
        ]
        for path, layer in moe_layers(self).items():
            layer.path = path

    def restore_stock_class(self) -> None:
        """Turn into a :class:`SharedVisionTransformer`, without groups of blocks."""
        self._set_blocks([block for block in self.blocks.modules() if isinstance(block, Block)])
        super().restore_stock_class()


#: Section 4.1 and table 6. The authors' code counts all choices in the balance loss and rounds
#: capacities down.
_WIDENET: dict[str, Any] = dict(
    num_experts=4,
    top_k=2,
    noise_std=1.0,
    aux_loss="balance_top_k",
    aux_loss_weight=0.01,
    capacity_factor=1.2,
    capacity_multiple=1,
    capacity_rounding="floor",
)
#: The paper averages over the patches, without a class token.
_POOLING = dict(patch_size=16, class_token=False, global_pool="avg", fc_norm=False)
#: The authors' code has a class token that is a constant zero, averages over it too, and has a
#: layer before the classifier. The paper's parameter counts are of this model.
_OFFICIAL = dict(class_token=True, zero_class_token=True, pool_include_prefix=True, pre_logits=True)

#: Arguments of WideNet's sizes. B has an MLP as wide as that of the paper, not timm's.
_SIZES = {
    "b": {**SIZES["base"], "mlp_ratio": 4096 / 768},
    "l": SIZES["large"],
    "h": SIZES["huge"],
}


def _variants(size: str) -> dict[str, Variant]:
    """Return WideNet in one size, and OneS's dense student of it."""
    model = f"WideNet-{size.upper()}"
    student = f"OneS's student of {model} (arXiv 2201.10890): one dense network for all blocks."
    args = {**_POOLING, **_SIZES[size]}
    return {
        f"widenet_{size}": Variant(f"{model}.", f"ones_{size}", {**_WIDENET, **args}),
        f"ones_{size}": Variant(student, f"ones_{size}", args),
    }


def _create(name: str, variant: Variant, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Build a variant; ``kwargs`` are the caller's."""
    official = kwargs.pop("official_compat", False)
    check_flag("official_compat", official)
    if official:
        variant = variant._replace(args={**variant.args, **_OFFICIAL})
    if name.startswith("widenet") and kwargs.get("num_experts") != 0:
        model = create_moe_vit(WideNet, name, variant, pretrained, kwargs)
        if isinstance(model, WideNet):  # It may be a feature extractor.
            assert model.stock_form is not None
            model.stock_form.args["official_compat"] = official
            model.stock_form.args.pop("routing_groups", None)
        return model
    if kwargs.get("num_experts") == 0:
        del kwargs["num_experts"]
    dense = variant._replace(
        args={option: value for option, value in variant.args.items() if option not in _WIDENET}
    )
    return create_moe_vit(SharedVisionTransformer, name, dense, pretrained, kwargs)


register_variants(__name__, _variants("b") | _variants("l") | _variants("h"), _create)
