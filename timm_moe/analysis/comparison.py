"""Comparison of methods by runs of train.py that are paired by seed, on one folder of images."""

import glob
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from timm.data import ImageDataset

from ..checkpoints.description import SOURCE_PREFIXES
from ..checkpoints.model_spec import ModelSpec
from ..console import printable
from ..export.history import history_of
from ..files import local_path
from .data import Inference, load_classifiers, require_different, short_names
from .evaluation import measure, warn_of_bce

try:
    from scipy.stats import binomtest

    from .paired import LEAST_PAIRS, Difference
except ModuleNotFoundError as error:
    raise ImportError(f"Comparing needs {error.name}: pip install 'timm_moe[evaluate]'.") from error

_logger = logging.getLogger(__name__)

#: Where train.py writes its experiments, unless --output says otherwise.
EXPERIMENTS = Path("output", "train")
#: The checkpoint of an experiment. train.py chooses model_best.pth.tar by the images of its
#: validation, so on these its figures would be too good.
CHECKPOINT = "last.pth.tar"
#: Endings of files of weights.
ENDINGS = (".pth.tar", ".pth", ".ckpt", ".safetensors", ".bin")
#: The time with which the name of an experiment begins if train.py got none by --experiment. The
#: name goes on with the model and the size of its images.
_TIME = re.compile(r"(?<![^/])\d{8}-\d{6}-")
#: Name, title, factor, decimals and sign (1: more is better) of what is compared.
FIGURES = (
    ("accuracy", "top-1, %", 100, 2, 1),
    ("nll", "NLL", 1, 4, -1),
    ("ece", "ECE, 15 bins", 1, 4, -1),
)
#: Arguments of train.py that two runs of one method may differ in.
OF_A_RUN = {
    "seed",
    "experiment",
    "output",
    "resume",
    "workers",
    "device",
    "data_dir",
    "data",
    "log_interval",
}
#: Name of the epoch, from 1 on, that a checkpoint's weights are of, beside train.py's arguments.
LAST_EPOCH = "last epoch"


@dataclass(frozen=True)
class Run:
    """One training: the model that it ended with.

    Attributes:
        name: of the experiment, the folder or the file; with the folders above it where two runs
            would have the same name, or a name that is only a number.
        source: as :func:`timm_moe.checkpoints.source.load_source` takes it.
        group: name of its method, that of the run without its last number. Where train.py named the
            run, it is the name without the time, as ``vit_xtiny-32``: the number is no seed then,
            but the size of the images.
    """

    name: str
    source: str
    group: str


@dataclass(frozen=True)
class Measured:
    """A run with its figures.

    Attributes:
        run: the run.
        seed: train.py's, or else the last number in the run's name; None if there is neither.
        options: train.py's arguments, without those of :data:`OF_A_RUN`, and :data:`LAST_EPOCH`;
            empty for an exported folder.
        recorded: as texts, those of them that an exported folder records.
        figures: accuracy, NLL and ECE, by the names in :data:`FIGURES`.
        right: for each image, whether its class was the most probable one, (N,).
    """

    run: Run
    seed: int | None
    options: dict[str, Any]
    recorded: dict[str, str]
    figures: dict[str, float]
    right: torch.Tensor


@dataclass(frozen=True)
class Comparison:
    """A method beside the first one.

    Attributes:
        group: name of the method.
        first: name of the first method.
        seeds: those that both have.
        differences: by the names in :data:`FIGURES`.
        only: of a single pair the images that only this method, and only the first, got right.
        p: of a single pair the two-sided p-value of McNemar's exact test on these.
    """

    group: str
    first: str
    seeds: list[int | None]
    differences: dict[str, Difference]
    only: tuple[int, int] | None = None
    p: float | None = None


# --- the runs


def find_runs(arguments: Sequence[str]) -> list[Run]:
    """Find the runs that arguments name.

    They are experiments of train.py, checkpoints, exported folders and ``hf-hub:`` names.

    An experiment is its folder, or its name, looked for in ``output/train``; ``*`` stands for
    several. Its ``last.pth.tar`` is taken.

    Raises:
        FileNotFoundError: if one is not there.
        ValueError: if a run is named twice, also by another path, or there are fewer than two.
    """
    found = [run for argument in arguments for run in _runs_of(argument)]
    require_different([source for _, source in found])
    runs = _named(found)
    if len(runs) < 2:
        raise ValueError(f"Two runs at least are compared, got {len(runs)}.")
    if len({run.group for run in runs}) == 1:
        _logger.info(
            "All runs are of %s, so each is compared with the first: name the runs of another "
            "method too to compare methods.",
            runs[0].group,
        )
        runs = [Run(run.name, run.source, run.name) for run in runs]
    return runs


