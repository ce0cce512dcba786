"""The drawings of the documentation.

``python docs/drawings.py`` writes docs/images/concept_<method>.svg and way.svg.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from timm_moe.analysis.colours import COLOURS as ALL_COLOURS

FOLDER = Path(__file__).with_name("images")
#: Of a drawing, in inches.
SIZE = (11.0, 3.3)
#: The same drawing gives the same file.
SAME = {"svg.hashsalt": "timm_moe", "svg.fonttype": "path"}
#: The colours of four experts.
COLOURS = ALL_COLOURS[:4]
GREY, INK, PAPER = "#C9CED4", "#1B1B1B", "#F1F3F5"
#: Size of a panel, in its own units.
WIDTH, HEIGHT = 10.0, 7.0


class Panel:
    """Panel of a drawing, 10 units wide and 7 high."""

    def __init__(self, axes: Axes, title: str, says: str):
        axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
        axes.axis("off")
        axes.set_title(title, fontsize=11, fontweight="bold", color=INK)
        axes.text(
            WIDTH / 2, 0.0, says, fontsize=8.5, ha="center", va="bottom", color=INK, linespacing=1.3
        )
        self.axes = axes

    def box(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = PAPER,
        width: float = 1.6,
        height: float = 0.9,
    ) -> tuple[float, float]:
        """Draw a rounded box around a point, which is returned."""
        corner = (x - width / 2 + 0.1, y - height / 2 + 0.1)
        look: dict[str, Any] = dict(
            boxstyle="round,pad=0.1,rounding_size=0.15", facecolor=colour, edgecolor=INK
        )
        self.axes.add_patch(FancyBboxPatch(corner, width - 0.2, height - 0.2, **look))
        red, green, blue = bytes.fromhex(colour[1:])
        readable = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else INK
        self.axes.text(x, y, text, ha="center", va="center", fontsize=8.5, color=readable)
        return x, y

    def tokens(
        self, y: float, colours: Sequence[str], x: float = WIDTH / 2, size: float = 0.55
    ) -> list[float]:
        """Draw a row of tokens around x, and return the x of each."""
        places = [
            x + (index - (len(colours) - 1) / 2) * size * 1.35 for index in range(len(colours))
        ]
        self.axes.bar(places, size, size, y - size / 2, color=colours, edgecolor=INK, linewidth=0.8)
        return places

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        colour: str = INK,
        style: str = "-",
        text: str = "",
    ) -> None:
        """Draw an arrow from one point to another, with a word beside its middle."""
        line = dict(
            arrowstyle="-|>", color=colour, linestyle=style, linewidth=1.2, shrinkA=0, shrinkB=0
        )
        self.axes.annotate("", end, start, arrowprops=line)
        x, y = (start[0] + end[0]) / 2 + 0.15, (start[1] + end[1]) / 2
        self.axes.text(x, y, text, fontsize=8, va="center", color=INK)

    def write(self, x: float, y: float, text: str, size: float = 8.5) -> None:
        self.axes.text(x, y, text, fontsize=size, ha="center", va="center", color=INK)


def panels(figure: Figure, says: Sequence[str]) -> list[Panel]:
    """Make the three panels of every drawing, side by side, each with its sentence."""
    titles = ("A token", "A training step", "A checkpoint")
    return [Panel(*each) for each in zip(figure.subplots(1, 3), titles, says, strict=True)]


def experts(panel: Panel, y: float) -> list[tuple[float, float]]:
    """Draw a row of four experts in their colours, and return their middles."""
    return [
        panel.box(WIDTH / 4 * (number + 0.5), y, f"E{number + 1}", COLOURS[number])
        for number in range(4)
    ]


def dense_to_experts(panel: Panel, into: str, back: str, result: str) -> None:
    """Draw a dense network that becomes experts, and the result of these."""
    panel.box(5, 6.4, "dense", width=3.2)
    row = experts(panel, 4.2)
    for (x, y), colour in zip(row, COLOURS, strict=True):
        panel.arrow((5, 5.95), (x, y + 0.5), colour)
        if back:
            panel.arrow((x, y - 0.5), (5, 2.5), colour)
    panel.write(1.2, 5.6, into)
    panel.write(1.2, 2.9, back)
    if result:
        panel.box(5, 2.05, result, width=5.2)


def routes(
    panel: Panel, chosen: Sequence[Sequence[int]], dropped: Sequence[tuple[int, int]] = ()
) -> None:
    """Draw tokens in a row and their ways to the experts that each chose.

    From there the ways lead out again in the same order.

    A token takes the colour of its first expert. A pair of token and expert is dropped if there is
    no place.
    """
    before = panel.tokens(6.5, [GREY] * len(chosen))
    row = experts(panel, 4.2)
    after = panel.tokens(2.1, [COLOURS[first] for first, *_ in chosen])
    for token, of_token in enumerate(chosen):
        for expert in of_token:
            (x, y), kept = row[expert], (token, expert) not in dropped
            panel.arrow(
                (before[token], 6.2), (x, y + 0.5), COLOURS[expert], style="-" if kept else ":"
            )
            if kept:
                panel.arrow((x, y - 0.5), (after[token], 2.4), COLOURS[expert])


def ewa(figure: Figure) -> None:
    """Experts Weights Averaging (arXiv 2308.06093, figure 1 and eq. 6)."""
    token, step, checkpoint = panels(
        figure,
        (
            "Each token goes to a random expert,\neach expert gets as many. No router.",
            "After the optimizer's step each expert moves\na little towards the others. Their "
            "mean stays.",
            "Dense weights are copied into every expert.\nThe mean of the trained ones is "
            "exported.",
        ),
    )
    routes(token, [[expert] for expert in (0, 2, 1, 3, 2, 0, 3, 1)])
    for (x, y), colour in zip(
        ((2.0, 5.6), (8.2, 6.1), (2.6, 2.1), (7.4, 2.2)), COLOURS, strict=True
    ):
        near = (x + 0.55 * (5 - x), y + 0.55 * (4 - y))
        step.arrow((x, y), near, colour)
        step.axes.plot(x, y, "o", color=colour, markersize=11, alpha=0.35)
        step.axes.plot(*near, "o", color=colour, markersize=11)
    step.axes.plot(5, 4, "X", color=INK, markersize=10)
    step.write(5, 3.3, "mean")
    dense_to_experts(checkpoint, into="copy", back="mean", result="dense: stock timm")


def vmoe(figure: Figure) -> None:
    """V-MoE (arXiv 2106.05974) and, with one choice, Switch."""
    token, step, checkpoint = panels(
        figure,
        (
            "A learned router sends each token to its 2 best\nexperts. What is over an expert's "
            "capacity is dropped.",
            "Router losses are added to the images' loss.\nThey bring each expert's load near an "
            "even share.",
            "Dense weights are copied into every expert, the\nrouter is new. Experts stay; OneS "
            "makes students.",
        ),
    )
    routes(token, [(0, 2), (1, 0), (2, 1), (0, 3), (3, 1)], dropped=[(3, 0)])
    loads(step, "tokens of each expert")
    dense_to_experts(checkpoint, into="copy", back="", result="")
    checkpoint.box(5, 2.05, "the same experts, with their router", width=7.6)
    checkpoint.arrow((5, 3.7), (5, 2.55))


def vimoe(figure: Figure) -> None:
    """ViMoE (arXiv 2410.15732, section 3)."""
    token, step, checkpoint = panels(
        figure,
        (
            "The class token (c) chooses one expert for its\nimage. All tokens pass the shared "
            "expert, too.",
            "The balance loss counts images, not tokens:\neach expert should get as many.",
            "DINOv2's weights are copied into all experts\nof the last blocks. Other blocks stay "
            "dense.",
        ),
    )
    row = experts(token, 3.5)
    for image, expert in enumerate((1, 3, 0)):
        places = token.tokens(6.4, [PAPER, GREY, GREY, GREY], x=1.8 + 3.2 * image, size=0.5)
        token.write(places[0], 6.4, "c")
        token.arrow((places[0], 6.1), (row[expert][0], 4.0), COLOURS[expert])
    token.box(5, 2.0, "shared expert", GREY, width=9.4, height=0.8)
    loads(step, "images of each expert")
    for block in range(6):
        y = 1.7 + 0.85 * block
        checkpoint.box(3.0, y, f"block {block}", width=2.6, height=0.75)
        if block < 4:
            checkpoint.box(6.6, y, "dense", width=4.0, height=0.75)
            continue
        for index, name in enumerate(("E1", "E2", "E3", "E4", "S")):
            colour = [*COLOURS, GREY][index]
            checkpoint.box(5.0 + 0.8 * index, y, name, colour, width=0.75, height=0.75)


def widenet(figure: Figure) -> None:
    """WideNet (arXiv 2107.11817, figure 2)."""
    token, step, checkpoint = panels(
        figure,
        (
            "Each block has norms of its own. Attention and\nexperts are the same ones in all "
            "blocks.",
            "The gradients of all blocks add up\nin the one attention and the one expert layer.",
            "What is shared is stored once. It is trained\nfrom scratch; OneS makes dense "
            "students of it.",
        ),
    )
    for panel, of_block in ((token, "norms"), (step, "gradient")):
        shared = panel.box(7.8, 4.1, "attention\n+ experts", COLOURS[1], width=3.4, height=1.8)
        for block in range(4):
            x, y = panel.box(2.1, 2.0 + 1.4 * block, f"{of_block} {block}", width=3.0)
            panel.arrow(
                (x + 1.5, y), (shared[0] - 1.7, shared[1] + 0.3 * (block - 1.5)), COLOURS[0]
            )
            if block and panel is token:
                panel.arrow((x, y - 0.95), (x, y - 0.45))
    step.write(5.5, 4.1, "+", size=14)
    checkpoint.box(5, 5.9, "blocks.0.attn", COLOURS[1], width=6.0)
    checkpoint.box(5, 4.7, "blocks.0.mlp", COLOURS[1], width=6.0)
    checkpoint.box(5, 3.3, "blocks.0.norm1, blocks.0.norm2", width=8.0)
    checkpoint.write(5, 2.6, "…")
    checkpoint.box(5, 1.9, "blocks.11.norm1, blocks.11.norm2", width=8.0)


def pbe(figure: Figure) -> None:
    """Partitioned batch ensembles (arXiv 2110.03360, figure 2)."""
    token, step, checkpoint = panels(
        figure,
        (
            "At the first expert layer each image is repeated.\nA member's tokens choose among "
            "its experts alone.",
            "Each member's output is compared with the label.\nThe loss is the mean over the "
            "members.",
            "The weights are a V-MoE's and load as such. In\nevaluation the members' "
            "probabilities are averaged.",
        ),
    )
    token.tokens(6.5, [GREY] * 4)
    row = experts(token, 2.3)
    for member, x in enumerate((2.5, 7.5)):
        places = token.tokens(4.6, [PAPER] * 4, x=x, size=0.6)
        token.arrow((5, 6.15), (x, 5.0))
        token.write(x + (-1.4 if member == 0 else 1.4), 5.35, f"member {member + 1}")
        for index, place in enumerate(places):
            expert = 2 * member + (index in (1, 2))
            token.arrow((place, 4.25), (row[expert][0], 2.8), COLOURS[expert])
    for member, x in enumerate((2.5, 7.5)):
        step.box(x, 5.9, f"output of member {member + 1}", width=4.6)
        step.arrow((x, 5.4), (x, 4.6))
        step.box(x, 4.1, f"loss {member + 1}", width=2.4)
        step.arrow((x, 3.6), (5, 2.6))
    step.write(5, 4.1, "label")
    step.arrow((4.4, 4.1), (3.75, 4.1))
    step.arrow((5.6, 4.1), (6.25, 4.1))
    step.box(5, 2.1, "mean", width=2.4)
    checkpoint.box(5, 6.3, "V-MoE", width=3.2)
    checkpoint.arrow((5, 5.8), (5, 5.1))
    for index, (x, y) in enumerate(experts(checkpoint, 4.5)):
        checkpoint.arrow((x, y - 0.5), ((2.5, 7.5)[index // 2], 3.3), COLOURS[index])
    for x, name in ((2.5, "p₁"), (7.5, "p₂")):
        checkpoint.write(x, 2.95, name, size=11)
        checkpoint.arrow((x, 2.6), (5, 2.05))
    checkpoint.box(5, 1.6, "(p₁ + p₂) / 2", width=4.0)


def ones(figure: Figure) -> None:
    """OneS (arXiv 2201.10890, figure 1)."""
    token, step, checkpoint = panels(
        figure,
        (
            "In the teacher a token goes to K of E experts,\nin the student all tokens go through "
            "one network.",
            "The student learns from the labels\nand from the teacher's outputs.",
            "The teacher's experts are gathered into one\nnetwork, from which the student begins.",
        ),
    )
    token.write(5, 6.6, "teacher")
    teacher = experts(token, 4.9)
    (place,) = token.tokens(6.1, [GREY])
    token.arrow((place, 5.8), (teacher[0][0], 5.4), COLOURS[0])
    token.arrow((place, 5.8), (teacher[2][0], 5.4), COLOURS[2])
    token.write(5, 3.4, "student")
    (place,) = token.tokens(2.8, [GREY])
    token.arrow((place, 2.5), (place, 2.15))
    token.box(place, 1.7, "one network", width=4.0)
    for x, name in ((2.0, "teacher"), (8.0, "label")):
        step.box(x, 5.9, name, COLOURS[1] if name == "teacher" else PAPER, width=2.6)
        step.arrow((x, 5.4), (5, 3.7), text="outputs" if name == "teacher" else "")
    step.box(5, 3.2, "loss", width=2.4)
    step.arrow((5, 2.05), (5, 2.7))
    step.box(5, 1.6, "student", COLOURS[2], width=2.6)
    for (x, y), colour in zip(experts(checkpoint, 5.9), COLOURS, strict=True):
        checkpoint.arrow((x, y - 0.5), (5, 4.4), colour)
    checkpoint.box(5, 3.9, "mean, sum, top units or SVD", width=7.0)
    checkpoint.arrow((5, 3.4), (5, 2.3))
    checkpoint.box(5, 1.8, "dense student", width=4.0)


def loads(panel: Panel, label: str) -> None:
    """Bars of the experts' loads beside an even share, and where the losses move them."""
    even = 4.2
    for index, (x, y) in enumerate(experts(panel, 1.7)):
        height = (2.6, 0.8, 1.9, 1.1)[index]
        bottom = y + 0.6
        colour = COLOURS[index]
        panel.axes.bar(x, height, 1.1, bottom, color=colour, edgecolor=INK)
        panel.arrow((x, bottom + height), (x, even + (0.1 if bottom + height > even else -0.1)))
    panel.axes.plot((0.3, 9.7), (even, even), color=INK, linestyle="--", linewidth=1)
    panel.write(8.3, even + 0.35, "even share", size=8)
    panel.write(5, 6.4, label)


