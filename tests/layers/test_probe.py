"""The linear layers of a network in the order of their calls."""

import pytest
from timm.layers import GatedMlp, GlobalResponseNormMlp, GluMlp, Mlp, SwiGLU
from torch import nn

from timm_moe.layers.probe import probe


@pytest.mark.parametrize("kind", [Mlp, GluMlp, SwiGLU, GatedMlp, GlobalResponseNormMlp])
def test_what_is_known_of_timms_networks_is_what_a_trial_finds(kind):
    own = type("Own", (kind,), {"__module__": __name__})
    known, tried = probe(kind(8, 12)), probe(own(8, 12))
    assert (known.width, [*known.linear]) == (tried.width, [*tried.linear])
    assert known.width == 8
    assert next(iter(known.linear)).startswith("fc1")
    assert [*known.linear][-1] == "fc2"


class Reversed(nn.Module):
    """A network that declares its last layer first."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(12, 8)
        self.first = nn.Linear(8, 12)

    def forward(self, x):
        return self.last(self.first(x))


def test_a_network_of_ones_own_may_declare_its_layers_in_any_order():
    found = probe(Reversed())
    assert (found.width, [*found.linear]) == (8, ["first", "last"])
