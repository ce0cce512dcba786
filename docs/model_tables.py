"""The tables of the documentation.

``python docs/model_tables.py models papers costs`` writes them to docs/generated.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import timm
from paper_figures import FIGURES, PAPERS, number_text
from timm.models import get_arch_pretrained_cfgs, model_entrypoint

from timm_moe.analysis.info import activation_bytes, byte_text, model_info
from timm_moe.convert.expert_layers import activated_parameters, moe_layers, parameters
from timm_moe.convert.find import ffn_paths
from timm_moe.models import ewa
from timm_moe.models.registered import is_named_after_stock, registered_models, weightless_model

_MODELS = """\
# EWA for every architecture of timm, by name

`<architecture>_ewa_moe` is timm's `<architecture>` with experts, for each architecture whose blocks
hold a feed-forward network that acts on each token by itself, gated ones included. It is trained,
upcycled, evaluated and exported as `vit_small_ewa_moe` is:

```bash
python train.py --model swin_tiny_patch4_window7_224_ewa_moe --data-dir DIR --pretrained \\
  --num-classes 100 --opt adamw --lr 1e-4
timm-moe export output/train/…/last.pth.tar my-swin  # a stock swin_tiny_patch4_window7_224
```

```python
# Every tag of timm's.
timm.create_model("eva02_tiny_patch14_336_ewa_moe.mim_in22k_ft_in1k", pretrained=True)
timm.list_models("*_ewa_moe", module="swin_transformer")  # or: timm-moe list '*swin*'
```

Options come from `convert_to_moe` and from the stock model. `moe_layers` counts feed-forward
networks in their order in the model, all stages together; a few blocks have several: MaxViT's
`attn_block` and `attn_grid`, DaViT's spatial and channel blocks, TNT's inner and outer ones.
`every-2`, the default, takes the second of each such pair. What a CaiT, XCiT or VOLO sends through
the last blocks is the class token alone, so there an expert gets a part of the batch. CoaT's
parallel blocks share one network among their scales, and so one set of experts.

