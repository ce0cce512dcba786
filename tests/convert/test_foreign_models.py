"""convert_to_moe on models that timm did not make.

They are found, named or refused, and come back as they were.
"""

import copy
import logging

import pytest
import torch
import torchvision
from common import SMALL_VIT
from torch import nn

import timm_moe
from timm_moe.convert import ffn_paths

SIZE = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=32, patch_size=8)
VIT = {**SIZE, "intermediate_size": 64}
DINO = {**SIZE, "mlp_ratio": 2}
SWIN = dict(
    image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4
)
MAE = dict(
    decoder_num_attention_heads=2,
    decoder_hidden_size=16,
    decoder_num_hidden_layers=2,
    decoder_intermediate_size=32,
)
TEXT = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
)
V2 = torchvision.models.swin_transformer
#: Of transformers: class, its config and the places of all networks.
TRANSFORMERS = {
    "ViT": ("ViTForImageClassification", "ViTConfig", VIT, "vit.layers.{}.mlp"),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", VIT, "deit.layers.{}.mlp"),
    "BEiT": ("BeitForImageClassification", "BeitConfig", VIT, "beit.layers.{}.mlp"),
    "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", DINO, "dinov2.encoder.layer.{}.mlp"),
    "DINOv2 gated": (
        "Dinov2Model",
        "Dinov2Config",
        {**DINO, "use_swiglu_ffn": True},
        "encoder.layer.{}.mlp",
    ),
    "DINOv2 registers": (
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        DINO,
        "encoder.layer.{}.mlp",
    ),
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig", VIT, "model.layer.{}.mlp"),
    "DINOv3 gated": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        {**VIT, "use_gated_mlp": True},
        "model.layer.{}.mlp",
    ),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", VIT, "encoder.layers.{}.mlp"),
    "CLIP": ("CLIPVisionModel", "CLIPVisionConfig", VIT, "encoder.layers.{}.mlp"),
    "ViT-MAE": ("ViTMAEModel", "ViTMAEConfig", VIT, "layers.{}.mlp"),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        SWIN,
        "swin.encoder.layers.{}.blocks.{}.mlp",
    ),
    "Swin v2": (
        "Swinv2ForImageClassification",
        "Swinv2Config",
        SWIN,
        "swinv2.encoder.layers.{}.blocks.{}.intermediate",
    ),
}
OTHERS = {
    "torchvision's ViT": (
        lambda: torchvision.models.VisionTransformer(32, 8, 4, 2, 32, 64, num_classes=5),
        "encoder.layers.encoder_layer_{}.mlp",
    ),
    "torchvision's Swin": (
        lambda: torchvision.models.SwinTransformer(
            [2, 2], 16, [2, 2], [2, 2], [4, 4], num_classes=5
        ),
        "features.{}.{}.mlp",
    ),
    "torchvision's Swin v2": (
        lambda: torchvision.models.SwinTransformer(
            *([2, 2], 16, [2, 2], [2, 2], [4, 4]),
            num_classes=5,
            block=V2.SwinTransformerBlockV2,
            downsample_layer=V2.PatchMergingV2,
        ),
        "features.{}.{}.mlp",
    ),
}
FIRST = ("ViT", "DINOv2 gated", "Swin v2", "torchvision's ViT")
EVERY = [
    pytest.param(name, marks=[] if name in FIRST else pytest.mark.ci)
    for name in (*TRANSFORMERS, *OTHERS)
]


