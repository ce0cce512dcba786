"""Report of all results: docs/generated/benchmarks.md and its charts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .protocol import GAUGE, Row

DOCS = Path(__file__).parent.parent / "docs"
TEXT = Path(__file__).parent / "report.md"

Results = dict[str, dict[str, Any]]


class Target(NamedTuple):
    """A bound on a ratio.

    Attributes:
        what: name in the table.
        key: key of the results; ``{dtype}`` stands for the device's usual precision.
        contest: start of the contest's name, likewise.
        entry: start of the entry's name.
        bounds: bound for each device.
    """

    what: str
    key: str
    contest: str
    entry: str
    bounds: dict[str, float]


_SMALL = "step of ViT-S/16"
TARGETS = [
    *(
        Target(f"training step, {what}", "steps {dtype} neutral", _SMALL, entry, {"cpu": bound})
        for what, entry, bound in (
            ("EWA, 4 experts", "EWA, 4", 1.01),
            ("EWA, 8 experts", "EWA, 8", 1.03),
            ("top-1 of 8", "naive", 1.06),
        )
    ),
    *(
        Target(
            f"training step, {how}, {what}", "modes", f"{_SMALL}, {{dtype}}, {mode}", entry, bound
        )
        for how, mode in (("eager", "eager"), ("as CUDA graphs", "reduce-overhead"))
        for what, entry, bound in (
            ("EWA, 4 experts", "EWA, 4", {"cuda": 1.03}),
            ("top-1 of 8", "naive", {"cuda": 1.08}),
        )
    ),
    *(
        Target(
            what,
            f"layers {dtype} eager neutral",
            f"layer, {rows} a row",
            entry,
            {"cpu": cpu, "cuda": cuda},
        )
        for what, dtype, rows, entry, cpu, cuda in (
            (
                "random partition, 4 experts",
                "{dtype}",
                "one expert",
                "random partition, 4",
                1.03,
                1.05,
            ),
            (
                "random partition, 8 experts",
                "{dtype}",
                "one expert",
                "random partition, 8",
                1.03,
                1.05,
            ),
            ("routed layer, top-1", "float32", "one expert", "top-1 of 8", 1.03, 1.10),
            ("routed layer, top-2", "float32", "two experts", "top-2 of 8", 1.10, 1.10),
            ("routed layer, top-1, bfloat16", "bfloat16", "one expert", "top-1 of 8", 1.10, 1.10),
        )
    ),
    *(
        Target(
            f"{what}, batch {batch}",
            "evaluation {dtype} eager neutral",
            f"{contest} in eval mode, batch {batch}",
            entry,
            {"cpu": 1.05, "cuda": 1.05},
        )
        for batch in (1, 32)
        for what, contest, entry in (
            ("image-level top-1, evaluation, layer", "layer", "image-level"),
            ("image-level top-1, evaluation, ViMoE-S/14", "ViT-S/14", "ViMoE"),
        )
    ),
    *(
        Target(
            f"compiled layer, {what}",
            "layers float32 compiled neutral",
            f"layer, {rows} a row",
            entry,
            {"cpu": 1.1},
        )
        for what, rows, entry in (
            ("top-1 of 8", "one expert", "top-1 of 8"),
            ("image-level top-1 of 8", "one expert", "image-level"),
            ("pBE, two members", "one expert", "pBE"),
            ("top-2 of 8", "two experts", "top-2 of 8"),
        )
    ),
    Target(
        "compiled V-MoE layer, 2 of 32, evaluation, batch 32",
        "evaluation float32 compiled neutral",
        "layer of two experts in eval mode, batch 32",
        "V-MoE",
        {"cpu": 1.15},
    ),
    *(
        Target(
            f"{what} of a {whole}, {entry}",
            f"host {dtype}",
            f"{what} of a {whole}",
            entry,
            {"cpu": bound},
        )
        for what, whole, dtype, bounds in (
            (
                *("kernels", "layer", "float32"),
                {"EWA": 1.6, "top-1": 5, "top-2": 5.6, "V-MoE": 9, "Expert Choice": 4, "pBE": 5.6},
            ),
            ("host time", "layer", "bfloat16", {"EWA": 1.5, "top-1": 2.6}),
            ("host time", "step", "bfloat16", {"EWA": 1.12, "naive MoE, top-1": 1.3}),
        )
        for entry, bound in bounds.items()
    ),
    Target(
        "routed layer, top-1 of 64", "scaling eager neutral", "64 experts", "top-1", {"cpu": 1.15}
    ),
    Target(
        "routed layer, top-1 of 8, 64 rows",
        "scaling eager neutral",
        "64 rows",
        "top-1",
        {"cpu": 2.5},
    ),
    Target(
        "averaging 4 experts / memcpy",
        "averaging neutral",
        "averaging, 4",
        "averaging",
        {"cpu": 1.6, "cuda": 1.6},
    ),
    Target(
        "averaging 8 experts / memcpy",
        "averaging neutral",
        "averaging, 8",
        "averaging",
        {"cpu": 1.6, "cuda": 1.6},
    ),
    Target(
        "saved bytes, random partition",
        "layers float32 eager neutral",
        "saved",
        "random",
        {"cpu": 1.01, "cuda": 1.01},
    ),
    Target("export, ViT-L: average and write", "exporting", "time", "average and", {"cpu": 1.5}),
    Target("export, ViT-L: all of it", "exporting", "time", "export_dense", {"cpu": 1.5}),
    Target(
        "export, ViT-L: peak memory, converting", "exporting", "peak", "average and", {"cpu": 1.0}
    ),
    Target(
        "export, ViT-L: peak memory, all of it", "exporting", "peak", "export_dense", {"cpu": 1.0}
    ),
]
_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


def write(folder: Path) -> None:
    """Write the report of all results in a folder."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    parts = [TEXT.read_text().rstrip()]
    for machine, found in results.items():
        name = next(iter(found.values()))["environment"]["device"]
        parts += ["", f"## {name}", *_machine(machine, found)]
        _chart_layers(machine, found)
        _chart_scaling(machine, found)
    (DOCS / "generated/benchmarks.md").write_text("\n".join(parts) + "\n")


