"""Small-data models: shifted patches and locality self-attention.

They are compared with slow, independent computations.
"""

import json
import math
import re

import numpy as np
import pytest
import timm
import torch
from timm.optim import create_optimizer_v2

import timm_moe
from timm_moe.convert.expert_layers import parameters
from timm_moe.export.export import export_moe
from timm_moe.models.locality import (
    LocalityAttention,
    LocalityWindowAttention,
    ShiftedPatchEmbed,
    ShiftedPatches,
    ShiftedPatchMerging,
    ShiftedPooling,
)
from timm_moe.models.registered import weightless_model
from timm_moe.models.tokens_to_token import TokenAttention, TokensToTokenEmbed

SL = dict(shifted_patches=True, locality_attention=True)
#: Each family, made small: dense name, name with experts, arguments, the stock model.
FAMILIES = {
    "vit": (
        "vit_xtiny",
        "vit_xtiny_ewa_moe",
        dict(embed_dim=32, depth=2, num_heads=2, num_classes=5),
        "vit_tiny_patch16_224",
    ),
    "pit": (
        "pit_xs_32",
        "pit_xs_32_ewa_moe",
        dict(base_dims=[8, 8, 8], depth=[1, 2, 1], num_classes=5),
        "pit_xs_224",
    ),
    "swin": (
        "swin_tiny_patch2_window4_32",
        "swin_tiny_patch2_window4_32_ewa_moe",
        dict(embed_dim=12, depths=[1, 2, 1], num_classes=5),
        "swin_tiny_patch4_window7_224",
    ),
    "t2t": (
        "t2t_i2_32",
        "t2t_i2_32_ewa_moe",
        dict(embed_dim=32, depth=2, num_heads=2, num_classes=5),
        "t2t_i2_32",
    ),
}
families = pytest.mark.parametrize("family", FAMILIES)