def make(name):
    """The model in eval mode, and a template of its networks' names."""
    torch.manual_seed(0)
    if name in OTHERS:
        build, places = OTHERS[name]
        return build().eval(), places
    transformers = pytest.importorskip("transformers")
    model_class, config_class, options, places = TRANSFORMERS[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    return model.eval(), places


def outputs(model):
    torch.manual_seed(1)  # ViT-MAE masks at random
    with torch.no_grad():
        result = model(torch.randn(2, 3, 32, 32))
    tensors = result.to_tuple() if hasattr(result, "to_tuple") else [result]
    return torch.cat([tensor.flatten() for tensor in tensors if torch.is_tensor(tensor)])


def numbers(places):
    if places.count("{}") == 1:
        return [(number,) for number in range(4)]
    stages = (1, 3) if places.startswith("features") else (0, 1)
    return [(stage, block) for stage in stages for block in range(2)]


@pytest.mark.parametrize("router", ["random", "top_k"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.first_case
def test_there_and_back(name, router):
    model, places = make(name)
    expected, before = (
        outputs(model),
        {key: value.clone() for key, value in model.state_dict().items()},
    )
    classes, trained = (
        [type(m) for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
    )
    paths = [places.format(*number) for number in numbers(places)]
    assert ffn_paths(model) == paths
    converted = timm_moe.convert_to_moe(copy.deepcopy(model), router=router)
    assert list(timm_moe.moe_layers(converted)) == paths[1::2]
    if router == "random":
        assert torch.equal(outputs(converted), expected)
    # So that what comes back was really there.
    for layer in timm_moe.moe_layers(converted).values():
        for _, stacked in layer.named_expert_parameters():
            stacked.data[1:] += 1
            stacked.data[0] -= layer.num_experts - 1
    dense = timm_moe.to_dense(converted)
    torch.testing.assert_close(outputs(dense), expected, rtol=1e-4, atol=1e-5)
    assert list(dense.state_dict()) == list(before)
    for key, value in dense.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=1e-6)
    assert [type(m) for m in dense.modules()] == classes
    assert [p.requires_grad for p in dense.parameters()] == trained
    converted.train()
    outputs(converted)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.first_case
def test_halves_of_the_hidden_units(name):
    model, _ = make(name)
    expected = outputs(model)
    options = dict(top_k=2, gate_mode="one", expert_width=0.5)
    layers = timm_moe.moe_layers(timm_moe.convert_to_moe(model, 4, router="top_k", **options))
    for layer in layers.values():
        nn.init.zeros_(layer.router.weight)  # the first two experts, both halves of one copy
    torch.testing.assert_close(outputs(model), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs(timm_moe.to_dense(model)), expected, rtol=1e-4, atol=1e-5)


def test_dtype_mode_and_what_is_frozen_are_kept():
    model, _ = make("torchvision's ViT")
    model.bfloat16().train()
    network = model.encoder.layers.encoder_layer_1.mlp
    network[0].requires_grad_(False)
    network.eval()
    timm_moe.convert_to_moe(model, router="top_k")
    layer = timm_moe.moe_layers(model)["encoder.layers.encoder_layer_1.mlp"]
    assert not layer.training
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert [p.requires_grad for _, p in layer.named_expert_parameters()] == [
        False,
        False,
        True,
        True,
    ]
    assert timm_moe.moe_layers(model)["encoder.layers.encoder_layer_3.mlp"].training


def test_two_towers_are_not_mixed():
    transformers = pytest.importorskip("transformers")
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=VIT))
    assert ffn_paths(model) == [f"vision_model.encoder.layers.{number}.mlp" for number in range(4)]
    timm_moe.convert_to_moe(model, modules=r"text_model\..*\d\.mlp")
    assert list(timm_moe.moe_layers(model)) == [
        f"text_model.encoder.layers.{number}.mlp" for number in range(2)
    ]


class Output(nn.Module):
    """As in the blocks of earlier versions of transformers, with the residual inside."""

    def __init__(self):
        super().__init__()
        self.dense, self.dropout = nn.Linear(12, 8), nn.Dropout(0.1)

    def forward(self, hidden_states, input_tensor):
        return self.dropout(self.dense(hidden_states)) + input_tensor


class EarlierBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.output = nn.LayerNorm(8), Output()
        self.intermediate = nn.Sequential(nn.Linear(8, 12), nn.GELU())

    def forward(self, x):
        return self.output(self.intermediate(self.norm(x)), x)


# Of no other block it is known that it calls the two in a row.
EarlierBlock.__module__ = "transformers.models.earlier"


@pytest.mark.parametrize("router", ["random", "top_k"])
def test_a_residual_inside_stays_outside_of_the_experts(router):
    model, x = nn.Sequential(EarlierBlock(), EarlierBlock()).eval(), torch.randn(2, 5, 8)
    expected, names = model(x), list(model.state_dict())
    timm_moe.convert_to_moe(model, modules=["0", "1"], router=router)
    assert list(timm_moe.moe_layers(model)) == ["0.intermediate", "1.intermediate"]
    if router == "random":
        torch.testing.assert_close(model(x), expected)
    dense = timm_moe.to_dense(model)
    assert list(dense.state_dict()) == names
    assert torch.equal(dense(x), expected)
    assert isinstance(dense[0].output, Output)
    model.train()(x).sum().backward()


def test_a_normalised_residual_is_left_alone_and_told(caplog):
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**{**TEXT, "vocab_size": 10}))
    with pytest.raises(ValueError, match=r"BertModel .*modules="):
        timm_moe.convert_to_moe(model)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("Left as it is: encoder.layer.0.intermediate")
    assert "does more with the residual than to add it" in record.getMessage()
    assert record.getMessage().endswith("(and 1 more like it).")


# --- nn.TransformerEncoderLayer, whose parts torch fuses in eval mode


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 3).eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_an_encoder_may_be_built_of_layers_with_experts():
    layers = nn.ModuleList([encoder().layers[0]])
    timm_moe.convert_to_moe(layers, moe_layers="0")
    model, x = nn.TransformerEncoder(layers[0], 2).eval(), torch.randn(2, 7, 32)
    expected = model(x)
    with torch.no_grad():
        torch.testing.assert_close(timm_moe.to_dense(model)(x), expected)