*Networks* are those that got experts by default, of all that could. *Training* and *exported* are
parameters, with 4 experts. *Tags* counts the stock model's pretrained weights. `python
docs/model_tables.py models` writes the page; it builds every model without its weights.

## Checked

`python tests/every_model.py docs/generated/models_checked.md` checks each name: that random dense
weights, loaded as pretrained ones, give the stock model's outputs in eval and in training mode, and
that `export_dense` gives these weights back bit for bit. The 565 of timm 1.0.31 all pass;
[models_checked.md](models_checked.md) has them one by one, and which were made smaller for it
(large ones have fewer blocks, most have smaller images).

## Left out

Networks of convolutions on maps (B, C, H, W) have no rows of tokens that could be divided among
experts: in CoAtNet, ConvFormer, PoolFormer, MobileViTv2, EfficientViT, EfficientFormerV2, FastViT,
FocalNet, iFormer, Next-ViT, SHViT, SwiftFormer, Visformer, some ConvNeXts, and the convolutional
halves of CAFormer, EfficientFormer and MaxxViT, whose other halves are here (EfficientFormer-L1's
is a single network). Others are not networks of single tokens: PVTv2's has a depthwise convolution
in it, ConvNeXtV2's a norm over the whole image, gMLP's a gate over all tokens, as MLP-Mixer's token
mixing. LeViT's and the smaller Gemma 4 encoder's hold buffers (batch norms, value ranges), of which
no mean of experts can be taken. In the ViTs with parallel scaling (`*_xp_*`, `vit_pwee_*`,
`vit_dpwee_*`) one linear layer serves attention and the network.
"""


def models_page() -> Iterator[str]:
    """Yield the text of docs/generated/models.md, in pieces as they are made."""
    yield _MODELS
    architectures = ewa.architectures()
    for family, of_family in groupby(
        architectures, lambda name: model_entrypoint(name).__module__.rpartition(".")[2]
    ):
        yield f"\n## {family}\n\n"
        yield "| model | networks | training | exported | tags |\n| --- | --- | --- | --- | --- |\n"
        for architecture in of_family:
            yield f"{row(architecture)}\n"


def row(architecture: str) -> str:
    """Write a model's row in the table of its family.

    The parameters that a token passes through are those that are exported.
    """
    name = f"{architecture}_ewa_moe"
    model = weightless_model(name)
    networks = f"{len(moe_layers(model))} of {len(ffn_paths(model))}"
    tags = sum(bool(cfg.has_weights) for cfg in get_arch_pretrained_cfgs(name).values())
    training, exported = parameters(model), activated_parameters(model)
    return f"| `{name}` | {networks} | {training:,} | {exported:,} | {tags} |"


_PAPERS = """\
# The models beside their papers

What the papers print about the size and cost of the models, and what the models of this package
have. `python docs/model_tables.py papers` writes this page: it builds every model without its
weights and measures it.

## The models as registered

*Parameters* counts the model in training, *activated* the part that one token passes through, with
the routers. A layer that blocks share is counted as one block uses it. *Exported* counts the dense
model after training, if the experts are not routed. *GFLOPs* are the operations of evaluating one
image: linear layers, convolutions and attention's two products, a multiply-add counted as two
(timm's GMACs are half of it).
"""

_LEGEND = """\
## What the papers print

*Model* is a registered name with the options that make it the paper's model, as `timm.create_model`
and `--model-kwargs` take them; a `vit_*_patch*` is timm's own, a dense model that the paper
compares with. *Paper* is the number as printed (some are not legible in the copy at hand), *here*
is what the model has. If they still differ after rounding to the printed digits (parameters of
WideNet, OneS and Soft MoE are cut off instead), the last column says why, or how far if that is not
known. The quantities:

- *parameters*: all of the model in training. *Activated*: those that one token passes through, the
  routers not counted; where tokens are routed one by one, those that the tokens of one image pass
  through together, in so many routed experts, all layers taken together, as the paper measured on
  average. *The dense model's*: one network in place of the experts.
- *MACs*: of evaluating one image, counted as fvcore does: multiply-adds of linear layers,
  convolutions and attention's two products, and 5 for each number that a layer norm puts out. The
  paper calls them FLOPs. ADE20K's classifier is a linear layer from each patch to 150 classes.
- *GFLOPs*: as in the first table. The paper does not say which operations it counts.
- *training cost*: operations of a forward and a backward for one image, a multiply-add counted as
  two, in units of 2^30. Experts compute as many rows as their capacity allows. The paper does not
  say how it counts; why its V-MoE costs less outside the experts than its ViT, and H/14 more than
  its size suggests, is not known.
- *training cost over*: by how many percent it is above that of so many other models with the same
  options.
- *FFN cost*: the places of all experts together for each token, K times the capacity factor.
- *ways through the experts*: the possible choices of an image, multiplied over the layers ("routing
  degree").
"""


def papers_page(values: Sequence[float]) -> str:
    """Write the text of docs/generated/papers.md.

    ``values`` are the measured ones of all :data:`FIGURES`.
    """
    sections = [
        _PAPERS,
        _table(["model", "parameters", "activated", "exported", "GFLOPs", "pixels"], _sizes()),
    ]
    sections.append(_LEGEND)
    for paper, number in PAPERS.items():
        rows = [
            [
                f.where,
                f"`{f.label}`",
                f.quantity,
                f.printed or "not legible",
                number_text(value),
                f.why(value),
            ]
            for f, value in zip(FIGURES, values, strict=True)
            if f.paper == paper
        ]
        sections.append(f"### {paper}, [arXiv {number}](https://arxiv.org/abs/{number})\n")
        sections.append(
            _table(["where", "model", "quantity", "paper", "here", "why they differ"], rows)
        )
    return "\n".join(sections)


def _sizes() -> Iterator[list[str]]:
    for name in registered_models():
        if is_named_after_stock(name):
            continue  # docs/generated/models.md has these
        info = model_info(name)
        exported = "" if info.exported is None else number_text(info.exported)
        pixels = "x".join(str(size) for size in info.input_size[1:])
        yield [
            f"`{name}`",
            number_text(info.total),
            number_text(info.activated),
            exported,
            number_text(info.gflops),
            pixels,
        ]


_COSTS = """\
# What the models cost

`python docs/model_tables.py costs` writes this page. *Parameters in training* counts the experts,
and *deployed* those of the model that is published: the dense one for EWA, otherwise with the
experts. *Memory* is what training in float32 by AdamW holds whatever the batch: weights, gradients
and two moments, 16 bytes a parameter, counted and not measured on a GPU. *Activations* are what a
training step of 8 images keeps for its backward, measured on a CPU in float32; they grow with the
batch, `--amp` about halves them, and a GPU pads experts to equally many rows. *Checkpoint* is a
file of train.py (12 bytes a parameter; `--model-ema` adds 4), of which timm keeps 10 unless
`--checkpoint-hist` says otherwise. All have 20 classes. `timm-moe info NAME NAME --batch 8
--num-classes 20` prints the same of any models.

"""
#: Each dense model stands before those that are made of it.
COSTED = (
    "vit_small_patch16_224",
    "vit_small_ewa_moe",
    "vit_small_moe",
    "vit_base_patch16_224",
    "vit_base_ewa_moe",
    "vmoe_b16",
    "vit_base_patch32_224",
    "vmoe_pbe_b32",
    "vit_small_patch14_dinov2",
    "vimoe_s14_shared",
    "swin_small_patch4_window7_224",
    "swin_moe_small_patch4_window12_192_8e",
    "widenet_b",
)


def costs_page() -> Iterator[str]:
    """Yield the text of docs/generated/costs.md, row by row, since some models are large."""
    yield _COSTS
    header = ["model", "parameters in training", "deployed", "memory", "activations", "checkpoint"]
    yield _table(header, [])
    for name in COSTED:
        yield _table(costs(name), [], rule=False)


def measured_activations(name: str, options: dict[str, Any]) -> int:
    """Measure with weights in memory, those of the largest 1.5 GB."""
    return activation_bytes(timm.create_model(name, **options), 8)


def costs(name: str) -> list[str]:
    """Count and measure a row of docs/generated/costs.md; DINOv2 gets images of 224 pixels."""
    options: dict[str, Any] = {"num_classes": 20}
    if "dinov2" in name:
        options["img_size"] = 224
    info = model_info(name, **options)
    kept = measured_activations(name, options)
    deployed = info.total if info.exported is None else info.exported
    return [
        f"`{name}`",
        f"{info.total / 1e6:.1f} M",
        f"{deployed / 1e6:.1f} M",
        byte_text(16 * info.total),
        byte_text(kept),
        byte_text(12 * info.total),
    ]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], rule: bool = True) -> str:
    lines = [header, *([["---"] * len(header)] if rule else []), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name == "papers":
            pieces: Iterable[str] = [papers_page([figure.measure() for figure in FIGURES])]
        else:
            pieces = {"models": models_page, "costs": costs_page}[name]()
        (Path(__file__).parent / f"generated/{name}.md").write_text("".join(pieces))
