"""One picture of all methods: differences from dense training, and what the papers print."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from timm_moe.analysis.paired import BETTER, WORSE, Difference

from .catalogue import STUDIES
from .catalogue.ensembles import PBE
from .catalogue.students import LONG
from .outcome import Outcome, published

#: Points that are shown; what lies beyond is written at the edge.
SHOWN = (-4.2, 2.8)


@dataclass(frozen=True)
class Row:
    """A method beside dense training by the same recipe.

    Attributes:
        method: its name.
        setting: in what it was trained here.
        study: name of the study.
        arm: name of the method's arm.
        dense: name of the arm of dense training.
    """

    method: str
    setting: str
    study: str
    arm: str
    dense: str = "dense"

    def difference(self, outcome: Outcome) -> Difference | None:
        """Compare the two arms by top-1; None if they share no seed."""
        return outcome.difference(self.arm, self.dense, outcome.study.measure.figures[0])

    def paper(self) -> float | None:
        """Return the paper's difference of two arms, of a range its middle; None without both."""
        size = STUDIES[self.study].sizes["small"]
        values = [_middle(size.arm(name).paper) for name in (self.arm, self.dense)]
        return None if None in values else values[0] - values[1]  # type: ignore[operator]


def _middle(printed: str) -> float | None:
    """Read "91.5 to 91.7" as 91.6, and "83.10 (NLL 0.642)" as 83.1."""
    numbers = re.findall(r"\d+\.\d+", printed.partition("(")[0])
    return mean(map(float, numbers)) if numbers else None


ROWS = (
    Row("EWA", "120 epochs, strong, 20 seeds", "twenty", "EWA, linear"),
    Row("EWA", "30 epochs", "scratch", "EWA, linear"),
    Row("EWA", "100 epochs, 20 classes", "confirmation", "linear"),
    Row("EWA", "fine-tuning, SGD", "finetuning", "EWA, linear"),
    Row("EWA", "fine-tuning, AdamW", "adamw", "EWA, linear"),
    *(
        Row(
            method, f"120 epochs, {recipe} recipe", "recipe", f"{arm}, {recipe}", f"dense, {recipe}"
        )
        for method, arm in (("EWA", "EWA, linear"), ("V-MoE, top-2 of 8", "V-MoE, top-2"))
        for recipe in ("weak", "medium", "strong")
    ),
    Row("V-MoE, top-2 of 8", "fine-tuning, AdamW", "adamw", "V-MoE, gates renormalised"),
    Row("V-MoE, top-1 of 8", "fine-tuning", "ensembles", "V-MoE, K 1", "ViT"),
    Row("pBE, 2 members", "fine-tuning", "ensembles", PBE, "ViT"),
    Row("Switch, top-1 of 4", "30 epochs", "routing", "naive MoE"),
    Row("Switch, Early EWA", "30 epochs", "routing", "MoE, Early EWA"),
    Row("Switch, top-1 of 8", "60 epochs", "routers", "top-1 of 8"),
    Row("fine-grained experts", "60 epochs", "routers", "top-2 of 16 halves"),
    Row(
        "fine-grained, shared one", "60 epochs", "routers", "top-3 of 32 quarters and a shared one"
    ),
    Row("sigmoid gates, bias", "60 epochs", "routers", "top-2 of 16 halves, sigmoid and bias"),
    Row("Expert Choice", "60 epochs", "routers", "Expert Choice of 8"),
    Row("Soft MoE", "60 epochs", "routers", "Soft MoE of 8"),
    *(
        Row(
            "ViMoE" if with_shared else "ViMoE, no shared expert",
            place,
            "vimoe",
            arm,
            "dense, trained on",
        )
        for with_shared, place, arm in (
            (True, "last two blocks", "shared expert, in the last two blocks"),
            (True, "every block", "shared expert, in every block"),
            (False, "last two blocks", "no shared expert, in the last two blocks"),
            (False, "every block", "no shared expert, in every block"),
        )
    ),
    Row("WideNet", "30 epochs", "widenet", "WideNet, 2 of 4 experts", "dense, blocks of their own"),
    Row("OneS student", "top-k, distilled", "students", "topk, distilled", LONG),
)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw a difference with its 95 % interval a line, and the paper's as a hollow dot."""
    from matplotlib.figure import Figure

    known = published(outcomes)
    measured = [(row, row.difference(known[row.study])) for row in ROWS if row.study in known]
    rows = [(row, found) for row, found in measured if found is not None]
    if not rows:
        return
    figure = Figure(figsize=(8.2, 0.6 + 0.27 * len(rows)), layout="constrained")
    axes: Any = figure.subplots()
    axes.axvline(0, color="black", linewidth=0.8)
    for place, (row, found) in enumerate(rows):
        paper = row.paper()
        color = {BETTER: "C2", WORSE: "C3"}.get(found.verdict(1), "C7")
        width = [[found.mean - found.low], [found.high - found.mean]]
        axes.errorbar(found.mean, place, xerr=width, fmt="o", color=color, capsize=3)
        if paper is not None and paper > SHOWN[0]:
            axes.plot(paper, place, "o", markerfacecolor="white", color="C0", zorder=3)
        elif paper is not None:
            axes.text(SHOWN[0], place, f" ◁ {paper:.1f}", va="center", color="C0", fontsize="small")
    for label, style in (
        ("here: no clear difference", dict(color="C7", marker="o")),
        ("here: better", dict(color="C2", marker="o")),
        ("here: worse", dict(color="C3", marker="o")),
        ("the paper, at its size", dict(color="C0", marker="o", markerfacecolor="white")),
    ):
        axes.plot([], [], linestyle="", label=label, **style)
    axes.set_yticks(range(len(rows)), [f"{row.method} · {row.setting}" for row, _ in rows])
    axes.set(xlim=SHOWN, xlabel="top-1 minus that of dense training, points, 95 % interval")
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.3)
    figure.legend(loc="outside upper right", ncols=2, fontsize="small")
    figure.savefig(path, dpi=110)
