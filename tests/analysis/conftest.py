"""Pictures, as they are drawn."""

import pytest


@pytest.fixture
def drawn(monkeypatch):
    """Matplotlib's figures, which are kept in a list instead of being saved."""
    figures = []
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: figures.append(self))
    return figures
