"""Train EWA on point clouds (section 5.2 and table 5), with Point-BERT's classifier:

python examples/point_clouds.py --data mnist --data-dir DIR --output results.json

One classifier is trained for each variant and seed, and a table is printed. A seed gives all
variants the same batches and the same weights outside of the experts. Accuracies are of the last
epoch on the test set, without selection. docs/point_clouds.md has the paper's command, and
points/data.py says where the data come from.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

import timm
import torch
from points.data import READERS, Clouds
from points.grouping import farthest_points, gather_points, group_points
from points.models import PointTransformer, load_point_bert
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

import timm_moe

#: Options of convert_to_moe. Naive is a Switch layer with the paper's capacity for point clouds
#: (section 6).
NAIVE = dict(router="top_k", top_k=1, capacity_factor=1.2, aux_loss="balance", aux_loss_weight=0.01)
VARIANTS = {
    "dense": {},
    "ewa": {"router": "random", "share_schedule": "linear"},
    "naive": NAIVE,
    "early-ewa": {**NAIVE, "share_schedule": "early"},
}
AVERAGED = ("ewa", "early-ewa")
#: Options of the model and its training. "paper" follows Point-BERT's PointTransformer.yaml: each
#: step draws num_points of sampled_points far points, scales and moves them. Without num_points,
#: groups are made once.
SIZES = {
    "small": dict(
        model=dict(
            num_groups=24,
            group_size=12,
            width=64,
            depth=4,
            num_heads=4,
            drop_path=0.0,
            group_widths=(16, 32, 64, 64),
            head_dropout=0.2,
        ),
        epochs=10,
        warmup_epochs=1,
        batch_size=64,
        lr=2e-3,
        weight_decay=0.05,
        clip=10,
        num_points=None,
        sampled_points=None,
    ),
    "paper": dict(
        model=dict(),
        epochs=300,
        warmup_epochs=10,
        batch_size=32,
        lr=5e-4,
        weight_decay=0.05,
        clip=10,
        num_points=1024,
        sampled_points=1200,
    ),
}
VOTES = 10


# --- clouds


def sample(points: Tensor, size: dict, generator: torch.Generator) -> Tensor:
    """Draw ``num_points`` of ``sampled_points`` far points (B, N, 3).

    Each cloud is scaled and moved, as in Point-BERT.
    """
    device, count = points.device, min(size["sampled_points"], points.shape[1])
    start = torch.randint(points.shape[1], (1,), generator=generator).item()
    points = points.roll(-start, 1)  # sampling begins at the first point
    points = gather_points(points, farthest_points(points, count))
    points = points[:, torch.randperm(count, generator=generator)[: size["num_points"]].to(device)]
    scale, move = torch.rand(2, len(points), 1, 3, generator=generator).to(device)
    return points * (2 / 3 + scale * (3 / 2 - 2 / 3)) + 0.4 * move - 0.2


class Batches:
    """Batches of clouds on a device, as inputs of the classifier.

    Args:
        clouds: all with the same number of points.
        size: a value of SIZES.
        device: the model's.
    """

    def __init__(self, clouds: Clouds, size: dict, device: torch.device):
        self.size, self.device, self.labels = size, device, clouds.labels
        self.points = clouds.points
        if size["num_points"] is None:
            groups = size["model"]["num_groups"], size["model"]["group_size"]
            parts = [group_points(part, *groups) for part in clouds.points.split(500)]
            self.groups = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def inputs(
        self, rows: Tensor, generator: torch.Generator | None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return these clouds.

        Points are drawn again if a generator is given and the size has num_points.
        """
        if self.size["num_points"] is None:
            return tuple(tensor[rows].to(self.device) for tensor in self.groups)
        points = self.points[rows].to(self.device)
        if generator is None:
            return gather_points(points, farthest_points(points, self.size["num_points"]))
        return sample(points, self.size, generator)

    def shuffled(
        self, generator: torch.Generator
    ) -> Iterator[tuple[Tensor | tuple[Tensor, ...], Tensor]]:
        """Yield inputs and labels of one epoch, without a last incomplete batch."""
        for rows in torch.randperm(len(self.labels), generator=generator).split(
            self.size["batch_size"]
        ):
            if len(rows) == self.size["batch_size"]:
                yield self.inputs(rows, generator), self.labels[rows].to(self.device)

    @torch.inference_mode()
    def logits(self, model: nn.Module, votes: int = 0) -> Tensor:
        """Compute the logits of all clouds in order; with votes, the mean over that many draws."""
        model.eval()
        generators = [torch.Generator().manual_seed(vote) for vote in range(votes)] or [None]
        parts = torch.arange(len(self.labels)).split(self.size["batch_size"])
        drawn = [
            torch.cat([model(self.inputs(rows, g)).cpu() for rows in parts]) for g in generators
        ]
        return torch.stack(drawn).mean(0)

    def accuracy(self, logits: Tensor) -> float:
        """Top-1 accuracy in percent."""
        return 100 * (logits.argmax(1) == self.labels).float().mean().item()