@pytest.mark.parametrize(
    "options", [dict(), dict(activation="gelu"), dict(activation=nn.SiLU(), norm_first=True)]
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.first_case
def test_an_encoder_of_torch(options):
    model, x = encoder(**options), torch.randn(2, 7, 32)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 5:] = True
    with torch.no_grad():
        expected, masked = model(x), model(x, src_key_padding_mask=mask)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    settings = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    timm_moe.convert_to_moe(model, moe_layers="0")
    timm_moe.convert_to_moe(model, moe_layers="2")
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
        got = model(x, src_key_padding_mask=mask)
        # torch's fused way makes zeros of what is masked.
        torch.testing.assert_close(got[~mask], masked[~mask])
    for layer in timm_moe.moe_layers(model).values():
        for _, stacked in layer.named_expert_parameters():
            stacked.data[1] += 1
    assert not torch.allclose(model(x), expected)  # nothing else than the experts computes
    dense = timm_moe.to_dense(model)
    assert list(dense.state_dict()) == list(before)
    assert {key: value for key, value in vars(dense).items() if not key.startswith("_")} == settings
    assert type(dense.layers[0].activation) is type(encoder(**options).layers[0].activation)
    assert (
        dense.layers[0].activation_relu_or_gelu
        == encoder(**options).layers[0].activation_relu_or_gelu
    )
    with torch.no_grad():
        fused = dense(x, src_key_padding_mask=mask)
        dense.load_state_dict(before)
        torch.testing.assert_close(dense(x, src_key_padding_mask=mask), masked, rtol=0, atol=0)
    assert fused.shape == masked.shape


# --- models of one's own