def way(figure: Figure) -> None:
    """The README's picture: from a timm model to experts and back."""
    first, second, third = figure.subplots(1, 3)
    dense = Panel(first, "A timm model", "pretrained or new")
    training = Panel(second, "In training: experts", "train.py, loss, optimizer as always")
    back = Panel(third, "The same timm model", "loads with timm alone, as fast as before")
    for panel in (dense, training, back):
        panel.box(5, 5.2, "attention", width=7.0, height=1.1)
    for panel in (dense, back):
        panel.box(5, 3.0, "feed-forward", GREY, width=7.0, height=1.1)  # of no expert
    experts(training, 3.0)
    for panel, word in ((training, "create_model"), (back, "export_dense")):
        panel.arrow((-2.4, 4.1), (0.0, 4.1))
        panel.write(-1.3, 4.6, word, size=8)


DRAWINGS: dict[str, Callable[[Figure], None]] = {
    **{f"concept_{draw.__name__}": draw for draw in (ewa, vmoe, vimoe, widenet, pbe, ones)},
    "way": way,
}


def main() -> None:
    """Write all of them."""
    with matplotlib.rc_context(SAME):
        for name, draw in DRAWINGS.items():
            figure = Figure(figsize=SIZE, layout="constrained")
            draw(figure)
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