# --- a run


def make_model(
    variant: str, seed: int, num_classes: int, settings: dict, checkpoint: Path | None
) -> PointTransformer:
    """Create the classifier of a variant.

    All variants of a seed have the same weights outside of the experts.
    """
    torch.manual_seed(seed)
    model = PointTransformer(num_classes, **settings["training"]["model"])
    if checkpoint:
        print(
            f"{checkpoint} has no weights for: "
            f"{', '.join(load_point_bert(model, checkpoint)) or 'none is missing'}"
        )
    if variant == "dense":
        return model
    rate = settings["share_rate"] if variant in AVERAGED else None
    init = "same" if checkpoint else "independent"
    return timm_moe.convert_to_moe(model, expert_init=init, share_rate=rate, **VARIANTS[variant])


def train(model: nn.Module, batches: Batches, epochs: int, seed: int, name: str) -> None:
    """Train a classifier, dense or with experts."""
    size, generator = batches.size, torch.Generator().manual_seed(seed)
    steps = len(batches.labels) // size["batch_size"]
    optimizer = create_optimizer_v2(
        model, "adamw", lr=size["lr"], weight_decay=size["weight_decay"]
    )
    schedule = CosineLRScheduler(
        optimizer,
        epochs * steps,
        lr_min=1e-6,
        warmup_t=min(size["warmup_epochs"] * steps, epochs * steps - 1),
        warmup_lr_init=1e-6,
        t_in_epochs=False,
    )
    if timm_moe.moe_layers(model):
        timm_moe.start_averaging(model, optimizer, epochs * steps)  # nothing for naive experts
    start = time.perf_counter()
    for epoch in range(epochs):
        model.train()
        losses = []
        for step, (inputs, labels) in enumerate(batches.shuffled(generator), 1 + epoch * steps):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            losses.append(loss.detach())
            optimizer.zero_grad()
            timm_moe.add_router_losses(model, loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), size["clip"])
            optimizer.step()
            schedule.step_update(step)
        loss, seconds = torch.stack(losses).mean().item(), time.perf_counter() - start
        print(
            f"{name}, epoch {epoch + 1} of {epochs}: training loss {loss:.3f}, {seconds:.0f} s",
            flush=True,
        )
        if not math.isfinite(loss):
            raise ValueError(f"{name}: the training loss is {loss} after epoch {epoch + 1}.")


def run(
    variant: str, seed: int, sets: dict[str, Batches], num_classes: int, args: argparse.Namespace
) -> dict:
    """Train and measure one model. For EWA, the dense classifier is measured."""
    settings = settings_of(args)
    model = make_model(variant, seed, num_classes, settings, args.checkpoint).to(args.device)
    parameters, start = (
        sum(parameter.numel() for parameter in model.parameters()),
        time.perf_counter(),
    )
    torch.manual_seed(seed)  # for the draws of the training
    train(model, sets["train"], args.epochs, seed, f"{variant}, seed {seed}")
    result = {"variant": variant, "seed": seed, "settings": settings, "parameters": parameters}
    result["seconds"] = round(time.perf_counter() - start, 1)
    logits = sets["test"].logits(model)
    if variant == "ewa":
        model = timm_moe.to_dense(model)
        dense = sets["test"].logits(model)
        result["difference"], logits = (dense - logits).abs().max().item(), dense
    result["accuracy"] = sets["test"].accuracy(logits)
    if args.vote:
        result["voted"] = sets["test"].accuracy(sets["test"].logits(model, VOTES))
    result["versions"] = {
        "torch": torch.__version__,
        "timm": timm.__version__,
        "timm_moe": timm_moe.__version__,
    }
    return result


# --- results


def settings_of(args: argparse.Namespace) -> dict:
    """Settings that a result depends on; runs with equal settings are comparable."""
    training = {**SIZES[args.size], "epochs": args.epochs}
    settings = dict(
        data=args.data,
        train_clouds=args.train_clouds,
        test_clouds=args.test_clouds,
        share_rate=args.share_rate,
        checkpoint=args.checkpoint and str(args.checkpoint),
        vote=args.vote,
        training=training,
    )
    return json.loads(json.dumps(settings))  # as it is read back


def read_results(path: Path) -> list[dict]:
    """Read the runs of a results file; a missing file has no runs."""
    if not path.is_file():
        return []
    try:
        runs = json.loads(path.read_text())
        [(run["variant"], run["seed"], run["settings"], run["accuracy"]) for run in runs]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no results file of this command ({error!r}): give another --output."
        ) from error
    return runs


