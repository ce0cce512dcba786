"""Networks of a user's own class.

They do something else in training, or hold something that experts cannot.
"""

import copy
import pickle

import pytest
import torch
from timm.layers import DropPath, Mlp
from torch import nn
from torchvision.ops import StochasticDepth

import timm_moe
from timm_moe.callbacks import expert_statistics
from timm_moe.convert import ffn_paths
from timm_moe.convert.gather import METHODS


class Own(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)
        for name, part in parts.items():
            setattr(self, name, part)

    def plain(self, x):
        return self.fc2(self.act(self.fc1(x)))

    forward = plain


class MixesInTraining(Own):
    def forward(self, x):
        y = self.plain(x)
        return y - y.mean(0) if self.training else y


class MixesDetachedInTraining(Own):
    def forward(self, x):
        y = self.plain(x)
        return y / y.detach().abs().max() if self.training else y


class MixesNoiseInTraining(Own):
    def forward(self, x):
        y = self.plain(x)
        return y + torch.randn_like(y) * y.mean() if self.training else y


class NormsImages(Own):
    """Mixes the rows of an image, and those without an image not."""

    def forward(self, x):
        y = self.plain(x)
        return nn.functional.layer_norm(y, y.shape[1:])


class Noise(Own):
    def forward(self, x):
        y = self.plain(x)
        return y + torch.randn_like(y) if self.training else y


class ReadsInTraining(Own):
    """Reads weights outside its modules, of which each expert has its own."""

    def forward(self, x):
        y = self.plain(x)
        return y * self.fc1.weight.norm() + self.fc2.bias.sum() if self.training else y


class BoundMethod(Own):
    """Calls a submodule past its name."""

    def __init__(self):
        super().__init__()
        self.first = self.fc1.forward

    def forward(self, x):
        return self.fc2(self.act(self.first(x)))


class WithoutAutocast(Own):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.plain(x.float())


class Scalar(Own):
    def __init__(self):
        super().__init__(gain=nn.Parameter(torch.tensor(0.5)))

    def forward(self, x):
        return self.plain(x) * self.gain