def _machine(machine: str, results: Results) -> Iterator[str]:
    device = machine.partition("-")[0]
    yield from ("", "### Targets", "")
    yield from ("| figure | measured in | reached | bound | |", "|---|---|---|---|---|")
    for target in TARGETS:
        if device in target.bounds:
            yield _target_line(target, device, results)
    if "layers float32 eager neutral" in results:
        yield from ("", f"![layers](../images/benchmarks-layers-{machine}.png)")
    for key, result in results.items():
        yield from ("", f"### {key[0].upper()}{key[1:]}", "", _origin(result))
        if key == "scaling eager neutral":
            yield from ("", f"![scaling](../images/benchmarks-scaling-{machine}.png)")
        yield from _tables([Row(**row) for row in result["rows"]])


def _target_line(target: Target, device: str, results: Results) -> str:
    dtype, bound = _DTYPES[device], target.bounds[device]
    key, contest = (text.format(dtype=dtype) for text in (target.key, target.contest))
    rows = [
        row
        for row in (Row(**row) for row in results.get(key, {"rows": []})["rows"])
        if row.contest.startswith(contest) and row.entry.startswith(target.entry)
    ]
    if not rows:
        return f"| {target.what} | | not measured | {bound:g} | |"
    row = rows[0]
    verdict = "yes" if round(row.ratio, 3) <= bound else "**no**"
    if row.low < bound < row.high:
        verdict += ", within the quartiles"
    stated = results[key]["setting"]["dtype"]
    where = row.contest if dtype in row.contest else f"{row.contest}, {stated}"
    return (
        f"| {target.what} | {where} | {row.ratio:.3f} | {bound:g} | "
        f"{verdict if row.counts else 'noise'} |"
    )