class Block(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.net = network

    def forward(self, x):
        return x + self.net(x)


def ffn(width=8, hidden=12):
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def own(*networks):
    return nn.Sequential(*(Block(network) for network in networks or (ffn(), ffn(), ffn()))).eval()


@pytest.mark.parametrize(
    ("modules", "moe_layers", "found"),
    [
        (r"\d\.net", None, ["0.net", "1.net", "2.net"]),
        (["2.net", "0.net"], None, ["0.net", "2.net"]),
        (
            lambda name, module: isinstance(module, nn.Sequential) and name != "1.net",
            None,
            ["0.net", "2.net"],
        ),
        (r"\d\.net", "every-2", ["1.net"]),
        (r"\d\.net", [0], ["0.net"]),
    ],
)
def test_named_networks(modules, moe_layers, found):
    model, x = own(), torch.randn(2, 5, 8)
    expected = model(x)
    timm_moe.convert_to_moe(model, moe_layers=moe_layers, modules=modules)
    assert list(timm_moe.moe_layers(model)) == found
    assert torch.equal(model(x), expected)
    assert torch.equal(timm_moe.to_dense(model)(x), expected)


class Mixing(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.fc, self.mix = nn.Linear(8, 8), mix

    def forward(self, x):
        return self.mix(self.fc(x))


class Zero(nn.Module):
    """Begins at zero, so that its outputs tell nothing."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.zeros_(self.fc2.weight)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x):
        return self.fc2(self.fc1(x) - self.fc1(x).mean(-2, keepdim=True))


shared = ffn()
tied = ffn()
tied[2].weight = shared[0].weight


class Gated(nn.Module):
    """A mixing of rows that begins near zero."""

    def __init__(self):
        super().__init__()
        self.fc, self.gate = nn.Linear(8, 8), nn.Parameter(torch.full((8,), 1e-6))

    def forward(self, x):
        return self.fc(x) + self.gate * x.mean(-2, keepdim=True)


class Squaring(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return self.linear2(self.activation(self.linear1(x)) ** 2)


REFUSED = {
    "mixes rows, gated near zero at first": (own(Gated()), "it mixes rows"),
    "mixes rows": (own(Mixing(lambda x: x + x.mean(-2, keepdim=True))), "it mixes rows"),
    "mixes rows, though zero at first": (own(Zero()), "it mixes rows"),
    "normalises over the batch": (
        own(nn.Sequential(ffn(), nn.BatchNorm1d(8))),
        r"buffer \(1\.running_mean\)",
    ),
    "normalises over the batch, without buffers": (
        own(nn.Sequential(ffn(), nn.BatchNorm1d(8, track_running_stats=False))),
        "it mixes rows",
    ),
    "mixes tokens": (own(Mixing(lambda x: x.flip(-2))), "it mixes rows"),
    "pools": (own(Mixing(lambda x: x[..., :1, :])), "changes their number"),
    "returns two": (own(Mixing(lambda x: (x, x))), "it returns a tuple"),
    "is random": (own(Mixing(lambda x: x + torch.rand_like(x))), "random in eval mode"),
    "fails": (own(Mixing(lambda x: x.missing)), r"\(4, 8\).*missing"),
    "has no linear layer": (own(nn.Sequential(nn.LayerNorm(8))), "no torch.nn.Linear"),
    "is used twice": (own(shared, shared), "is used twice"),
    "has tied weights": (own(shared, tied), "is used twice"),
    "is an expert layer": (
        timm_moe.convert_to_moe(own(), modules=["0.net"]),
        r"0\.net .*expert layer",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.first_case
def test_networks_that_are_refused(kind):
    model, sentence = REFUSED[kind]
    before, state = [type(m) for m in model.modules()], torch.random.get_rng_state()
    with pytest.raises(ValueError, match=sentence):
        timm_moe.convert_to_moe(model, modules=["0.net"])
    assert [type(m) for m in model.modules()] == before
    if "random" not in kind:
        assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        ("nothing", "modules='nothing' .*Sequential"),
        (["0.net", "9.net"], r"'9\.net'.*Sequential"),
        (r"0\.net(\.0)?", r"0\.net\.0 and 0\.net, .*inside"),
        (lambda name, module: False, "names no module"),
    ],
)
def test_names_that_are_refused(modules, sentence):
    with pytest.raises(ValueError, match=sentence):
        timm_moe.convert_to_moe(own(), modules=modules)


def test_the_width_is_that_of_the_layer_that_comes_first():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.into = nn.Linear(12, 8), nn.Linear(8, 12)

        def forward(self, x):
            return self.out(self.into(x).relu())

    model = timm_moe.convert_to_moe(own(Backwards()), modules=["0.net"], router="top_k")
    assert model[0].net.router.weight.shape == (4, 8)
    assert model(torch.randn(3, 8)).shape == (3, 8)


def test_timms_networks_may_be_named_too(dense_vit, images):
    expected = dense_vit(images)
    timm_moe.convert_to_moe(dense_vit, modules=r"blocks\.[01]\.mlp")
    assert list(timm_moe.moe_layers(dense_vit)) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert torch.equal(dense_vit(images), expected)
    assert len(ffn_paths(dense_vit)) == SMALL_VIT["depth"]


def test_on_the_meta_device():
    with torch.device("meta"):
        model = torchvision.models.VisionTransformer(32, 8, 4, 2, 32, 64, num_classes=5)
    timm_moe.convert_to_moe(model, router="top_k")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_part_called_module_is_not_the_model():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.tail = own(), ffn()

        def forward(self, x):
            return self.tail(self.module(x))

    model = Outer().eval()
    timm_moe.convert_to_moe(model, modules=r"module\.\d\.net|tail")
    assert list(timm_moe.moe_layers(model))[-1] == "tail"
    x = torch.randn(3, 8)
    torch.testing.assert_close(timm_moe.to_dense(nn.DataParallel(model))(x), model(x))


def test_a_part_called_module_may_hold_all_parameters():
    class Normalising(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = own()
            self.register_buffer("mean", torch.ones(8))

        def forward(self, x):
            return self.module(x - self.mean)

    model, x = Normalising().eval(), torch.randn(3, 8)
    timm_moe.convert_to_moe(model, modules=r"module\.\d\.net")
    dense = timm_moe.to_dense(model)
    assert type(dense) is Normalising
    assert torch.equal(dense(x), model(x))


def test_a_block_that_calls_its_parts_otherwise():
    layer = Squaring(32, 2, 64, batch_first=True).eval()
    assert ffn_paths(nn.Sequential(layer)) == []
    with pytest.raises(ValueError, match=r"called with rows|mixes rows"):
        timm_moe.convert_to_moe(nn.Sequential(layer), modules=["0"])


@pytest.mark.parametrize(
    "modules", [["layers.0", "layers.0.linear1"], ["layers.0", "layers.0.linear2"], ".*linear1"]
)
def test_a_part_of_a_block_is_no_network(modules):
    with pytest.raises(ValueError, match="name the block instead"):
        timm_moe.convert_to_moe(encoder(), modules=modules)


def test_on_the_meta_device_rows_are_tried_out_too():
    with torch.device("meta"):
        model = own(Mixing(lambda x: x + x.mean(-2, keepdim=True)))
    with pytest.raises(ValueError, match="it mixes rows"):
        timm_moe.convert_to_moe(model, modules=["0.net"])
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        bert = transformers.BertModel(transformers.BertConfig(**{**TEXT, "vocab_size": 10}))
    assert ffn_paths(bert) == []


def test_a_second_argument_is_no_routing():
    model = timm_moe.convert_to_moe(own(), modules=["0.net"])
    with pytest.raises(TypeError, match="positional"):
        model[0].net(torch.randn(3, 8), torch.ones(3))
