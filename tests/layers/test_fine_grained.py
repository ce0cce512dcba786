"""Experts of a part of the dense network's hidden units.

Hidden units may also be drawn again.
"""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import GluMlp, Mlp, SwiGLU
from timm.models.metaformer import StarReLU
from timm.models.tiny_vit import NormMlp
from torch import nn
from torchvision.ops import MLP
from transformers.models.dinov2.configuration_dinov2 import Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2SwiGLUFFN

from timm_moe.convert.gather import METHODS
from timm_moe.layers import (
    EwaMlp,
    ImageRouter,
    MoeMlp,
    RandomPartition,
    SharedExpertMlp,
    TopKRouter,
    routing_to,
)

WIDTH = 6


class Swapped(nn.Module):
    """Names the layers in the other order than it calls them."""

    def __init__(self, width, hidden):
        super().__init__()
        self.out, self.into = nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x):
        return self.out(self.into(x).square())


class Scaled(nn.Module):
    """Has weights before, between and after its linear layers that belong to no hidden unit."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm, self.fc1, self.act = nn.LayerNorm(width), nn.Linear(width, hidden), StarReLU()
        self.fc2, self.scale = nn.Linear(hidden, width), nn.Parameter(torch.randn(width))

    def forward(self, x):
        return self.scale * self.fc2(self.act(self.fc1(self.norm(x))))


def dinov2(width, hidden):
    network = Dinov2SwiGLUFFN(Dinov2Config(hidden_size=width, mlp_ratio=1))
    network.gate_proj, network.up_proj = nn.Linear(width, hidden), nn.Linear(width, hidden)
    network.down_proj = nn.Linear(hidden, width)
    return network


#: Networks by the name of their last layer.
FFNS = {
    "Mlp": (Mlp, "fc2"),
    "Mlp without bias": (lambda width, hidden: Mlp(width, hidden, bias=False), "fc2"),
    "NormMlp": (lambda width, hidden: NormMlp(width, hidden, norm_layer=nn.LayerNorm), "fc2"),
    "GluMlp": (lambda width, hidden: GluMlp(width, 2 * hidden), "fc2"),
    "SwiGLU": (SwiGLU, "fc2"),
    "torchvision's MLP": (lambda width, hidden: MLP(width, [hidden, width], dropout=0.1), "3"),
    "DINOv2's SwiGLU": (dinov2, "down_proj"),
    "swapped": (Swapped, "out"),
    "scaled": (Scaled, "fc2"),
    "widening": (lambda width, hidden: Mlp(width, hidden, out_features=2 * width), "fc2"),
}


def network(name, hidden, width=WIDTH):
    """A network in float64 and eval mode, with random biases too."""
    ffn = FFNS[name][0](width, hidden).double().eval()
    for parameter in ffn.parameters():
        nn.init.normal_(parameter, std=0.5)
    return ffn


def reference_part(ffn, last, number, parts):
    """Return a part of a network, as a function.

    Its other hidden units are set to zero, its last bias is divided.
    """
    masked = copy.deepcopy(ffn)
    layer = masked.get_submodule(last)
    units = torch.arange(layer.in_features) * parts // layer.in_features == number
    layer.register_forward_pre_hook(lambda module, inputs: inputs[0] * units)
    if layer.bias is not None:
        layer.bias.data /= parts
    return masked


def layer_of(ffn, num_experts, width, layer_class=MoeMlp, top_k=1, **options):
    router = TopKRouter(
        WIDTH,
        num_experts,
        top_k,
        gate_mode="one",
        capacity_factor=None,
        loss_weights={"balance": 1},
    )
    return layer_class(ffn, router, expert_width=width, **options).double().eval()


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(FFNS)),
    parts=st.integers(1, 5),
    units=st.integers(1, 4),
    width=st.integers(1, 8),
    num_experts=st.integers(1, 11),
)
def test_expert_e_is_part_e_of_the_dense_network(name, parts, units, width, num_experts):
    ffn, last = network(name, parts * units, width), FFNS[name][1]
    layer = MoeMlp(ffn, ImageRouter(width, num_experts), expert_width=1 / parts).double().eval()
    x = torch.randn(3, width, dtype=torch.float64)
    for number, expert in enumerate(layer.each()):
        close(expert(x), reference_part(ffn, last, number % parts, parts)(x))
    if num_experts >= parts:
        close(sum(expert(x) for expert in layer.each()[:parts]), ffn(x))


@pytest.mark.parametrize("name", FFNS)
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.first_case
def test_all_parts_of_one_copy_are_the_dense_network(name, parts):
    ffn = network(name, 8)
    layer = layer_of(ffn, 3 * parts, 1 / parts, top_k=parts)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    copy_T = torch.arange(10) % 3
    routing = routing_to(
        copy_T[:, None] * parts + torch.arange(parts),
        torch.ones(10, parts, dtype=torch.float64),
        3 * parts,
    )
    for mode in (True, False):  # the dropout of torchvision's network is off
        layer.train(mode and name != "torchvision's MLP")
        close(layer(x, routing=routing), ffn(x))
    # The router takes the parts of the third copy.
    layer.router.weight.data.zero_()[2 * parts :] = 1.0
    close(layer(x.abs()), ffn(x.abs()))


@pytest.mark.parametrize("name", FFNS)
def test_a_shared_expert_is_the_first_part(name):
    ffn = network(name, 8)
    layer = layer_of(ffn, 4, 0.25, SharedExpertMlp, top_k=4)
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    first = reference_part(ffn, FFNS[name][1], 0, 4)
    close(layer(x), ffn(x) + first(x))
    sizes = [
        (m.in_features, m.out_features) for m in layer.shared.modules() if isinstance(m, nn.Linear)
    ]
    assert sizes == [
        m.weight.shape[::-1] for m in layer.shared.modules() if isinstance(m, nn.Linear)
    ]
    zero = layer_of(ffn, 4, 0.25, SharedExpertMlp, top_k=4, shared_init="zero_out")
    close(zero(x), ffn(x))
    for made in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)) if name != "swapped" else layer,
    ):
        close(made(x), ffn(x) + first(x))


@pytest.mark.parametrize("layer_class", [MoeMlp, SharedExpertMlp])
@pytest.mark.parametrize("name", FFNS)
@pytest.mark.first_case
def test_dense_weights_that_are_loaded_later_are_cut_too(name, layer_class):
    ffn, other = network(name, 8), network(name, 8)
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    shared = reference_part(ffn, FFNS[name][1], 0, 4)(x) if layer_class is SharedExpertMlp else 0
    for init in ("same", "independent"):
        layer = layer_of(other, 4, 0.25, layer_class, top_k=4, expert_init=init)
        if init == "same":
            layer.reset_from_dense(ffn)
            close(layer(x), ffn(x) + shared)
            layer.reset_from_dense(other)
        layer.load_state_dict(ffn.state_dict())
        close(layer(x), ffn(x) + shared)
        layer = layer_of(other, 4, 0.25, layer_class, top_k=4, expert_init=init)
        layer.load_state_dict(ffn.state_dict(), assign=True)
        close(layer(x), ffn(x) + shared)
        again = layer_of(other, 4, 0.25, layer_class, top_k=4)
        again.load_state_dict(layer.state_dict())
        close(again(x), layer(x))
        layer.get_parameter(f"{FFNS[name][1]}.weight").data.zero_()  # every expert owns its copy
        assert ffn.get_parameter(f"{FFNS[name][1]}.weight").all()


def test_another_dense_width_is_refused():
    layer = layer_of(network("Mlp", 8), 4, 0.25)
    with pytest.raises(RuntimeError, match=r"size mismatch for fc1.weight"):
        layer.load_state_dict(
            {**network("Mlp", 2).state_dict(), **layer.router.state_dict(prefix="router.")}
        )
    with pytest.raises(RuntimeError, match=r"8 experts in fc1\.weight, .*4"):
        layer.load_state_dict(layer_of(network("Mlp", 8), 8, 0.25).state_dict())


@pytest.mark.parametrize("layer_class", [MoeMlp, SharedExpertMlp])
@pytest.mark.parametrize("name", FFNS)
@pytest.mark.first_case
def test_experts_join_to_the_dense_networks_that_they_were_cut_from(name, layer_class):
    layer = layer_of(network(name, 8), 8, 0.25, layer_class)
    # the second four are another network
    first, second = network(name, 8), network(name, 8)
    parts = [layer_of(ffn, 4, 0.25).expert_weights() for ffn in (first, second)]
    with torch.no_grad():
        for path, stacked in layer.named_expert_parameters():
            stacked.copy_(torch.cat([part[path] for part in parts]))
    joined = layer.stacked_weights()
    for path, tensor in joined.items():
        close(tensor[0], first.get_parameter(path).detach())
        close(tensor[1], second.get_parameter(path).detach())
        assert len(tensor) == 2 + (layer_class is SharedExpertMlp)
    dense = layer.to_ffn(METHODS["average"](joined))
    assert type(dense) is type(first)
    assert dense(torch.randn(3, WIDTH, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("name", FFNS)
def test_a_shared_part_counts_as_one_more_expert_of_its_units(name):
    ffn = network(name, 8)
    layer = layer_of(ffn, 4, 0.25, SharedExpertMlp)
    for weight in METHODS["average"](layer.stacked_weights()).items():
        close(weight[1], ffn.get_parameter(weight[0]).detach())
    with torch.no_grad():
        layer.shared.get_parameter(f"{FFNS[name][1]}.weight").add_(1)
    mean = METHODS["average"](layer.stacked_weights())[f"{FFNS[name][1]}.weight"]
    expected = ffn.get_parameter(f"{FFNS[name][1]}.weight").detach().clone()
    expected[:, :2] += 1 / 2  # of two networks
    close(mean, expected)


def test_parts_that_are_left_over_do_not_join():
    layer = layer_of(network("Mlp", 8), 6, 0.25)
    assert layer(torch.randn(3, WIDTH, dtype=torch.float64)).isfinite().all()
    with pytest.raises(ValueError, match=r"6 experts of 1/4 .*num_experts .*4\."):
        layer.stacked_weights()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["Mlp", "GluMlp", "SwiGLU", "swapped"])
def test_drop_redraws_the_same_half_of_an_experts_units_in_all_matrices(name, parts):
    hidden = 512
    ffn, last = network(name, hidden, 32), FFNS[name][1]
    with torch.no_grad():
        for number, parameter in enumerate(ffn.parameters()):  # every matrix has its own scale
            parameter.mul_(0.1 * (number + 1)).add_(number)
    before = {name: weight.clone() for name, weight in ffn.state_dict().items()}
    layer = MoeMlp(ffn, TopKRouter(32, 8), expert_init="drop", expert_width=1 / parts).double()
    same = MoeMlp(ffn, TopKRouter(32, 8), expert_width=1 / parts).double()
    size, kept = hidden // parts, []
    for path, stacked in layer.named_expert_parameters():
        copied = same.get_parameter(path).detach()
        if path == f"{last}.bias":
            assert torch.equal(stacked, copied)  # belongs to no unit
            continue
        dim = 2 if path == f"{last}.weight" else 1
        old, new = (w.detach().movedim(dim, 1).unflatten(1, (-1, size)) for w in (copied, stacked))
        for block in range(old.shape[1]):  # (E, H, ...)
            is_equal = (old[:, block] == new[:, block]).view(8, size, -1)
            is_kept = is_equal.all(2)
            kept.append(is_kept)
            assert is_kept.sum(1).tolist() == [size // 2] * 8
            assert not is_equal[~is_kept].any()
            for expert in range(8):
                redrawn = new[expert, block][~is_kept[expert]].flatten()
                replaced = old[expert, block][~is_kept[expert]].flatten()
                deviations = (redrawn - replaced.mean()) / replaced.std()
                assert deviations.mean().abs() < 5 / len(redrawn) ** 0.5
                assert (deviations.std() - 1).abs() < 5 / (2 * len(redrawn)) ** 0.5
                assert (
                    torch.corrcoef(torch.stack([redrawn, replaced]))[0, 1].abs()
                    < 5 / len(redrawn) ** 0.5
                )
    assert all(torch.equal(one, kept[0]) for one in kept)
    # Other units for each expert, the first too.
    assert len({tuple(row.tolist()) for row in kept[0]}) == 8
    assert all(torch.equal(before[name], weight) for name, weight in ffn.state_dict().items())


@pytest.mark.parametrize("layer_class", [MoeMlp, SharedExpertMlp, EwaMlp])
def test_drop_happens_on_every_road(layer_class):
    ffn, other = network("Mlp", 64), network("Mlp", 64)
    if layer_class is EwaMlp:
        layer = EwaMlp(other, RandomPartition(4), expert_init="drop").double()
    else:
        layer = layer_of(other, 4, 1, layer_class, expert_init="drop")

    def share_of_kept():
        return (layer.fc1.weight == ffn.fc1.weight).all(2).float().mean(1).tolist()

    assert share_of_kept() == [0] * 4
    before = {name: weight.clone() for name, weight in ffn.state_dict().items()}
    for load in (
        lambda: layer.load_state_dict(ffn.state_dict()),
        lambda: layer.load_state_dict(ffn.state_dict(), assign=True),
        lambda: layer.reset_from_dense(ffn),
    ):
        load()
        assert share_of_kept() == [0.5] * 4
        layer.reset_from_dense(other)
    assert all(torch.equal(before[name], weight) for name, weight in ffn.state_dict().items())
    trained = copy.deepcopy(layer).state_dict()
    layer.load_state_dict(trained)  # experts are as they are
    assert all(torch.equal(trained[name], weight) for name, weight in layer.state_dict().items())
    if layer_class is SharedExpertMlp:  # a copy, as without drop
        layer.load_state_dict(ffn.state_dict())
        assert torch.equal(layer.shared.fc1.weight, ffn.fc1.weight)


def test_drop_redraws_the_larger_half_of_an_odd_number_of_units():
    ffn = network("Mlp", 5)
    layer = MoeMlp(ffn, TopKRouter(WIDTH, 4), expert_init="drop").double()
    is_kept = (layer.fc1.weight == ffn.fc1.weight).all(2)
    assert is_kept.sum(1).tolist() == [2] * 4


def test_drop_of_a_single_unit_and_of_weights_without_values():
    layer = MoeMlp(
        network("Mlp", 3), TopKRouter(WIDTH, 4), expert_init="drop", expert_width=1 / 3
    ).double()
    assert layer(torch.randn(2, WIDTH, dtype=torch.float64)).isfinite().all()
    with torch.device("meta"):
        made = SharedExpertMlp(Mlp(8, 16), TopKRouter(8, 4), expert_init="drop", expert_width=0.5)
        assert made.fc1.weight.is_meta
        assert made.fc1.weight.shape == (4, 8, 8)
        made.load_state_dict(Mlp(8, 16).state_dict())
    assert made(torch.empty(3, 8, device="meta")).shape == (3, 8)


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (0, r"expert_width .*number above 0.* 0\.$"),
        (-0.5, r"expert_width .*number above 0.*-0\.5"),
        ("half", "expert_width .*number above 0.*'half'"),
        (float("nan"), "expert_width .*number above 0.*nan"),
        (0.3, r"expert_width .*whole number.* 0\.3\."),
        (2, r"expert_width .*whole number.* 2\."),
        (0.2, r"expert_width=0\.2 .*12 into 5 .*12\.$"),
        (1e-9, "expert_width=1e-09 .*12 into 1000000000 "),
    ],
)
def test_bad_widths(width, message):
    with pytest.raises(ValueError, match=message):
        MoeMlp(Mlp(8, 12), TopKRouter(8, 4), expert_width=width)


def test_a_rounded_third():
    assert MoeMlp(Mlp(8, 12), TopKRouter(8, 6), expert_width=0.33).fc1.weight.shape == (6, 4, 8)


class Wrong(nn.Module):
    """Adds something that is not elementwise, or no linear layer of hidden units."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.fc1, self.fc2 = kind, nn.Linear(8, 16), nn.Linear(16, 8)
        self.extra = nn.Linear(16, 16) if kind == "deep" else nn.Identity()

    def forward(self, x):
        hidden = self.extra(self.fc1(x))
        if self.kind == "softmax":
            return self.fc2(hidden.softmax(-1))
        if self.kind == "after":
            return self.fc2(hidden).relu()
        if self.kind == "residual":
            return x + self.fc2(hidden)
        return self.fc2(hidden.relu())


@pytest.mark.parametrize(
    "ffn",
    [
        *(Wrong(kind) for kind in ("softmax", "after", "residual", "deep")),
        Mlp(8, 16, norm_layer=nn.LayerNorm),
        SwiGLU(8, 16, norm_layer=nn.LayerNorm),
        nn.Linear(8, 8),
        nn.Sequential(nn.Linear(8, 16), nn.PReLU(16), nn.Linear(16, 8)),
    ],
    ids=lambda ffn: getattr(ffn, "kind", type(ffn).__name__),
)
@pytest.mark.parametrize("options", [dict(expert_width=0.5), dict(expert_init="drop")])
@pytest.mark.first_case
def test_networks_without_hidden_units_of_their_own_are_refused(ffn, options):
    message = f"expert_width .*expert_init='drop' .*{type(ffn).__name__}"
    with pytest.raises(ValueError, match=message):
        MoeMlp(ffn, TopKRouter(8, 4), **options)
