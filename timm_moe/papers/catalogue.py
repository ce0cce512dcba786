"""The size of every ``<architecture>_ewa_moe``: the command prints docs/generated/models.md."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from timm.models import get_arch_pretrained_cfgs, model_entrypoint

from ..convert.blocks import moe_layers
from ..convert.find import ffn_paths
from ..info import activated_parameters, parameters, weightless_model
from ..models import ewa

_INTRODUCTION = """\
# EWA for every architecture of timm, by name

`<architecture>_ewa_moe` is timm's `<architecture>` with experts, for each architecture whose blocks hold a feed-forward
network that acts on each token by itself, gated ones included. It is trained, upcycled, evaluated and exported as
`vit_small_ewa_moe` is:

```bash
python train.py --model swin_tiny_patch4_window7_224_ewa_moe --data-dir DIR --pretrained --num-classes 100 \\
  --opt adamw --lr 1e-4
timm-moe export output/train/…/last.pth.tar my-swin  # a stock swin_tiny_patch4_window7_224
```

```python
timm.create_model("eva02_tiny_patch14_336_ewa_moe.mim_in22k_ft_in1k", pretrained=True)  # every tag of timm's
timm.list_models("*_ewa_moe", module="swin_transformer")  # or: timm-moe list '*swin*'
```

Options come from `convert_to_moe` and from the stock model. `moe_layers` counts feed-forward networks in their order
in the model, all stages together; a few blocks have several: MaxViT's `attn_block` and `attn_grid`,
DaViT's spatial and channel blocks, TNT's inner and outer ones. `every-2`, the default, takes the second of each such
pair. What a CaiT, XCiT or VOLO sends through the last blocks is the class token alone, so there an expert gets a part
of the batch. CoaT's parallel blocks share one network among their scales, and so one set of experts.

*Networks* are those that got experts by default, of all that could. *Training* and *exported* are parameters, with 4
experts. *Tags* counts the stock model's pretrained weights. The page is what `python -m timm_moe.papers.catalogue`
prints; it builds every model without its weights.

## Checked

`python tests/every_model.py docs/generated/models_checked.md` checks each name: that random dense weights, loaded as
pretrained ones, give the stock model's outputs in eval and in training mode, and that `export_dense` gives these
weights back bit for bit. The 565 of timm 1.0.31 all pass; [models_checked.md](models_checked.md) has them one by one,
and which were made smaller for it (large ones have fewer blocks, most have smaller images).

## Left out

Networks of convolutions on maps (B, C, H, W) have no rows of tokens that could be divided among experts: in
CoAtNet, ConvFormer, PoolFormer, MobileViTv2, EfficientViT, EfficientFormerV2, FastViT, FocalNet, iFormer, Next-ViT,
SHViT, SwiftFormer, Visformer, some ConvNeXts, and the convolutional halves of CAFormer, EfficientFormer and MaxxViT,
whose other halves are here (EfficientFormer-L1's is a single network). Others are not networks of single tokens:
PVTv2's has a depthwise convolution in it, ConvNeXtV2's a norm over the whole image, gMLP's a gate over all tokens, as
MLP-Mixer's token mixing. LeViT's and the smaller Gemma 4 encoder's hold buffers (batch norms, value ranges), of which
no mean of experts can be taken. In the ViTs with parallel scaling (`*_xp_*`, `vit_pwee_*`, `vit_dpwee_*`) one linear
layer serves attention and the network.
"""


def sections(architectures: Iterable[str]) -> Iterator[str]:
    """Yield the text of docs/generated/models.md, in pieces as they are made."""
    yield _INTRODUCTION
    for family, of_family in groupby(architectures, lambda name: model_entrypoint(name).__module__.rpartition(".")[2]):
        yield f"\n## {family}\n\n| model | networks | training | exported | tags |\n| --- | --- | --- | --- | --- |\n"
        for architecture in of_family:
            yield f"{row(architecture)}\n"


def row(architecture: str) -> str:
    """Write a model's row in the table of its family; the parameters that a token passes through get exported."""
    name = f"{architecture}_ewa_moe"
    model = weightless_model(name)
    networks = f"{len(moe_layers(model))} of {len(ffn_paths(model))}"
    tags = sum(bool(cfg.has_weights) for cfg in get_arch_pretrained_cfgs(name).values())
    return f"| `{name}` | {networks} | {parameters(model):,} | {activated_parameters(model):,} | {tags} |"


if __name__ == "__main__":
    for section in sections(ewa.architectures()):
        print(section, end="", flush=True)