def randomize(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def slow_shifted_patches(x, patch, norm_weight, norm_bias, weight, bias):
    """Pixel by pixel; what lies outside the image is zero."""
    channels, height, width = x.shape
    half = patch // 2
    # Of the content: down, right.
    shifts = [(0, 0), (half, half), (half, -half), (-half, half), (-half, -half)]
    tokens = np.zeros((len(weight), height // patch, width // patch))
    for row, column in np.ndindex(*tokens.shape[1:]):
        flat = []
        for down, right in shifts:
            for channel, y, x_ in np.ndindex(channels, patch, patch):
                source = row * patch + y - down, column * patch + x_ - right
                inside = 0 <= source[0] < height and 0 <= source[1] < width
                flat.append(x[(channel, *source)] if inside else 0.0)
        flat = np.array(flat)
        normed = (flat - flat.mean()) / math.sqrt(flat.var() + 1e-5) * norm_weight + norm_bias
        tokens[:, row, column] = weight @ normed + bias
    return tokens


def arrays(module):
    return {name: tensor.detach().double().numpy() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("patch", [1, 2, 3, 4])
def test_shifted_patches_pixel_by_pixel(patch):
    patches = randomize(ShiftedPatches(2, 7, patch)).double()
    x = torch.randn(2, 2, 3 * patch, 2 * patch, dtype=torch.double)
    p = arrays(patches)
    expected = [
        slow_shifted_patches(
            image.numpy(),
            patch,
            p["norm.weight"],
            p["norm.bias"],
            p["linear.weight"],
            p["linear.bias"],
        )
        for image in x
    ]
    np.testing.assert_allclose(patches(x).detach().numpy(), np.stack(expected), atol=1e-10)


def test_embedding_merging_and_pooling_are_shifted_patches_in_the_formats_of_their_models():
    x = torch.randn(2, 3, 8, 8)
    embed = ShiftedPatchEmbed(8, 4, 3, 6)
    assert torch.equal(embed(x), embed.proj(x).flatten(2).mT)
    assert embed.grid_size == (2, 2)
    merging = ShiftedPatchMerging(3, 6)
    assert torch.equal(merging(x.permute(0, 2, 3, 1)), merging.patches(x).permute(0, 2, 3, 1))
    pooling = ShiftedPooling(3, 6)
    tokens, class_token = pooling(x, torch.ones(2, 1, 3))
    assert torch.equal(tokens, pooling.patches(x))
    assert torch.equal(class_token, pooling.fc(torch.ones(2, 1, 3)))


def slow_locality_attention(x, heads, p, bias=None):
    """Token by token; bias (heads, N, N) is added to the logits."""
    tokens, width = x.shape
    size = width // heads
    q, k, v = np.split(x @ p["qkv.weight"].T + p["qkv.bias"], 3, axis=1)
    out = np.zeros_like(x)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        for i in range(tokens):
            others = [j for j in range(tokens) if j != i]
            logits = [
                q[i, part] @ k[j, part] * p["scale"][head].item()
                + (0 if bias is None else bias[head, i, j])
                for j in others
            ]
            weights = np.exp(logits - np.max(logits))
            out[i, part] = sum(
                weight * v[j, part]
                for weight, j in zip(weights / weights.sum(), others, strict=True)
            )
    return out @ p["proj.weight"].T + p["proj.bias"]


def test_locality_attention_token_by_token():
    attention = LocalityAttention(12, num_heads=3, qkv_bias=True)
    assert attention.scale.flatten().tolist() == pytest.approx([1 / math.sqrt(4)] * 3)
    randomize(attention.double())
    x = torch.randn(2, 5, 12, dtype=torch.double)
    expected = [slow_locality_attention(image.numpy(), 3, arrays(attention)) for image in x]
    np.testing.assert_allclose(attention(x).detach().numpy(), np.stack(expected), atol=1e-10)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    additive = attention(x, torch.zeros(5, 5, dtype=torch.double).masked_fill(~causal, -math.inf))
    for masked in (attention(x, causal), attention(x, is_causal=True)):
        torch.testing.assert_close(masked, additive)
    assert not torch.allclose(additive, attention(x))


@pytest.mark.parametrize("masked", [False, True])
def test_locality_window_attention_token_by_token(masked):
    side, heads = 3, 2
    attention = LocalityWindowAttention(8, num_heads=heads, window_size=side)
    assert attention.scale.flatten().tolist() == pytest.approx([1 / math.sqrt(4)] * 2)
    randomize(attention.double())
    x = torch.randn(4, side**2, 8, dtype=torch.double)  # two images of two windows
    mask = torch.zeros(2, side**2, side**2, dtype=torch.double)
    mask[1, :4, 4:] = mask[1, 4:, :4] = -100
    table = arrays(attention)["relative_position_bias_table"]
    bias = np.zeros((heads, side**2, side**2))
    for i, j in np.ndindex(side**2, side**2):
        down, right = i // side - j // side, i % side - j % side
        bias[:, i, j] = table[(down + side - 1) * (2 * side - 1) + right + side - 1]
    expected = [
        slow_locality_attention(
            window.numpy(),
            heads,
            arrays(attention),
            bias + (mask[index % 2].numpy() if masked else 0),
        )
        for index, window in enumerate(x)
    ]
    actual = attention(x, mask) if masked else attention(x)
    np.testing.assert_allclose(actual.detach().numpy(), np.stack(expected), atol=1e-9)


ALONE = {
    "ViT": lambda: LocalityAttention(8, num_heads=2),
    "Swin": lambda: LocalityWindowAttention(8, num_heads=2, window_size=1),
    "T2T": lambda: TokenAttention(8, 8, locality=True),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.first_case
def test_a_token_without_others_attends_to_itself(kind, dtype, autocast):
    """The authors' mask is finite."""
    attention = randomize(ALONE[kind]().to(dtype))
    x = torch.randn(3, 1, 8, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        y = attention(x)
        value = attention.qkv(x).chunk(3, -1)[2]
        expected = attention.proj(value) + (value if kind == "T2T" else 0)
    narrowest = torch.finfo(y.dtype if autocast is None or dtype == torch.float64 else autocast).eps
    torch.testing.assert_close(
        y, expected, rtol=0, atol=4 * narrowest * expected.abs().max().item()
    )
    y.float().sum().backward()
    assert x.grad.isfinite().all()


def norm_and_linear(width, out):
    return 2 * width + width * out + out


@pytest.mark.parametrize(
    ("name", "dense", "shifted", "heads"),
    [
        # patch embedding: 5 x 3 channels of p x p pixels for a convolution with bias
        ("vit_xtiny", 2_714_980, norm_and_linear(15 * 16, 192) - (48 * 192 + 192), 9 * 12),
        # and two poolings: 5 x 2 x 2 patches for a depthwise 3 x 3 convolution to twice the width
        (
            "pit_xs_32",
            6_830_884,
            norm_and_linear(15 * 4, 96)
            - (12 * 96 + 96)
            + sum(norm_and_linear(20 * width, 2 * width) - 20 * width for width in (96, 192)),
            2 * 2 + 6 * 4 + 4 * 8,
        ),
        # and two mergings: in timm a norm and a linear layer without bias; Swin has a norm behind
        # its embedding
        (
            "swin_tiny_patch2_window4_32",
            7_083_262,
            norm_and_linear(15 * 4, 96)
            - (12 * 96 + 96 + 2 * 96)
            + sum(
                norm_and_linear(20 * width, 2 * width) - 8 * width - 8 * width**2
                for width in (96, 192)
            ),
            2 * 3 + 6 * 6 + 4 * 12,
        ),
    ],
)
def test_parameters(name, dense, shifted, heads):
    assert parameters(weightless_model(name)) == dense
    assert parameters(weightless_model(name, shifted_patches=True)) == dense + shifted
    assert parameters(weightless_model(name, locality_attention=True)) == dense + heads
    assert parameters(weightless_model(name, **SL)) == dense + shifted + heads


def test_sizes_of_the_paper():
    pit, swin = weightless_model("pit_xs_32"), weightless_model("swin_tiny_patch2_window4_32")
    assert [len(stage.blocks) for stage in pit.transformers] == [2, 6, 4]
    assert [
        (stage.blocks[0].attn.num_heads, stage.blocks[0].attn.qkv.in_features)
        for stage in pit.transformers
    ] == [
        (2, 96),
        (4, 192),
        (8, 384),
    ]
    assert [len(stage.blocks) for stage in swin.layers] == [2, 6, 4]
    assert [stage.blocks[0].window_size for stage in swin.layers] == [(4, 4)] * 3
    assert [stage.blocks[0].input_resolution for stage in swin.layers] == [(16, 16), (8, 8), (4, 4)]
    for model in (pit, swin):
        assert all(
            block.mlp.fc1.out_features == 2 * block.mlp.fc1.in_features
            for block in model.modules()
            if hasattr(block, "mlp")
        )
        assert model.pretrained_cfg["input_size"] == (3, 32, 32)


@families
def test_every_embedding_merging_and_attention_is_replaced(family):
    dense, _, args, _ = FAMILIES[family]
    model = timm.create_model(dense, **args, **SL)
    assert isinstance(
        model.patch_embed, TokensToTokenEmbed if family == "t2t" else ShiftedPatchEmbed
    )
    assert not [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    replaced = sum(isinstance(module, ShiftedPatches) for module in model.modules())
    assert replaced == {"vit": 1, "t2t": 0}.get(family, 3)
    attentions = [block.attn for block in model.modules() if hasattr(block, "attn")]
    assert attentions
    assert all(isinstance(attention.scale, torch.nn.Parameter) for attention in attentions)
    if family == "t2t":  # the image and its shifted copies, in windows of nine pixels
        assert model.patch_embed.proj.transformers[0].norm1.normalized_shape == (5 * 3 * 9,)


@families
@pytest.mark.first_case
def test_without_the_options_it_is_the_stock_model(family, images):
    dense, moe, args, stock = FAMILIES[family]
    model = timm.create_model(dense, **args).eval()
    experts = timm.create_model(moe, **args, shifted_patches=False).eval()
    experts.load_state_dict(model.state_dict())
    plain = timm_moe.to_dense(experts)
    assert type(plain) is type(timm.create_model(stock))
    assert torch.equal(plain(images), model(images))


@families
@pytest.mark.parametrize("options", [SL, {}, {"shifted_patches": True}])
@pytest.mark.first_case
def test_export(family, options, images, tmp_path):
    dense, moe, args, stock = FAMILIES[family]
    args = {**args, **options, "in_chans": 1}
    model = timm.create_model(moe, **args).eval()
    expected = model(images[:, :1])
    export = timm_moe.export_dense(model, tmp_path / "dense", model_args=None if options else args)
    assert (export.architecture, export.exact) == (dense if options else stock, True)
    config = json.loads((tmp_path / "dense/config.json").read_text())
    assert not set(config["model_args"]) & {"num_experts", "share_rate"}
    loaded = timm.create_model(f"local-dir:{tmp_path}/dense", pretrained=True).eval()
    torch.testing.assert_close(loaded(images[:, :1]), expected)
    export_moe(model, tmp_path / "moe", model_args=args)
    loaded = timm.create_model(f"local-dir:{tmp_path}/moe", pretrained=True).eval()
    assert torch.equal(loaded(images[:, :1]), expected)
    again = timm_moe.export_dense(loaded, tmp_path / "again")
    assert again.architecture == export.architecture


@families
def test_everything_is_trained_and_the_temperature_is_decayed(family, images):
    _, moe, args, _ = FAMILIES[family]
    model = timm.create_model(moe, **args, **SL)
    model(images).square().sum().backward()
    assert all(
        parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad
    )
    scales = {
        id(parameter) for name, parameter in model.named_parameters() if name.endswith("attn.scale")
    }
    decays = [
        group["weight_decay"]
        for group in create_optimizer_v2(model, opt="adamw", weight_decay=0.05).param_groups
        for parameter in group["params"]
        if id(parameter) in scales
    ]
    assert set(decays) == {0.05}
    assert all(parameter.grad.all() for parameter in model.parameters() if id(parameter) in scales)


def test_the_new_layers_of_swin_begin_as_timms():
    _, _, args, _ = FAMILIES["swin"]
    model = timm.create_model("swin_tiny_patch2_window4_32", **args, **SL)
    for linear in (model.layers[1].downsample.patches.linear, model.layers[1].blocks[0].attn.qkv):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert not linear.bias.any()


def test_routed_experts_take_the_options_too(images):
    model = timm.create_model("vit_xtiny_moe", **FAMILIES["vit"][2], **SL).eval()
    assert model(images).shape == (6, 5)
    assert isinstance(model.blocks[0].attn, LocalityAttention)


@families
@pytest.mark.parametrize("half", ["dense", "experts"])
def test_options_that_are_no_flags_are_refused(family, half):
    name = FAMILIES[family][half == "experts"]
    with pytest.raises(ValueError, match=r"shifted_patches .*True or False, .*'false'"):
        timm.create_model(name, shifted_patches="false")
    with pytest.raises(ValueError, match=r"locality_attention .*True or False, .* 1\."):
        timm.create_model(name, locality_attention=1)


@pytest.mark.parametrize("family", ["vit", "pit", "swin"])
@pytest.mark.first_case
def test_locality_attention_has_the_biases_and_the_dropout_of_timms(family):
    name, _, small, _ = FAMILIES[family]
    options = dict(**small, attn_drop_rate=0.1, proj_drop_rate=0.2)
    if family != "pit":
        options |= dict(qkv_bias=False)

    def settings(model):
        return [
            (block.attn.attn_drop.p, block.attn.proj_drop.p, block.attn.qkv.bias is None)
            for block in model.modules()
            if hasattr(block, "attn")
        ]

    stock = timm.create_model(name, **options)
    assert settings(timm.create_model(name, locality_attention=True, **options)) == settings(stock)


def test_locality_attention_of_swin_has_the_stated_width_of_heads():
    name, _, small, _ = FAMILIES["swin"]
    stock, local = (
        timm.create_model(name, **small, head_dim=16, locality_attention=is_local)
        for is_local in (False, True)
    )
    attention = "layers.0.blocks.0.attn"
    assert local.get_submodule(attention).qkv.out_features == 3 * 16 * 3
    assert local.get_submodule(attention).qkv.out_features == (
        stock.get_submodule(attention).qkv.out_features
    )


@families
@pytest.mark.parametrize("like", [dict(dtype=torch.bfloat16), dict(device="meta")])
@pytest.mark.first_case
def test_new_layers_are_of_the_device_and_the_dtype_asked_for(family, like):
    name, _, small, _ = FAMILIES[family]
    model = timm.create_model(name, **small, **SL, **like)
    for key, tensor in model.state_dict().items():
        if "relative_position_index" not in key:
            for attribute, expected in like.items():
                assert str(getattr(tensor, attribute)) == str(expected), key


@families
@pytest.mark.first_case
def test_features_are_those_asked_for(family, images):
    name, _, small, _ = FAMILIES[family]
    model = timm.create_model(name, **small, features_only=True, out_indices=(0, 1))
    assert len(model(images)) == 2


def test_own_entries_of_the_config_stay_with_shifted_patches():
    overlay = dict(mean=(0.1, 0.2, 0.3))
    model = timm.create_model("vit_xtiny", shifted_patches=True, pretrained_cfg_overlay=overlay)
    assert model.pretrained_cfg["mean"] == overlay["mean"]
    assert model.pretrained_cfg["first_conv"] is None


def test_sides_of_shifted_patches_are_rounded_up():
    patches, images = ShiftedPatches(3, 8, 4), torch.randn(2, 3, 10, 17)
    padded = torch.nn.functional.pad(images, (0, 3, 0, 2))
    assert patches(images).shape == (2, 8, 3, 5)
    torch.testing.assert_close(patches(images), patches(padded))


def test_impossible_patches_are_refused():
    with pytest.raises(ValueError, match=r"stride .*patch_size, 4, .* 2\."):
        timm.create_model("pit_xs_32", patch_size=4, shifted_patches=True)
    with pytest.raises(ValueError, match=r"patch_size must be an integer .*: got \(4, 2\)\."):
        timm.create_model("vit_xtiny", patch_size=(4, 2), shifted_patches=True)
    for patch_size in (6, 1, (4, 4)):
        got = re.escape(f"got {patch_size}.")
        with pytest.raises(ValueError, match=f"patch_size must be a power of 2 .*{got}"):
            timm.create_model("t2t_i2_32", depth=1, patch_size=patch_size)


def test_other_image_sizes(images):
    larger = torch.randn(2, 3, 64, 64)
    model = timm.create_model("vit_xtiny", **FAMILIES["vit"][2], **SL)
    model.set_input_size(64)
    assert model(larger).shape == (2, 5)
    for family, options in {
        "pit": dict(patch_size=4, stride=4),
        "swin": dict(patch_size=4),
    }.items():
        dense, _, args, _ = FAMILIES[family]
        assert timm.create_model(dense, **args, **SL, **options, img_size=64)(larger).shape == (
            2,
            5,
        )
    dynamic = timm.create_model("vit_xtiny", **FAMILIES["vit"][2], **SL, dynamic_img_size=True)
    assert dynamic(images).shape == (6, 5)
    assert dynamic(larger).shape == (2, 5)


def arbitrary_weights(model):
    """As those that the authors' code was run with for the golden outputs."""
    weights = {}
    for index, (name, tensor) in enumerate(sorted(model.state_dict().items())):
        drawn = np.random.RandomState(index).standard_normal(tuple(tensor.shape)).astype(np.float32)
        is_norm = tensor.ndim == 1 and name.endswith("weight")
        weights[name] = torch.from_numpy(
            drawn * (0.05 if tensor.ndim > 1 else 0.1) + (1 if is_norm else 0)
        )
    return {**weights, "pos_embed": model.pos_embed.detach()}


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("options", [{}, SL], ids=["plain", "sl"])
def test_t2t_computes_what_the_authors_code_does(golden, size, options):
    model = timm.create_model(
        "t2t_i2_32", img_size=size, patch_size=size // 8, depth=2, num_classes=5, **options
    ).eval()
    model.load_state_dict(arbitrary_weights(model))
    images = np.random.RandomState(999).standard_normal((2, 3, size, size)).astype(np.float32)
    expected = golden("t2t")[f"{size}_sl" if options else str(size)]
    with torch.no_grad():
        torch.testing.assert_close(model(torch.from_numpy(images)), expected, rtol=1e-4, atol=1e-4)


def test_t2t_positions_are_fixed_and_experts_are_in_the_blocks():
    model = timm.create_model("t2t_i2_32_ewa_moe", depth=4, embed_dim=32, num_heads=2)
    assert list(timm_moe.moe_layers(model)) == ["blocks.1.mlp", "blocks.3.mlp"]
    positions = model.pos_embed.clone()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1.0)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    optimizer.step()
    model.init_weights()
    assert torch.equal(model.pos_embed, positions)
    assert torch.equal(positions[0, 0, :4], torch.tensor([0.0, 1.0, 0.0, 1.0]))


def test_every_vit_here_may_have_a_layer_before_its_classifier():
    for name in ("vit_xtiny", "t2t_i2_32"):
        model = timm.create_model(name, pre_logits=True, num_classes=7).eval()
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("family", ["vit_xtiny", "pit_xs_32", "swin_tiny_patch2_window4_32"])
@pytest.mark.first_case
def test_the_dense_model_is_exported_as_timms_own(family, tmp_path):
    model = timm.create_model(family, num_classes=5).eval()
    exported = timm_moe.export_dense(model, tmp_path / "dense")
    assert model.pretrained_cfg["architecture"] == family  # The caller's model is as it was.
    ewa = timm.create_model(f"{family}_ewa_moe", num_classes=5)
    assert exported.architecture == timm_moe.export_dense(ewa, tmp_path / "ewa").architecture
    loaded = timm.create_model(f"local-dir:{tmp_path / 'dense'}", pretrained=True).eval()
    assert type(loaded).__module__.startswith("timm.")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(loaded(images), model(images))