class CentreInTraining(nn.Module):
    """An activation that mixes rows."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


class Swish(nn.Module):
    def forward(self, x):
        return x * x.sigmoid()


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


class Vit(nn.Module):
    """Blocks with names as in timm."""

    def __init__(self, make):
        super().__init__()
        self.blocks = nn.Sequential(Block(make()), Block(make()))

    def forward(self, x):
        return self.blocks(x)


def convert(make, named=True, router="top_k", **options):
    torch.manual_seed(0)
    model, modules = Vit(make), r"blocks\.\d\.mlp" if named else None
    return timm_moe.convert_to_moe(
        model, modules=modules, moe_layers="every-1", router=router, **options
    )


def experts_of(layer):
    return [
        layer.to_ffn({name: stacked[e] for name, stacked in layer.stacked_weights().items()})
        for e in range(4)
    ]


REFUSED = {
    MixesInTraining: r"blocks\.0\.mlp, a MixesInTraining, .*mixes rows.*training mode",
    MixesDetachedInTraining: "mixes rows.*training mode",
    MixesNoiseInTraining: "mixes rows.*training mode",
    NormsImages: "mixes rows.*how many there are of each image",
    BoundMethod: "BoundMethod, .*weights in its submodules",
}


@pytest.mark.parametrize("network", REFUSED)
def test_what_experts_could_not_do_is_refused(network):
    model = Vit(network)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=REFUSED[network]):
        timm_moe.convert_to_moe(model, modules=r"blocks\.\d\.mlp")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("part", ["act_layer", "norm_layer"])
def test_a_part_of_a_known_network_that_mixes_rows_is_refused(part, named):
    parts = {
        "act_layer": CentreInTraining,
        "norm_layer": lambda width, **kw: nn.BatchNorm1d(
            width, affine=False, track_running_stats=False
        ),
    }
    with pytest.raises(ValueError, match="it mixes rows" if named else "Vit .*modules="):
        convert(lambda: Mlp(8, 12, **{part: parts[part]}), named)


@pytest.mark.parametrize("named", [True, False])
def test_an_activation_of_a_users_is_no_obstacle(named):
    model = convert(lambda: Mlp(8, 12, act_layer=Swish), named)
    assert list(timm_moe.moe_layers(model)) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert model.blocks[0].mlp.is_grouped


@pytest.mark.parametrize("network", [Scalar, lambda: Mlp(8, 12)])
def test_the_log_tells_of_experts_that_run_one_by_one(network, caplog):
    caplog.set_level("INFO", "timm_moe")
    convert(network)
    assert ("Experts of Scalar run one after the other." in caplog.text) == (network is Scalar)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("network", [ReadsInTraining, Scalar, WithoutAutocast])
def test_each_expert_computes_what_it_would_alone(network, training):
    model = convert(network, expert_init="independent", eval_capacity_factor="none").train(training)
    layer, x = model.blocks[0].mlp, torch.randn(3, 5, 8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
        y, routing = layer(x), layer.router(x)
        expert_T, gate_T = routing.experts()[:, 0], routing.gates[:, 0]
        alone = torch.stack(
            [expert.train(training)(x.flatten(0, 1)) for expert in experts_of(layer)]
        )
        expected = alone[expert_T, torch.arange(15)] * gate_T[:, None]
    torch.testing.assert_close(y.flatten(0, 1), expected)


@pytest.mark.parametrize("network", [Noise, lambda: Own(act=DropPath(0.5))])
def test_noise_in_training_is_no_mixing(network):
    model, x = convert(network).train(), torch.randn(3, 5, 8)
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("drop", [DropPath(0.5), StochasticDepth(0.5, "row")])
def test_a_network_that_drops_images_is_told_to_drop_tokens_as_experts(drop, caplog):
    convert(lambda: Own(drop=drop))
    (message,) = caplog.messages
    assert "blocks.0.mlp.drop dropped whole images" in message


@pytest.mark.parametrize("drop", [DropPath(0.0), nn.Dropout(0.5), nn.Dropout1d(0.5)])
def test_what_drops_no_images_is_not_warned_of(drop, caplog):
    convert(lambda: Own(drop=drop))
    assert not caplog.messages


def test_networks_of_ones_own_alone_are_no_gaps_among_known_ones(caplog):
    assert ffn_paths(Vit(Own)) == []
    assert not caplog.messages


class Scaled(Own):
    """Has a factor that a schedule changes, and an attribute of a name that the layer has too."""

    def __init__(self):
        super().__init__()
        self.factor, self.path = 1.0, "of the network"

    def forward(self, x):
        assert self.path == "of the network"
        return self.factor * self.plain(x)


class ScaledAtOnce(Scaled):
    only_calls_modules = True


@pytest.mark.parametrize(
    "options", [dict(router="random"), dict(router="top_k"), dict(shared_expert=True)]
)
@pytest.mark.parametrize("network", [Scaled, ScaledAtOnce])
def test_an_attribute_that_a_schedule_sets_is_the_experts_too(network, options):
    model = convert(network, **options)
    assert model.blocks[0].mlp.is_grouped == (network is ScaledAtOnce)
    for network in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for block in network.blocks:
            block.mlp.factor = 0.0
        for training in (False, True):
            assert not network.train(training).blocks[0].mlp(torch.randn(3, 5, 8)).any()
        assert timm_moe.to_dense(network).blocks[0].mlp.factor == 0


def test_hooks_from_before_the_conversion_are_warned_of(caplog):
    model = Vit(Own)
    model.blocks[1].mlp.fc2.register_forward_hook(lambda module, rows, output: None)
    timm_moe.convert_to_moe(model, modules=r"blocks\.\d\.mlp")
    (message,) = caplog.messages
    assert message.startswith("blocks.1.mlp has hooks, and the experts have copies")


def test_a_network_that_keeps_a_tensor_of_a_forward_is_refused():
    network = Own()
    network.sparsity = network(torch.randn(3, 8)).mean()
    with pytest.raises(ValueError, match="its attribute sparsity is a tensor of an earlier forw"):
        convert(lambda: network)


@pytest.mark.parametrize("options", [{}, dict(router="top_k", gate_mode="one")])
def test_a_network_that_ends_autocast_computes_as_before(options):
    torch.manual_seed(0)
    dense, x = Vit(WithoutAutocast).eval(), torch.randn(3, 5, 8)
    model = timm_moe.convert_to_moe(copy.deepcopy(dense), modules=r"blocks\.\d\.mlp", **options)
    for training in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            y, expected = model.train(training)(x), dense(x)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected)
    y.sum().backward()


@pytest.mark.parametrize("router", ["random", "top_k"])
def test_scalar_parameters(router):
    model, x = convert(Scalar, router=router, expert_init="independent"), torch.randn(3, 5, 8)
    assert model.blocks[0].mlp.gain.shape == (4,)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    averaging = timm_moe.ExpertWeightAveraging(model, optimizer, 0.3, "constant", total_updates=2)
    (model(x).square().mean() + timm_moe.auxiliary_loss(model)).backward()
    optimizer.step()
    gain = model.blocks[0].mlp.gain.detach()
    assert len(gain.unique()) > 1
    timm_moe.average_experts_(model, 0.75)
    assert len(model.blocks[0].mlp.gain.unique()) == 1
    assert expert_statistics(model, averaging)
    for method in set(METHODS) - {"topk"}:
        dense = timm_moe.to_dense(model, method)
        assert dense.blocks[0].mlp.gain.shape == ()
    other = Vit(Scalar)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(timm_moe.to_dense(model)(x), other(x))


NAMES = (
    "router",
    "shared",
    "run",
    "path",
    "train",
    "each",
    "num_experts",
    "expert_init",
    "replaced",
    "parts",
    "forward",
    "_shared",
    "_weights",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "kind", [lambda: nn.Linear(8, 8), nn.Identity, lambda: nn.Parameter(torch.zeros(3))]
)
@pytest.mark.first_case
def test_parts_with_a_name_of_the_layer_are_refused_by_name(name, kind):
    def make():
        network = Own()
        network._parameters.pop(name, None)
        part = kind()
        (network._parameters if isinstance(part, nn.Parameter) else network._modules)[name] = part
        return network

    with pytest.raises(ValueError, match=f"'{name}' .*rename the part"):
        convert(make)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_is_tried_whatever_the_default_type_is(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = timm_moe.convert_to_moe(Vit(Scalar), modules=r"blocks\.\d\.mlp")
    finally:
        torch.set_default_dtype(before)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.parametrize("network", [Scalar, MixesInTraining])
def test_a_network_is_tried_wherever_it_is_made(network):
    """Under the meta device as default, with parameters there or on the CPU."""
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Vit(network)
        with torch.device("meta"):
            if network is MixesInTraining:
                with pytest.raises(ValueError, match="it mixes rows"):
                    timm_moe.convert_to_moe(model, modules=r"blocks\.\d\.mlp")
                continue
            timm_moe.convert_to_moe(model, modules=r"blocks\.\d\.mlp")
        assert {parameter.device.type for parameter in model.parameters()} == {device}