def write_results(path: Path, runs: list[dict]) -> None:
    """Replace the file in one step, so that it is always whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(runs, indent=1) + "\n")
    os.replace(part, path)


def table(runs: list[dict], metric: str = "accuracy") -> str:
    """Format the runs as a table, a line for each variant.

    It has the mean over the seeds, its standard error and the paired difference from dense.
    """
    by_variant = {
        name: {run["seed"]: run for run in runs if run["variant"] == name} for name in VARIANTS
    }
    dense = by_variant["dense"]
    lines = [
        "| variant | top-1, % | of each seed | minus dense, paired | parameters |",
        "|---|---|---|---|---|",
    ]
    for name, by_seed in by_variant.items():
        if not by_seed:
            continue
        values = [by_seed[seed][metric] for seed in sorted(by_seed)]
        pairs = [
            by_seed[seed][metric] - dense[seed][metric] for seed in sorted(by_seed) if seed in dense
        ]
        difference = "" if name == "dense" or not pairs else _mean_and_error(pairs, "+")
        parameters = max(run["parameters"] for run in by_seed.values())
        every = ", ".join(f"{value:.2f}" for value in values)
        lines.append(
            f"| {name} | {_mean_and_error(values)} | {every} | {difference} | {parameters:,} |"
        )
    return "\n".join(lines)


def _mean_and_error(values: list[float], sign: str = "") -> str:
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.2f}{error}"


def print_tables(runs: list[dict]) -> None:
    """Print the table of the runs.

    If there were votes, their table follows. The last line is the difference that exporting made.
    """
    print("", table(runs), sep="\n")
    if runs and all("voted" in run for run in runs):
        print(f"\nWith {VOTES} votes:", "", table(runs, "voted"), sep="\n")
    if differences := [run["difference"] for run in runs if "difference" in run]:
        print(
            "\nLargest difference between the logits of EWA's experts and its dense classifier: "
            f"{max(differences)}"
        )


# --- the command


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the options of the command.

    Options that do not fit each other end it with one sentence.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=READERS, required=True)
    parser.add_argument(
        "--data-dir", type=Path, required=True, help="folder of its files (points/data.py)"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--epochs", type=int, help="10 if small, 300 as in the paper")
    parser.add_argument("--share-rate", type=float, default=0.3)
    parser.add_argument("--train-clouds", type=int, metavar="N", help="only so many; default: all")
    parser.add_argument("--test-clouds", type=int, metavar="N", help="only so many; default: all")
    parser.add_argument(
        "--checkpoint", type=Path, help="of Point-BERT's code, to begin with (--size paper)"
    )
    parser.add_argument(
        "--vote", action="store_true", help=f"measure the mean of {VOTES} draws of each cloud, too"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--output", type=Path, default=Path("results.json"), help="runs in it are not run again"
    )
    args = parser.parse_args(arguments)
    args.epochs = SIZES[args.size]["epochs"] if args.epochs is None else args.epochs
    if args.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {args.epochs}.")
    if not 0 <= args.share_rate <= 0.75:
        parser.error(
            f"--share-rate must lie between 0 and 3 / 4 for four experts, got {args.share_rate}."
        )
    if args.vote and SIZES[args.size]["num_points"] is None:
        parser.error("--vote needs --size paper: the small size draws no points.")
    if args.checkpoint and not args.checkpoint.is_file():
        parser.error(f"--checkpoint {args.checkpoint} is no file.")
    if args.size == "paper" and args.data != "modelnet40":
        parser.error(
            "--size paper needs clouds of at least 1024 points, so --data modelnet40, not "
            f"{args.data}."
        )
    return args


def read_sets(args: argparse.Namespace) -> tuple[dict[str, Batches], int]:
    """Read the sets of clouds by split; also return the number of classes."""
    sets = {}
    for split, limit in (("train", args.train_clouds), ("test", args.test_clouds)):
        clouds = READERS[args.data](args.data_dir, split, limit)
        print(
            f"{args.data}, {split}: {len(clouds.labels)} clouds of {clouds.points.shape[1]} points",
            flush=True,
        )
        sets[split] = Batches(clouds, SIZES[args.size], torch.device(args.device))
    if len(sets["train"].labels) < SIZES[args.size]["batch_size"]:
        raise ValueError(
            f"{len(sets['train'].labels)} clouds do not fill a batch of "
            f"{SIZES[args.size]['batch_size']}."
        )
    return sets, len(clouds.classes)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    try:
        runs, settings = read_results(args.output), settings_of(args)
        done = {(run["variant"], run["seed"]) for run in runs if run["settings"] == settings}
        asked = dict.fromkeys((variant, seed) for seed in args.seeds for variant in args.variants)
        todo = [key for key in asked if key not in done]
        sets, num_classes = read_sets(args) if todo else ({}, 0)
        for variant, seed in todo:
            runs.append(run(variant, seed, sets, num_classes, args))
            write_results(args.output, runs)
            print(f"{variant}, seed {seed}: top-1 {runs[-1]['accuracy']:.2f} %", flush=True)
    except ValueError as error:
        raise SystemExit(f"point_clouds.py: {error}") from error
    print_tables([run for run in runs if run["settings"] == settings])


if __name__ == "__main__":
    main()
