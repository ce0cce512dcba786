"""Segment CamVid as ViMoE does (arXiv 2410.15732, section 6.2).

Usage: python examples/segmentation.py CAMVID --output DIR

A dense ViT is trained first. Each variant begins as a copy of it and is trained by the same recipe:
a linear layer on the patch tokens of the last block, routing by token, layer decay, one scale.
Finished runs in DIR are not repeated, and the table of all runs is printed at the end.
`--table DIR/results.json` prints it without training.

The paper's model of the table's row L2-shared, with DINOv2's weights and ADE20K's crops of 518 x
518 pixels, is

    Segmenter("vimoe_s14_shared", 150, pretrained=True, img_size=518, num_experts=4,
    routing_unit="token", aux_loss_weight=0.001)

The example needs the extra evaluate.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision import tv_tensors
from torchvision.transforms import v2

import timm_moe
from timm_moe.analysis.routes.segmentation import MaskedImages
from timm_moe.convert.expert_layers import expert_biases
from timm_moe.model_config import preprocessing

CLASSES = [
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
]
VOID = 11
SIZE = dict(patch_size=8, embed_dim=64, num_heads=2, init_values=1.0)  # 12 blocks, as in ViT-S
TOKENS = dict(num_experts=4, routing_unit="token", aux_loss_weight=0.001)
#: Options that all runs of a table share, and the options of the dense model that they begin from.
START = ("img_size", "start_epochs", "start_lr")
SETTINGS = (*START, "epochs", "lr")
BATCH, WEIGHT_DECAY, LAYER_DECAY, PADDING = 16, 0.05, 0.65, 8
DENSE = "vit_small_patch14_dinov2"
#: Mean IoU on ADE20K with 4 experts in the last L blocks: without and with a shared expert.
PAPER = {"dense": 50.8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"dense": (DENSE, {})}
for layers, *figures in (
    (1, 51.0, 51.2),
    (2, 51.3, 51.5),
    (3, 50.6, 51.5),
    (6, 49.5, 51.4),
    (12, 43.5, 51.1),
):
    for suffix, figure in zip(("", "-shared"), figures, strict=True):
        name, experts = f"L{layers}{suffix}", {**TOKENS, "moe_layers": f"tail-{layers}"}
        PAPER[name] = figure
        VARIANTS[name] = ("vimoe_s14" + suffix.replace("-", "_"), experts)
        for gate in ("one", "renorm"):
            VARIANTS[f"{name}-{gate}"] = (VARIANTS[name][0], {**experts, "gate_mode": gate})
    VARIANTS[f"L{layers}-shared-zero"] = (
        "vimoe_s14_shared",
        {**experts, "shared_init": "zero_out"},
    )


class Segmenter(nn.Module):
    """Maps images (B, 3, H, W) to logits (B, classes, H, W).

    A linear layer takes the patch tokens of the backbone.
    """

    def __init__(self, name: str, classes: int, **options: Any):
        super().__init__()
        self.backbone = timm.create_model(name, num_classes=0, **options)
        self.head = nn.Conv2d(self.backbone.num_features, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        (features,) = self.backbone.forward_intermediates(
            images, indices=1, norm=True, intermediates_only=True
        )
        return nn.functional.interpolate(self.head(features), images.shape[2:], mode="bilinear")


def make(variant: str, options: argparse.Namespace) -> Segmenter:
    name, experts = VARIANTS[variant]
    return Segmenter(name, len(CLASSES), img_size=tuple(options.img_size), **SIZE, **experts)


def load_split(camvid: Path, split: str, config: Mapping[str, Any]) -> TensorDataset:
    """Load the images (N, 3, H, W) of a split and their labels (N, H, W) into memory."""
    data = MaskedImages(camvid / split, camvid / f"{split}annot", config, CLASSES, VOID)
    print(f"reading {len(data)} images of {data.root}", flush=True)
    images, labels = zip(*(data[index] for index in range(len(data))), strict=True)
    return TensorDataset(torch.stack(images), torch.stack(labels))


class Augmented(TensorDataset):
    """Dataset with random crops of padded images, and flips."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        image, labels = super().__getitem__(index)
        fill = {tv_tensors.Image: 0, tv_tensors.Mask: VOID}
        crop = v2.RandomCrop(tuple(labels.shape), padding=PADDING, fill=fill)
        return v2.RandomHorizontalFlip()(crop(tv_tensors.Image(image), tv_tensors.Mask(labels)))


