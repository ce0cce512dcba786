"""Changes that users and other libraries make to modules inside an expert layer.

They add hooks, offload them, or compute weights.
"""

import copy
import pickle

import pytest
import timm
import torch
from common import SMALL_VIT
from timm.layers import Mlp
from torch import nn
from torch.nn.utils import parametrizations, prune

import timm_moe
from timm_moe.layers import EwaMlp, MoeMlp, RandomPartition, SharedExpertMlp, TopKRouter
from timm_moe.layers.grouped import Runs, grouped_linear


class Own(nn.Module):
    """A network of a user's, which runs expert by expert, with a parameter of its own."""

    def __init__(self, width, hidden, act_layer=nn.GELU):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.fc1, self.act, self.fc2 = (
            nn.Linear(width, hidden),
            act_layer(),
            nn.Linear(hidden, width),
        )

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x * self.scale)))


def top_k():
    return TopKRouter(8, 4, loss_weights={"balance": 0.01})


LAYERS = {
    "routed": lambda act: MoeMlp(Mlp(8, 12, act_layer=act), top_k(), "independent"),
    "EWA": lambda act: EwaMlp(Mlp(8, 12, act_layer=act), RandomPartition(4), "independent"),
    "shared": lambda act: SharedExpertMlp(Mlp(8, 12, act_layer=act), top_k(), "independent"),
    "own": lambda act: MoeMlp(Own(8, 12, act), top_k(), "independent"),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 5, 8)


def layer_of(kind, act=nn.GELU):
    torch.manual_seed(0)
    layer = LAYERS[kind](act)
    layer.path = "blocks.1.mlp"
    return layer


def output(layer, x):
    torch.manual_seed(2)  # the partitions
    return layer(x)