def _runs_of(argument: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the runs that an argument names: the parts of each path, and its source."""
    if argument.startswith(SOURCE_PREFIXES):
        yield (argument,), argument
        return
    for pattern in (str(local_path(argument)), str(EXPERIMENTS / argument)):
        found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))
        for path in map(Path, found):
            has_checkpoint = path.is_dir() and (path / CHECKPOINT).exists()
            file = path / CHECKPOINT if has_checkpoint else path
            is_file = path.name.endswith(ENDINGS) and not path.is_dir()
            folder = path.absolute().parent
            place = folder if is_file and folder.name else path.absolute()
            yield place.parts, str(file)
        if found:
            return
    raise FileNotFoundError(
        f"{argument} is no run: neither here nor in {EXPERIMENTS} is there such an experiment, "
        "checkpoint or folder."
    )


def _named(found: Sequence[tuple[tuple[str, ...], str]]) -> list[Run]:
    """Name runs by the last parts of their paths: as few as make all names different.

    A file has the name of its folder, or its own without its ending if others are in its folder.
    """
    places = [parts for parts, _ in found]
    paths = [
        (*parts, _stem(source)) if places.count(parts) > 1 else parts for parts, source in found
    ]
    names = short_names(paths, lambda name: bool(_group(name)))
    return [
        Run(name, source, _group(name) or name)
        for name, (_, source) in zip(names, found, strict=True)
    ]


def _stem(file: str) -> str:
    """Return the name of a file without the ending of weights."""
    name = Path(file).name
    return next((name.removesuffix(end) for end in ENDINGS if name.endswith(end)), name)


def _group(name: str) -> str:
    """Return the name of a run's method, see :class:`Run`."""
    if _TIME.search(name):
        return _TIME.sub("", name)
    return re.sub(r"[-_./ ]?(seed)?[-_. ]?\d+$", "", name)


# --- their figures


def measure_runs(
    runs: Sequence[Run],
    images: ImageDataset,
    spec: ModelSpec | None = None,
    use_ema: bool = False,
    inference: Inference | None = None,
) -> list[Measured]:
    """Measure runs one after the other, so that one model at a time is in memory.

    Args:
        runs: from :func:`find_runs`.
        images: from :func:`timm_moe.analysis.data.image_folder`.
        spec: statements about models whose files do not make them.
        use_ema: take the EMA weights.
        inference: settings of the forwards.

    Raises:
        ValueError: if two runs of a method have the same seed; and as
            :func:`timm_moe.analysis.evaluation.evaluate`.
    """
    inference = inference or Inference()
    measured: list[Measured] = []
    for run in runs:
        (model,), numbered = load_classifiers([run.source], images, spec, use_ema, inference)
        origin = getattr(model, "origin", None)
        train_args = getattr(origin, "train_args", {})
        history = history_of(model)
        stated = history.options.get("seed")
        seed = int(stated) if stated and stated.isdecimal() else _last_number(run.name)
        for other in measured:
            if other.run.group == run.group and other.seed == seed:
                raise ValueError(
                    f"{other.run.name} and {run.name}, runs of {run.group}, have the same seed, "
                    f"{seed}: pairs need one of each. Train them with different --seed, or name "
                    "them otherwise if the number is no seed."
                )
        warn_of_bce([model], [run.source])
        figures = measure([model], [run.source], numbered, None, inference)
        right = figures.predicted.tensor() == figures.labels.tensor()
        result = figures.result()
        options = {name: value for name, value in train_args.items() if name not in OF_A_RUN}
        recorded = {name: text for name, text in history.options.items() if name not in OF_A_RUN}
        if history.epoch is not None:
            recorded[LAST_EPOCH] = str(history.epoch + 1)
            if options:
                options[LAST_EPOCH] = history.epoch + 1
        found = {name: result[name] for name, *_ in FIGURES}
        measured.append(Measured(run, seed, options, recorded, found, right))
    return measured


def _last_number(name: str) -> int | None:
    found = re.search(r"(\d+)$", name)
    return int(found[1]) if found and not _TIME.search(name) else None


# --- their differences


def compare(measured: Sequence[Measured]) -> list[Comparison]:
    """Compare each method with the first one, over the seeds that both have.

    Two methods of one run each are a pair whatever their seeds are.
    """
    groups = by_group(measured)
    first, *others = groups
    comparisons = []
    for group in others:
        pairs = _pairs(groups[first], groups[group])
        differences = {
            name: Difference.of([own.figures[name] - base.figures[name] for base, own in pairs])
            for name, *_ in FIGURES
            if pairs
        }
        seeds = [own.seed for _, own in pairs]
        if len(pairs) == 1:
            ((base, own),) = pairs
            only = (
                int((own.right & ~base.right).sum()),
                int((base.right & ~own.right).sum()),
            )
            p = binomtest(only[0], sum(only)).pvalue if sum(only) else 1.0
            comparisons.append(Comparison(group, first, seeds, differences, only, float(p)))
        else:
            comparisons.append(Comparison(group, first, seeds, differences))
    return comparisons


def by_group(measured: Sequence[Measured]) -> dict[str, list[Measured]]:
    """List the runs of each method, in the order of their seeds."""
    groups: dict[str, list[Measured]] = {}
    for each in measured:
        groups.setdefault(each.run.group, []).append(each)
    for group in groups.values():
        group.sort(key=lambda each: math.inf if each.seed is None else each.seed)
    return groups


def _pairs(
    first: Sequence[Measured], second: Sequence[Measured]
) -> list[tuple[Measured, Measured]]:
    if len(first) == len(second) == 1:
        return [(first[0], second[0])]
    by_seed = {each.seed: each for each in first if each.seed is not None}
    return [(by_seed[each.seed], each) for each in second if each.seed in by_seed]


# --- what is shown


def table(measured: Sequence[Measured], comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield lines on each method: its means, and its differences from the first one."""
    groups = by_group(measured)
    yield f"{len(measured[0].right):,} images; mean over runs (one by one)"
    width = max(map(len, groups))
    for name, title, factor, decimals, sign in FIGURES:
        yield title
        for group, runs in groups.items():
            values = [factor * each.figures[name] for each in runs]
            each_one = " ".join(f"{value:.{decimals}f}" for value in values)
            yield f"  {group:<{width}}  {mean(values):.{decimals}f}  ({each_one})"
        for comparison in comparisons:
            if comparison.differences:
                text = _written(comparison.differences[name], factor, decimals, sign)
                yield f"  {comparison.group} - {comparison.first}: {text}"
    for comparison in comparisons:
        yield from _notes(comparison)
        yield from _partnerless(comparison, groups)
    yield from unfinished(measured)
    yield from differing_options(groups)


def _written(difference: Difference, factor: float, decimals: int, sign: int) -> str:
    middle = f"{factor * difference.mean:+.{decimals}f}"
    if difference.pairs < 2:
        return middle
    low, high = (f"{factor * end:+.{decimals}f}" for end in (difference.low, difference.high))
    interval = f"95 % interval {low} to {high}, {difference.pairs} pairs"
    return f"{middle} ({interval}), {difference.verdict(sign)}"


def _notes(comparison: Comparison) -> Iterator[str]:
    names = f"{comparison.group} and {comparison.first}"
    if not comparison.differences:
        yield f"{names} share no seed, so they are not compared."
    elif comparison.only is not None:
        own, base = comparison.only
        yield (
            f"McNemar's exact test: only {comparison.group} got {own:,} images right, only "
            f"{comparison.first} {base:,}, p = {comparison.p:.2g}. It asks whether these two "
            "networks differ; whether the methods do, only runs of several seeds can tell."
        )
    elif len(comparison.seeds) < LEAST_PAIRS:
        yield f"{names} have two pairs, from which there is no verdict: train a third seed."


def _partnerless(comparison: Comparison, groups: Mapping[str, Sequence[Measured]]) -> Iterator[str]:
    """Yield a line on the runs that are in the means, and not in the differences."""
    both = (*groups[comparison.first], *groups[comparison.group])
    if len(both) == 2 or not comparison.differences:  # One run each is a pair whatever the seeds.
        return
    alone = [each.run.name for each in both if each.seed not in comparison.seeds]
    if alone:
        yield f"Without a partner, so in no difference: {', '.join(alone)}."


def unfinished(measured: Sequence[Measured]) -> Iterator[str]:
    """Yield a warning for each run whose weights are of an earlier epoch than its last one.

    Cooldown and cycles of the learning rate only add to train.py's --epochs.
    """
    for each in measured:
        last, epochs = each.recorded.get(LAST_EPOCH, ""), each.recorded.get("epochs", "")
        if last.isdecimal() and epochs.isdecimal() and int(last) < int(epochs):
            yield f"Careful: the weights of {each.run.name} are of epoch {last} of {epochs}."


def differing_options(groups: Mapping[str, Sequence[Measured]]) -> Iterator[str]:
    """Yield a line on the options that methods differ in, and a warning if runs of one do."""
    for group, runs in groups.items():
        for each in runs[1:]:
            if differing := _differing(runs[0], each):
                yield (
                    f"Careful: {runs[0].run.name} and {each.run.name}, both of {group}, differ "
                    f"not only in the seed but in {', '.join(differing)}."
                )
    (first, (base, *_)), *others = groups.items()
    for group, (own, *_) in others:
        if differing := _differing(base, own):
            values = [
                f"{name} ({', '.join(map(_shown, both))})" for name, both in differing.items()
            ]
            yield f"{first} and {group} were trained with different {'; '.join(values)}."


def _shown(value: Any) -> str:
    """Write the value of an option, of which train.py may have none."""
    return "not set" if value in (None, "") else str(value)


def _differing(one: Measured, other: Measured) -> dict[str, tuple[Any, Any]]:
    """Return the options that two runs differ in, and their values.

    Where one of them is an exported folder, those are compared that such a folder records. Nothing
    is known of a run that states none.
    """
    pairs = (one.options, other.options), (one.recorded, other.recorded)
    a, b = next(((a, b) for a, b in pairs if a and b), ({}, {}))
    names = sorted({*a, *b})
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def check_drawable(file: str | Path) -> None:
    """Raise ValueError unless a file's ending is one that matplotlib draws."""
    from matplotlib.figure import Figure

    endings = Figure().canvas.get_supported_filetypes()
    if Path(file).suffix.lower().removeprefix(".") not in endings:
        known = ", ".join(f".{ending}" for ending in sorted(endings))
        raise ValueError(f"A picture cannot be drawn to {file}: its name must end in {known}.")


def plot(measured: Sequence[Measured], comparisons: Sequence[Comparison], file: Path) -> None:
    """Draw a panel for each figure: all runs, and differences from the first method."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    groups = by_group(measured)
    with rc_context({"text.parse_math": False, "text.usetex": False}):
        figure = Figure(figsize=(11, 1.6 + 0.5 * len(groups)), layout="constrained")
        panels: Any = figure.subplots(2, len(FIGURES), sharey="row")
        for column, (name, title, factor, _, sign) in enumerate(FIGURES):
            runs, gaps = panels[0, column], panels[1, column]
            for place, each in enumerate(groups.values()):
                values = [factor * run.figures[name] for run in each]
                runs.plot(values, [place] * len(values), "o", alpha=0.6)
            runs.set_yticks(range(len(groups)), [*map(printable, groups)])
            runs.set_title(
                f"{title}, {'more' if sign > 0 else 'less'} is better", fontsize="medium"
            )
            for place, comparison in enumerate(comparisons):
                if not comparison.differences:
                    continue
                found = comparison.differences[name]
                half = factor * (found.high - found.mean) if found.pairs > 1 else math.nan
                gaps.errorbar(factor * found.mean, place, xerr=half, fmt="o", capsize=3)
            gaps.axvline(0, color="black", linewidth=0.8)
            labels = [f"{comparison.group} - {comparison.first}" for comparison in comparisons]
            gaps.set_yticks(range(len(labels)), [*map(printable, labels)])
            gaps.set_xlabel("difference, 95 % interval")
            for panel, number in ((runs, len(groups)), (gaps, len(labels))):
                panel.set_ylim(number - 0.5, -0.5)
                panel.grid(axis="x", linewidth=0.3)
        figure.savefig(file, dpi=110)