def _origin(result: dict[str, Any]) -> str:
    place, setting = result["environment"], result["setting"]
    return (
        f"{place['device']}; Python {place['python']}, torch {place['torch']}, timm "
        f"{place['timm']}, timm_moe {place['timm_moe']}{_commit(place)}; {place['date']}; "
        f"{setting['rounds']} rounds."
    )


def _commit(place: dict[str, str]) -> str:
    """Write the commit of a result; earlier ones have none."""
    return f" ({place['commit']})" if place.get("commit") else ""


def _tables(rows: list[Row]) -> Iterator[str]:
    for contest in dict.fromkeys(row.contest for row in rows):
        members = [row for row in rows if row.contest == contest]
        gauge = members[0].gauge
        noise = (
            ""
            if gauge is None
            else f" (gauge {gauge:.3f}{'' if members[0].counts else ': discard'})"
        )
        yield from (
            "",
            f"| {contest}{noise} | ratio | quartiles | {members[0].unit} | |",
            "|---|---|---|---|---|",
        )
        for row in members:
            quartiles = "" if row.low == row.high else f"{row.low:.3f}-{row.high:.3f}"
            yield f"| {row.entry} | {row.ratio:.3f} | {quartiles} | {row.value:.4g} | {row.note} |"


def _chart_layers(machine: str, results: Results) -> None:
    from matplotlib.figure import Figure

    keys = [
        key
        for dtype in ("float32", "bfloat16")
        if (key := f"layers {dtype} eager neutral") in results
    ]
    if not keys:
        return
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    for number, key in enumerate(keys):
        rows = [
            Row(**row)
            for row in results[key]["rows"]
            if row["unit"] == "ms" and row["entry"] != "dense"
        ]
        places = [place + 0.38 * number for place in range(len(rows))]
        errors = [[row.ratio - row.low for row in rows], [row.high - row.ratio for row in rows]]
        axes.barh(places, [row.ratio for row in rows], 0.36, xerr=errors, label=key.split()[1])
        axes.set_yticks([place + 0.19 for place in range(len(rows))], [row.entry for row in rows])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.axvspan(*GAUGE, color="grey", alpha=0.2, label="allowed noise")
    axes.set_xlim(0.9)
    axes.invert_yaxis()
    axes.set_xlabel("forward and backward, ratio to the dense layer of equal active FLOPs")
    axes.legend()
    figure.savefig(DOCS / "images" / f"benchmarks-layers-{machine}.png", dpi=120)


def _chart_scaling(machine: str, results: Results) -> None:
    from matplotlib.figure import Figure

    if "scaling eager neutral" not in results:
        return
    rows = [Row(**row) for row in results["scaling eager neutral"]["rows"]]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, axis in zip(
        figure.subplots(1, 3, sharey=True), ("experts", "rows", "width"), strict=True
    ):
        for entry in ("random partition", "top-1"):
            points = [
                (int("".join(filter(str.isdigit, row.contest))), row)
                for row in rows
                if axis in row.contest and row.entry == entry
            ]
            if not points:
                continue
            middle = [row.ratio for _, row in points]
            errors = [
                [row.ratio - row.low for _, row in points],
                [row.high - row.ratio for _, row in points],
            ]
            numbers = [number for number, _ in points]
            (line, *_) = axes.errorbar(numbers, middle, errors, marker="o", label=entry)
            noisy = [(number, row.ratio) for number, row in points if not row.counts]
            for number, ratio in noisy:
                axes.plot(number, ratio, "o", color=line.get_color(), markerfacecolor="white")
        axes.set_xscale("log", base=2)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xlabel(axis)
        axes.legend()
    figure.axes[0].set_ylabel("ratio to dense")
    figure.savefig(DOCS / "images" / f"benchmarks-scaling-{machine}.png", dpi=120)