@every_layer
@pytest.mark.parametrize("where", ["cpu", "disk", "blocks"])
@pytest.mark.first_case
def test_weights_that_accelerate_keeps_elsewhere(kind, where, x, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain = nn.Sequential(nn.LayerNorm(8), layer_of(kind)).eval()
    model = copy.deepcopy(plain)
    if where == "cpu":
        accelerate.cpu_offload(model)
    elif where == "disk":
        accelerate.disk_offload(model, tmp_path)
    else:
        places = {"0": "cpu", **{f"1.{name}": "disk" for name, _ in model[1].named_children()}}
        places |= {f"1.{name}": "cpu" for name, _ in model[1].named_parameters(recurse=False)}
        accelerate.dispatch_model(
            model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True
        )
    if where != "blocks":
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(output(model, x), output(plain, x))


def spectral(module):
    torch.manual_seed(3)  # the first vectors
    return nn.utils.spectral_norm(module)


COMPUTED = {
    "spectral norm by hooks": spectral,
    "weight norm by hooks": nn.utils.weight_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
computed = pytest.mark.parametrize("how", COMPUTED)


@every_layer
@computed
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.first_case
def test_experts_are_trained_through_what_computes_them(kind, how, x):
    layer = layer_of(kind)
    COMPUTED[how](layer.fc1)
    sources = [
        parameter
        for name, parameter in layer.named_parameters()
        if name.startswith("fc1") and "bias" not in name
    ]
    before, first = [source.detach().clone() for source in sources], output(layer, x)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        output(layer, x).square().sum().backward()
        if hasattr(layer.router, "take"):
            layer.router.take()
        optimizer.step()
    assert all(not torch.equal(source, old) for source, old in zip(sources, before, strict=True))
    assert not torch.allclose(output(layer, x), first)


@computed
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.first_case
def test_computed_experts_become_dense_as_they_are_now(how, training, x):
    model = nn.Sequential(nn.LayerNorm(8), layer_of("EWA")).train(training)
    COMPUTED[how](model[1].fc1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    output(model, x).square().sum().backward()
    optimizer.step()  # what hooks have set is older than this
    dense = timm_moe.to_dense(model).eval()
    torch.testing.assert_close(dense(x), model.eval()(x))
    assert [type(module) for module in dense[1].modules()] == [
        type(module) for module in Mlp(8, 12).modules()
    ]


def test_shared_expert_that_is_computed_is_not_left_out():
    model = nn.Sequential(nn.LayerNorm(8), layer_of("shared"))
    prune.l1_unstructured(model[1].shared.fc1, "weight", 0.5)
    with pytest.raises(ValueError, match=r"shared\.fc1 .*blocks\.1\.mlp .*prune\.remove"):
        timm_moe.to_dense(model)


@every_layer
def test_hooks_of_what_holds_weights(kind, x):
    layer, seen = layer_of(kind).train(), []
    expected = output(copy.deepcopy(layer), x)
    layer.fc1.register_forward_pre_hook(lambda module, args: seen.append(("before", *args[0])))
    layer.fc1.register_forward_hook(
        lambda module, args, weights: seen.append(("after", len(weights)))
    )
    layer.fc1.register_full_backward_hook(
        lambda module, before, after: seen.append(("backward", len(after)))
    )
    y = output(layer, x)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    assert seen == [("before", "weight", "bias"), ("after", 2), ("backward", 2)]


@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_a_hook_may_change_the_weights(kind, training, x):
    layer = layer_of(kind).train(training)
    changed = copy.deepcopy(layer)
    changed.fc1.register_forward_hook(
        lambda module, args, weights: [2 * weight for weight in weights]
    )
    with torch.no_grad():
        for parameter in layer.fc1.parameters():
            parameter.mul_(2)
    assert torch.equal(output(changed, x), output(layer, x))
    torch.testing.assert_close(changed.stacked_weights(), layer.stacked_weights())


@every_layer
def test_hooks_of_what_has_no_weights(kind, x):
    layer, seen = layer_of(kind), []
    layer.act.register_forward_hook(lambda module, args, y: seen.append(module))
    layer.act.register_full_backward_hook(lambda module, before, after: seen.append(module))
    output(layer, x).sum().backward()
    runs = 4 if kind == "own" else 1
    assert len(seen) == 2 * runs
    assert all(module is layer.act for module in seen)


def by_name(layer):
    layer.act = nn.ReLU()


def by_a_walk(model):
    for name, child in model.named_children():
        if isinstance(child, nn.GELU):
            setattr(model, name, nn.ReLU())
        by_a_walk(child)


def by_torch_itself(layer):
    layer._modules["act"] = nn.ReLU()


def with_weights(layer):
    layer.act = nn.PReLU(init=0.0)


REPLACED = [by_name, by_a_walk, by_torch_itself, with_weights]


@every_layer
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("replace", REPLACED)
@pytest.mark.first_case
def test_a_replaced_activation_is_computed(kind, replace, training, x):
    layer, expected = layer_of(kind).train(training), layer_of(kind, nn.ReLU).train(training)
    if kind == "shared":
        # A network by itself.
        expected.shared.act = nn.ReLU() if replace is by_a_walk else nn.GELU()
    before = output(layer, x)
    replace(layer)
    y = output(layer, x)
    assert not torch.allclose(y, before)
    torch.testing.assert_close(y, output(expected, x))
    torch.testing.assert_close(output(pickle.loads(pickle.dumps(copy.deepcopy(layer))), x), y)
    assert type(
        layer.to_ffn({name: w[0] for name, w in layer.stacked_weights().items()}).act
    ) is type(layer.act)
    if replace is not by_a_walk:
        layer.act = nn.GELU()
        assert torch.equal(output(layer, x), before)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["routed", "EWA", "own"])
def test_a_replaced_activation_is_compiled_traced_and_exported(kind, x):
    layer = layer_of(kind).eval()
    layer(x)
    layer.act = nn.ReLU()
    expected = output(layer, x)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
    compiled.act = nn.Tanh()
    assert not torch.allclose(compiled(x), expected)
    torch.testing.assert_close(torch.jit.trace(layer, x)(x), expected)
    torch.testing.assert_close(
        torch.export.export(copy.deepcopy(layer), (x,)).module()(x), expected
    )


def test_a_replaced_activation_reaches_the_dense_model():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT).eval()
    by_a_walk(model)
    images = torch.randn(2, 3, SMALL_VIT["img_size"], SMALL_VIT["img_size"])
    dense = timm_moe.to_dense(model)
    assert not [name for name, module in dense.named_modules() if isinstance(module, nn.GELU)]
    torch.testing.assert_close(dense(images), model(images))


def test_a_replaced_activation_leaves_torchs_fast_path():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    timm_moe.convert_to_moe(model)
    model.layers[1].linear1.activation = nn.Tanh()
    dense, x = timm_moe.to_dense(model), torch.randn(2, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(dense(x), model(x))


def test_nothing_is_made_of_weights_that_are_elsewhere(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    plain = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT).eval()
    offloaded = accelerate.cpu_offload(copy.deepcopy(plain))
    partly = copy.deepcopy(plain)
    partly.blocks[1].mlp.to("meta")
    for model in (offloaded, partly, copy.deepcopy(plain).to("meta")):
        if not model.head.weight.is_meta or model is offloaded:
            with pytest.raises(
                ValueError, match=r"has no values here.*remove_hook_from_submodules"
            ):
                timm_moe.to_dense(model)
        with pytest.raises(ValueError, match="has no values here"):
            timm_moe.export_dense(model, tmp_path / "dense")
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.fc1 .*forward .*remove_hook"):
        timm_moe.convert_to_moe(offloaded, moe_layers="0")
    accelerate.hooks.remove_hook_from_submodules(offloaded)
    images = torch.randn(2, 3, SMALL_VIT["img_size"], SMALL_VIT["img_size"])
    torch.testing.assert_close(timm_moe.to_dense(offloaded)(images), plain(images))


@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_experts_without_values_give_no_outputs(kind, training, x):
    layer = layer_of(kind).train(training)
    layer.fc1.to("meta")
    layer.fc2.to("meta")
    with pytest.raises(RuntimeError, match="device"):
        output(layer, x)


def test_operators_refuse_tensors_of_two_devices():
    x, weight, bias, end = (
        torch.randn(5, 8),
        torch.randn(2, 6, 8),
        torch.randn(2, 6),
        torch.tensor([2, 5]),
    )
    for number, arguments in enumerate([(x, weight, bias, end)] * 4):
        mixed = [
            tensor.to("meta") if index == number else tensor
            for index, tensor in enumerate(arguments)
        ]
        for gradients in (True, False):
            with (
                torch.set_grad_enabled(gradients),
                pytest.raises(RuntimeError, match=r"different devices \(cpu, meta\)"),
            ):
                grouped_linear(*mixed[:3], Runs(mixed[3]))
    with pytest.raises(RuntimeError, match=r"different devices \(cpu, meta\)"):
        torch.ops.timm_moe.grouped_outer(x, x.to("meta"), True, end)
    with pytest.raises(RuntimeError, match=r"routed to 3 experts.* 2\."):
        grouped_linear(x, weight, bias, Runs(torch.tensor([2, 4, 5])))
