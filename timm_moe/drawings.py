"""Drawing of EWA, the tools of docs/drawings.py for the other methods, and the colours of all charts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the colours alone need no matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

#: Okabe and Ito's colours for the colour-blind, without black and yellow, which a background may hide.
ALL_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F", "#A6761D")
#: The colours of four experts.
COLOURS = ALL_COLOURS[:4]
GREY, INK, PAPER = "#C9CED4", "#1B1B1B", "#F1F3F5"
#: Size of a panel, in its own units.
WIDTH, HEIGHT = 10.0, 7.0


class Panel:
    """Panel of a drawing, 10 units wide and 7 high."""

    def __init__(self, axes: "Axes", title: str, says: str):
        axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
        axes.axis("off")
        axes.set_title(title, fontsize=11, fontweight="bold", color=INK)
        axes.text(WIDTH / 2, 0.0, says, fontsize=8.5, ha="center", va="bottom", color=INK, linespacing=1.3)
        self.axes = axes

    def box(
        self, x: float, y: float, text: str, colour: str = PAPER, width: float = 1.6, height: float = 0.9
    ) -> tuple[float, float]:
        """Draw a rounded box around a point, which is returned."""
        from matplotlib.patches import FancyBboxPatch

        corner = (x - width / 2 + 0.1, y - height / 2 + 0.1)
        look: dict[str, Any] = dict(boxstyle="round,pad=0.1,rounding_size=0.15", facecolor=colour, edgecolor=INK)
        self.axes.add_patch(FancyBboxPatch(corner, width - 0.2, height - 0.2, **look))
        red, green, blue = bytes.fromhex(colour[1:])
        readable = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else INK
        self.axes.text(x, y, text, ha="center", va="center", fontsize=8.5, color=readable)
        return x, y

    def tokens(self, y: float, colours: Sequence[str], x: float = WIDTH / 2, size: float = 0.55) -> list[float]:
        """Draw a row of tokens around x, and return the x of each."""
        places = [x + (index - (len(colours) - 1) / 2) * size * 1.35 for index in range(len(colours))]
        self.axes.bar(places, size, size, y - size / 2, color=colours, edgecolor=INK, linewidth=0.8)
        return places

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], colour: str = INK, style: str = "-", text: str = ""
    ) -> None:
        """Draw an arrow from one point to another, with a word beside its middle."""
        line = dict(arrowstyle="-|>", color=colour, linestyle=style, linewidth=1.2, shrinkA=0, shrinkB=0)
        self.axes.annotate("", end, start, arrowprops=line)
        x, y = (start[0] + end[0]) / 2 + 0.15, (start[1] + end[1]) / 2
        self.axes.text(x, y, text, fontsize=8, va="center", color=INK)

    def write(self, x: float, y: float, text: str, size: float = 8.5) -> None:
        self.axes.text(x, y, text, fontsize=size, ha="center", va="center", color=INK)


def panels(figure: "Figure | SubFigure", says: Sequence[str]) -> list[Panel]:
    """Make the three panels of every drawing, side by side, each with its sentence."""
    titles = ("A token", "A training step", "A checkpoint")
    return [Panel(*each) for each in zip(figure.subplots(1, 3), titles, says, strict=True)]


def experts(panel: Panel, y: float) -> list[tuple[float, float]]:
    """Draw a row of four experts in their colours, and return their middles."""
    return [panel.box(WIDTH / 4 * (number + 0.5), y, f"E{number + 1}", COLOURS[number]) for number in range(4)]


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


def routes(panel: Panel, chosen: Sequence[Sequence[int]], dropped: Sequence[tuple[int, int]] = ()) -> None:
    """Draw tokens in a row, their ways to the experts that each chose, and out again in the same order.

    A token takes the colour of its first expert. A pair of token and expert is dropped if there is no place.
    """
    before = panel.tokens(6.5, [GREY] * len(chosen))
    row = experts(panel, 4.2)
    after = panel.tokens(2.1, [COLOURS[first] for first, *_ in chosen])
    for token, of_token in enumerate(chosen):
        for expert in of_token:
            (x, y), kept = row[expert], (token, expert) not in dropped
            panel.arrow((before[token], 6.2), (x, y + 0.5), COLOURS[expert], style="-" if kept else ":")
            if kept:
                panel.arrow((x, y - 0.5), (after[token], 2.4), COLOURS[expert])


def ewa(figure: "Figure | SubFigure") -> None:
    """Experts Weights Averaging (arXiv 2308.06093, figure 1 and eq. 6)."""
    token, step, checkpoint = panels(
        figure,
        (
            "Each token goes to a random expert,\neach expert gets as many. No router.",
            "After the optimizer's step each expert moves\na little towards the others. Their mean stays.",
            "Dense weights are copied into every expert.\nThe mean of the trained ones is exported.",
        ),
    )
    routes(token, [[expert] for expert in (0, 2, 1, 3, 2, 0, 3, 1)])
    for (x, y), colour in zip(((2.0, 5.6), (8.2, 6.1), (2.6, 2.1), (7.4, 2.2)), COLOURS, strict=True):
        near = (x + 0.55 * (5 - x), y + 0.55 * (4 - y))
        step.arrow((x, y), near, colour)
        step.axes.plot(x, y, "o", color=colour, markersize=11, alpha=0.35)
        step.axes.plot(*near, "o", color=colour, markersize=11)
    step.axes.plot(5, 4, "X", color=INK, markersize=10)
    step.write(5, 3.3, "mean")
    dense_to_experts(checkpoint, into="copy", back="mean", result="dense: stock timm")