def train(
    model: Segmenter,
    data: TensorDataset,
    epochs: int,
    lr: float,
    layer_decay: float,
    seed: int,
    name: str,
) -> None:
    torch.manual_seed(seed)  # these models draw nothing, so all variants see the same batches
    loader = DataLoader(Augmented(*data.tensors), BATCH, shuffle=True)
    biases = expert_biases(model.backbone)
    groups = param_groups_layer_decay(
        model.backbone, WEIGHT_DECAY, no_weight_decay_list=biases, layer_decay=layer_decay
    )
    optimizer = torch.optim.AdamW(
        [*groups, {"params": model.head.parameters()}], lr, weight_decay=WEIGHT_DECAY
    )
    steps = epochs * len(loader)
    schedule = CosineLRScheduler(optimizer, max(steps, 1), warmup_t=steps // 10, t_in_epochs=False)
    step, start = 0, time.monotonic()
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for images, labels in loader:
            schedule.step_update(step)
            loss = nn.functional.cross_entropy(
                model(images), labels.as_subclass(Tensor), ignore_index=VOID
            )
            timm_moe.add_router_losses(model, loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            step, total = step + 1, total + loss.item()
        seconds = time.monotonic() - start
        print(
            f"{name}: epoch {epoch + 1} of {epochs}, loss {total / len(loader):.3f}, "
            f"{seconds:.0f} s",
            flush=True,
        )


@torch.inference_mode()
def mean_iou(model: Segmenter, data: TensorDataset) -> float:
    """Mean IoU over the classes in percent, of all pixels that have a class."""
    metric = MulticlassJaccardIndex(len(CLASSES), ignore_index=VOID)
    model.eval()
    for images, labels in DataLoader(data, BATCH):
        metric.update(model(images).argmax(1), labels)
    return 100 * metric.compute().item()


def start_of_all(data: dict[str, TensorDataset], options: argparse.Namespace) -> dict[str, Tensor]:
    """Return the weights of the dense model, from the file of an earlier call if it exists."""
    file = options.output / "start.pth"
    if file.is_file():
        saved = torch.load(file)
        require_same(file, saved["settings"], settings(options, START))
        return saved["state_dict"]
    torch.manual_seed(0)
    model = make("dense", options)
    train(model, data["train"], options.start_epochs, options.start_lr, 1.0, 0, "start")
    print(f"start: mean IoU {mean_iou(model, data['test']):.1f} %", flush=True)
    torch.save(
        {"settings": settings(options, START), "state_dict": model.state_dict()}, f"{file}.part"
    )
    os.replace(f"{file}.part", file)
    return model.state_dict()


def run(
    variant: str,
    seed: int,
    start: dict[str, Tensor],
    data: dict[str, TensorDataset],
    options: argparse.Namespace,
) -> None:
    """Train a variant from the dense weights, and write its results.

    If it has experts, its backbone is written for timm, too.
    """
    name = f"{variant}-{seed}"
    file = options.output / "runs" / f"{name}.json"
    if file.is_file():
        print(f"{name}: finished before", flush=True)
        return
    torch.manual_seed(seed)
    model = make(variant, options)
    model.load_state_dict(start)  # each expert becomes a copy of the dense network
    before, begin = mean_iou(model, data["test"]), time.monotonic()
    train(model, data["train"], options.epochs, options.lr, LAYER_DECAY, seed, name)
    result = {
        "variant": variant,
        "seed": seed,
        "before": before,
        "seconds": time.monotonic() - begin,
    }
    result["mean_iou"] = mean_iou(model, data["test"])
    print(f"{name}: mean IoU {before:.1f} % before, {result['mean_iou']:.1f} % after", flush=True)
    if variant != "dense":
        timm_moe.export_moe(model.backbone, options.output / "models" / name, overwrite=True)
    file.parent.mkdir(exist_ok=True)
    Path(f"{file}.part").write_text(json.dumps({**result, "settings": settings(options)}))
    os.replace(f"{file}.part", file)


def settings(options: argparse.Namespace, names: Sequence[str] = SETTINGS) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def require_same(file: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(
                f"{file} was made with {name} {found.get(name)}, not {value}: name another "
                "--output."
            )


def collect(output: Path) -> dict[str, Any]:
    """Collect all finished runs, and write them to results.json."""
    runs = [json.loads(file.read_text()) for file in sorted((output / "runs").glob("*.json"))]
    common = [run.pop("settings") for run in runs]
    versions = {
        "timm": timm.__version__,
        "torch": torch.__version__,
        "timm_moe": timm_moe.__version__,
    }
    results = {"settings": common[0], "versions": versions, "runs": runs}
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return results


def table(results: dict[str, Any]) -> str:
    """Format means over the seeds with standard errors; differences are paired by seed."""
    by_variant: dict[str, dict[int, dict[str, float]]] = {}
    for run in results["runs"]:
        by_variant.setdefault(run["variant"], {})[run["seed"]] = run
    dense = by_variant.get("dense", {})
    lines = [
        "| variant | seeds | before training | mean IoU | minus dense | paper, ADE20K |",
        "|---|---|---|---|---|---|",
    ]
    for variant in filter(by_variant.__contains__, VARIANTS):
        runs = by_variant[variant]
        differences = [
            run["mean_iou"] - dense[seed]["mean_iou"] for seed, run in runs.items() if seed in dense
        ]
        lines.append(
            f"| {variant} | {len(runs)} | {shown([run['before'] for run in runs.values()])} | "
            f"{shown([run['mean_iou'] for run in runs.values()])} | "
            f"{shown(differences, '+') if variant != 'dense' else ''} | {PAPER.get(variant, '')} |"
        )
    return "\n".join(lines)


def shown(values: list[float], sign: str = "") -> str:
    if not values:
        return ""
    mean = f"{statistics.mean(values):{sign}.2f}"
    return (
        mean
        if len(values) == 1
        else f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ViMoE's segmentation on CamVid.")
    parser.add_argument(
        "camvid", type=Path, nargs="?", help="folder with train, trainannot, test, testannot"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("segmentation"),
        metavar="DIR",
        help="of runs and models",
    )
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        help="print the table of this results.json, train nothing",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(PAPER),
        metavar="NAME",
        help=", ".join(VARIANTS),
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="of each variant")
    parser.add_argument("--lr", type=float, default=5e-4, metavar="X")
    parser.add_argument(
        "--start-epochs", type=int, default=40, metavar="N", help="of the dense model before"
    )
    parser.add_argument("--start-lr", type=float, default=2e-3, metavar="X")
    parser.add_argument("--img-size", nargs=2, type=int, default=[96, 128], metavar=("H", "W"))
    options = parser.parse_args(arguments)
    if (options.camvid is None) == (options.table is None):
        parser.error("name the folder of CamVid, or a results.json with --table")
    if min(options.epochs, options.start_epochs) < 0:
        parser.error("epochs cannot be negative")
    return options


def main(options: argparse.Namespace) -> None:
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    torch.set_num_threads(1)  # a second thread slows such small models down
    options.output.mkdir(parents=True, exist_ok=True)
    config = preprocessing(make("dense", options).backbone)
    data = {split: load_split(options.camvid, split, config) for split in ("train", "test")}
    for file in sorted((options.output / "runs").glob("*.json")):  # a table has one recipe
        require_same(file, json.loads(file.read_text())["settings"], settings(options))
    start = start_of_all(data, options)
    for seed in options.seeds:
        for variant in options.variants:
            run(variant, seed, start, data, options)
    print("", table(collect(options.output)), sep="\n")


if __name__ == "__main__":
    try:
        main(parse())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
