"""WideNet.

What its blocks share is held once, through training, saving and copying. Groups of blocks and the
balance loss are tested, too.
"""

import copy
import math
import pickle

import pytest
import timm
import torch
from common import loads
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from timm.layers import Attention, set_scriptable
from timm.models import save_for_hf
from timm.models.vision_transformer import Block
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import timm_moe
from timm_moe.analysis.norms import norm_divergence
from timm_moe.layers import MoeMlp, TopKRouter
from timm_moe.layers.losses import balance_loss
from timm_moe_cli import main

SMALL = dict(
    img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, mlp_ratio=2, num_classes=5
)


def widenet(**options):
    return timm.create_model("widenet_b", **{**SMALL, **options})


def test_balance_loss_matches_the_golden_file(golden, monkeypatch):
    for index in range(4):
        case = {
            k.removeprefix(f"b{index}_"): v
            for k, v in golden("balance_loss").items()
            if k.startswith(f"b{index}_")
        }
        tokens, num_experts = case["logits"].shape
        router = TopKRouter(
            num_experts,
            num_experts,
            int(case["K"]),
            noise_std=1.0,
            loss_weights={"balance_top_k": 1.0},
        ).double()
        router.weight.data = torch.eye(num_experts).double()
        monkeypatch.setattr(torch, "randn_like", lambda x, eps=case["eps"], **_: eps.view_as(x))
        router(case["logits"].double().view(tokens, 1, num_experts))
        torch.testing.assert_close(
            router.records[0].weighted_loss, case["loss_official"].double(), rtol=1e-6, atol=0
        )


def test_balance_loss_at_its_extremes():
    uniform = torch.full((1, 8, 4), 0.25)
    spread = torch.arange(8).view(1, 8, 1) % 4
    torch.testing.assert_close(balance_loss(uniform, loads(spread, 4), 1), torch.ones(1))
    both = torch.cat([spread, (spread + 1) % 4], 2)
    torch.testing.assert_close(balance_loss(uniform, loads(both, 4), 2), torch.ones(1))
    collapsed = torch.tensor([1.0, 0, 0, 0]).expand(1, 8, 4)
    load = loads(torch.zeros(1, 8, 1, dtype=torch.long), 4)
    torch.testing.assert_close(balance_loss(collapsed, load, 1), torch.full((1,), 4.0))


def test_blocks_share_all_but_their_norms(images):
    model = widenet()
    names = [name for name, _ in model.named_parameters() if name.startswith("blocks.")]
    assert [name for name in names if not name.startswith("blocks.0.")] == [
        f"blocks.{block}.{norm}.{part}"
        for block in (1, 2, 3)
        for norm in ("norm1", "norm2")
        for part in ("weight", "bias")
    ]
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert list(timm_moe.moe_layers(model)) == ["blocks.0.mlp"]
    calls = []
    model.blocks[0].mlp.register_forward_hook(lambda *args: calls.append("mlp"))
    model.blocks[0].attn.register_forward_hook(lambda *args: calls.append("attn"))
    model(images)
    assert calls == ["attn", "mlp"] * 4


def test_gradients_add_up_over_the_blocks(images):
    """The gradient of what is shared is the sum over the blocks.

    It is compared with blocks that have equal weights of their own.
    """
    torch.manual_seed(0)
    shared = widenet(num_experts=0)
    own = timm.create_model(
        "vit_base_patch16_224", class_token=False, global_pool="avg", fc_norm=False, **SMALL
    )
    weights = shared.state_dict()
    own.load_state_dict(
        {
            name: weights.get(name, weights.get("blocks.0." + name.split(".", 2)[-1]))
            for name in own.state_dict()
        }
    )
    for model in (shared, own):
        model(images).square().sum().backward()
    for name in ("attn.qkv.weight", "mlp.fc1.weight", "mlp.fc2.bias"):
        total = sum(block.get_parameter(name).grad for block in own.blocks)
        torch.testing.assert_close(
            shared.blocks[0].get_parameter(name).grad, total, rtol=1e-4, atol=1e-5
        )


def test_losses_are_summed_over_the_blocks(images):
    model = widenet()
    terms = []
    model.blocks[0].mlp.router.register_forward_hook(
        lambda router, *args: terms.append(router.records[-1])
    )
    model(images)
    assert len(terms) == 4
    assert model.blocks[0].mlp.router.noise_std == 1.0
    loss = timm_moe.auxiliary_loss(model)
    torch.testing.assert_close(loss, 0.01 * sum(record.losses["balance_top_k"] for record in terms))
    assert 4 * 0.01 <= loss < 4 * 0.02


def test_capacity_is_rounded_down(images):
    router = widenet().blocks[0].mlp.router
    assert router._capacity(197 * 3) == math.floor(197 * 3 * 1.2 * 2 / 4)
    assert router.eval()._capacity(197 * 3) is None


def test_a_group_routes_once(images):
    model = widenet(routing_groups=2)
    assert list(timm_moe.moe_layers(model)) == ["blocks.0.0.mlp"]
    calls = []
    model.blocks[0][0].mlp.router.register_forward_hook(lambda *args: calls.append(1))
    model(images)
    assert len(calls) == 2
    assert len(model.blocks[0][0].mlp.router.records) == 2


@pytest.mark.parametrize(
    ("options", "routed"),
    [
        (dict(routing_groups=2), 2),
        ({}, 4),
        (dict(routing_groups=1, shared_expert=True, capacity_factor="none"), 1),
        (dict(router="top_k", top_k=1, routing_groups=4), 4),
    ],
)
def test_padding_is_left_out_in_every_block(images, options, routed):
    """Change the padding: loads, losses and outputs of tokens stay."""
    model = widenet(noise_std=0.0, global_pool="", **options)
    (layer,) = timm_moe.moe_layers(model).values()
    is_token = torch.arange(16) < torch.tensor([[16], [9]])
    results = []
    for value in (0.0, 9.0):
        model.zero_grad()
        x = images[:2].clone()
        x[1, :, 24:] = value  # the last four patches, which are padding
        y = model(x, attn_mask=is_token[:, None, None])[is_token]
        loads = [int(record.load.sum()) for record in layer.router.records]
        assert loads == [25 * layer.router.top_k] * routed
        loss = timm_moe.auxiliary_loss(model)
        (y.square().sum() + loss).backward()
        results.append((y, loss, layer.router.weight.grad, layer.fc2.weight.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_groups_with_padding_equal_blocks_with_padding(images):
    mask = (torch.arange(16) < torch.tensor([[16], [9]]))[:, None, None]
    for options in (
        {},
        dict(shared_expert=True),
        dict(routing_unit="image", class_token=True, global_pool="token"),
    ):
        plain, grouped = (
            widenet(noise_std=0.0, **options),
            widenet(noise_std=0.0, routing_groups=4, **options),
        )
        grouped.load_state_dict(
            {_grouped(name): value for name, value in plain.state_dict().items()}
        )
        given = nn.functional.pad(mask, (1, 0), value=True) if "class_token" in options else mask
        for masks in (given, given[1:]):  # of each image, and one for both
            torch.testing.assert_close(
                grouped(images[:2], attn_mask=masks), plain(images[:2], attn_mask=masks)
            )
    with pytest.raises(ValueError, match=r"padding.*blocks\.0\.0\.mlp .*group_images"):
        widenet(routing_groups=2, group_images=1)(images[:2], attn_mask=mask)


def test_groups_with_padding_take_wrapped_layers(images):
    model = widenet(noise_std=0.0, routing_groups=2)
    mask = (torch.arange(16) < torch.tensor([[16], [9]]))[:, None, None]
    expected = model(images[:2], attn_mask=mask)
    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, MoeMlp))
    torch.testing.assert_close(model(images[:2], attn_mask=mask), expected)


def test_as_many_groups_as_blocks_are_no_groups(images):
    plain, grouped = widenet(num_experts=4).eval(), widenet(routing_groups=4).eval()
    assert len(plain.state_dict()) == len(grouped.state_dict())
    grouped.load_state_dict({_grouped(k): v for k, v in plain.state_dict().items()})
    torch.testing.assert_close(grouped(images), plain(images))
    calls = []
    plain, grouped = (
        widenet(shared_expert=True).eval(),
        widenet(shared_expert=True, routing_groups=4).eval(),
    )
    grouped.load_state_dict({_grouped(name): value for name, value in plain.state_dict().items()})
    grouped.blocks[0][0].mlp.register_forward_hook(lambda *args: calls.append(1))
    torch.testing.assert_close(grouped(images), plain(images))
    assert len(calls) == 4
    one_choice, one_group = (
        widenet(num_experts=1, top_k=1).eval(),
        widenet(num_experts=1, top_k=1, routing_groups=1).eval(),
    )
    state = {_grouped(name, size=4): value for name, value in one_choice.state_dict().items()}
    one_group.load_state_dict(state)
    torch.testing.assert_close(one_group(images), one_choice(images))


def _grouped(name, size=1):
    """The name of a block's parameter in a model with groups of ``size`` blocks."""
    parts = name.split(".")
    if parts[0] != "blocks":
        return name
    block = int(parts[1])
    return ".".join(["blocks", str(block // size), str(block % size), *parts[2:]])


def test_official_compatibility_has_a_constant_class_token(images):
    model = widenet(official_compat=True)
    assert model.pos_embed.shape[1] == 17
    assert "cls_token" not in dict(model.named_parameters())
    assert not model.cls_token.any()
    assert "representation.fc.weight" in model.state_dict()
    tokens = model.eval().forward_features(images)
    pooled = torch.tanh(model.representation.fc(tokens.mean(1)))
    torch.testing.assert_close(model(images), model.head(pooled))


def test_the_constant_class_token_survives_the_meta_device(images):
    model = widenet(official_compat=True).eval()
    with torch.device("meta"):
        empty = widenet(official_compat=True).eval()
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    torch.testing.assert_close(empty(images), model(images))
    model.cls_token.data += 1
    model.init_weights()
    assert not model.cls_token.any()


@pytest.mark.parametrize("assign", [False, True])
def test_a_dense_checkpoint_in_a_model_on_meta_leaves_a_router_that_is_drawn(images, assign):
    dense, expected = timm.create_model("ones_b", **SMALL), widenet().eval()
    with torch.device("meta"):
        model = widenet().eval()
    if not assign:
        model.to_empty(device="cpu")
    assert model.load_state_dict(dense.state_dict(), assign=assign).missing_keys == []
    expected.load_state_dict(dense.state_dict())
    router = model.blocks[0].mlp.router
    assert router.weight.std().item() == pytest.approx(0.02, rel=0.5)
    expected.blocks[0].mlp.router.load_state_dict(router.state_dict())
    with torch.no_grad():
        assert torch.equal(model(images), expected(images))


def test_the_dense_student_of_ones_can_be_scripted(images):
    with set_scriptable(True):
        model = timm.create_model("ones_b", **SMALL).eval()
    torch.testing.assert_close(torch.jit.script(model)(images), model(images))


def test_shared_norms(images):
    model = widenet(shared_norm=True)
    assert not [name for name in model.state_dict() if name.startswith("blocks.1.")]
    model(images).sum().backward()
    assert model.blocks[0].norm1.weight.grad is not None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"routing_groups": 2},
        {"shared_norm": True},
        {"num_experts": 0},
        {"official_compat": True},
        {"balance": "bias"},
    ],
)
def test_saved_and_copied(tmp_path, images, options):
    model = widenet(**options).eval()
    expected = model(images)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = widenet(**options, checkpoint_path=str(tmp_path / "model.safetensors")).eval()
    torch.testing.assert_close(loaded(images), expected, rtol=0, atol=0)
    save_for_hf(
        model, str(tmp_path / "hub"), model_args={**SMALL, **options}, safe_serialization=True
    )
    assert set(load_file(tmp_path / "hub" / "model.safetensors")) == set(model.state_dict())
    from_folder = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()
    torch.testing.assert_close(from_folder(images), expected, rtol=0, atol=0)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(duplicate.state_dict()) == list(model.state_dict())
        torch.testing.assert_close(duplicate(images), expected, rtol=0, atol=0)


@pytest.mark.parametrize("wrapped", [(), Block, Attention, MoeMlp])
def test_weight_average_moves_every_tensor_once(wrapped):
    model, plain = widenet(balance="bias"), widenet(balance="bias")
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, wrapped))
    ema = ModelEmaV3(model, decay=0.5)
    before = copy.deepcopy(model.state_dict())
    assert list(before) == list(plain.state_dict())
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    ema.update(model)
    for name, value in ema.module.state_dict().items():
        torch.testing.assert_close(value, before[name] + 0.5)
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(before)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


def test_layer_decay_counts_what_is_shared_to_the_last_block():
    model = widenet()
    scales = {}
    for group in param_groups_layer_decay(
        model, weight_decay=0.1, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay()
    ):
        for parameter in group["params"]:
            scales[id(parameter)] = (group["lr_scale"], group["weight_decay"])
    named = {name: scales[id(parameter)] for name, parameter in model.named_parameters()}
    assert named["blocks.0.mlp.fc1.weight"] == named["blocks.0.attn.qkv.weight"]
    assert named["blocks.0.mlp.fc1.weight"][0] == named["blocks.3.norm1.weight"][0]
    assert named["blocks.0.norm1.weight"][0] < named["blocks.3.norm1.weight"][0]
    assert named["blocks.0.mlp.fc1.bias"][1] == 0


def test_layer_decay_with_groups():
    """Equals that without groups, which share a routing and do not change the depth."""
    scales = []
    for model in (widenet(), widenet(routing_groups=2)):
        groups = param_groups_layer_decay(model, layer_decay=0.5)
        of_each = {id(each): group["lr_scale"] for group in groups for each in group["params"]}
        scales.append({name: of_each[id(each)] for name, each in model.named_parameters()})
    plain, grouped = scales
    assert grouped == {_grouped(name, 2): scale for name, scale in plain.items()}
    assert plain["blocks.1.norm1.weight"] < plain["blocks.2.norm1.weight"]


def test_the_optimizer_of_the_paper_trains_shared_parameters_once(images):
    model = widenet(noise_std=0)
    (model(images).sum() + timm_moe.auxiliary_loss(model)).backward()
    optimizer = create_optimizer_v2(model, opt="lamb", lr=0.01, weight_decay=0.1)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(model.parameters())
    )
    optimizer.step()


def test_groups_have_the_drop_path_and_the_layer_scale_of_blocks(images):
    options = dict(noise_std=0.0, drop_path_rate=0.5, init_values=0.5)
    plain, grouped = widenet(**options), widenet(routing_groups=4, **options)
    grouped.load_state_dict({_grouped(name): value for name, value in plain.state_dict().items()})
    outputs = []
    for model in (plain, grouped):
        torch.manual_seed(1)  # The same paths are dropped.
        outputs.append(model(images))
    torch.testing.assert_close(*outputs)


def test_drop_path_grows_with_the_block():
    rates = [
        getattr(block.drop_path1, "drop_prob", 0.0) for block in widenet(drop_path_rate=0.3).blocks
    ]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])


def test_features(images):
    model = widenet(num_experts=2).eval()
    _, features = model.forward_intermediates(images)
    assert [tuple(feature.shape) for feature in features] == [(6, 32, 4, 4)] * 4
    backbone = timm.create_model("widenet_b", features_only=True, **SMALL)
    assert [tuple(feature.shape) for feature in backbone(images)] == [(6, 32, 4, 4)] * 3
    grouped = timm.create_model(
        "widenet_b", features_only=True, routing_groups=2, out_indices=(0, 1), **SMALL
    )
    assert [tuple(feature.shape) for feature in grouped(images)] == [(6, 32, 4, 4)] * 2


@pytest.mark.parametrize(
    "options", [{}, {"routing_groups": 2}, {"shared_norm": True}, {"official_compat": True}]
)
def test_to_dense_is_the_model_without_experts(tmp_path, images, options):
    model = widenet(**options).eval()
    dense = timm_moe.to_dense(model).eval()
    kept = {name: value for name, value in options.items() if name != "routing_groups"}
    fresh = widenet(num_experts=0, **kept).eval()
    assert type(dense) is type(fresh)
    fresh.load_state_dict(dense.state_dict())
    torch.testing.assert_close(fresh(images), dense(images))
    upcycled = widenet(**kept, num_experts=2, capacity_factor="none").eval()
    upcycled.load_state_dict(dense.state_dict())  # with K = E the gates sum to 1
    torch.testing.assert_close(upcycled(images), dense(images), rtol=1e-4, atol=1e-5)
    export = timm_moe.export_dense(model, tmp_path / "dense")
    torch.testing.assert_close(
        timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()(images), dense(images)
    )


def test_within_another_model_each_shared_tensor_is_saved_once():
    whole = nn.Sequential(widenet())
    state = whole.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    whole.load_state_dict(state)


def test_the_features_of_groups_are_named():
    model = widenet(routing_groups=2)
    assert [feature["module"] for feature in model.feature_info] == ["blocks.0", "blocks.1"]


def test_a_checkpoint_with_own_weights_is_refused():
    own = timm.create_model(
        "vit_base_patch16_224", class_token=False, global_pool="avg", fc_norm=False, **SMALL
    )
    with pytest.raises(RuntimeError, match=r"blocks\.1\..*shares with blocks\.0"):
        widenet().load_state_dict(own.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(routing_groups=3), r"routing_groups .*4 blocks, .* 3\."),
        (dict(routing_groups=0), r"routing_groups .*4 blocks, .* 0\."),
        (dict(routing_groups=2.0), "routing_groups must be an integer"),
        (dict(official_compat="yes"), "official_compat .*True or False, .*'yes'"),
        (dict(shared_norm="false"), "shared_norm .*True or False, .*'false'"),
        (dict(zero_class_token="no"), "zero_class_token .*True or False, .*'no'"),
        (dict(zero_class_token=True), "zero_class_token=True needs a class token"),
        (dict(moe_layers="last-2"), "no moe_layers"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        widenet(**options)


def slow_divergence(blocks):
    """Equation 9, term by term."""
    width = len(blocks[0])
    return [
        sum(
            abs(own[i] - x)
            for j, own in enumerate(blocks)
            for n, other in enumerate(blocks)
            if n != j
            for x in other
        )
        / (width * len(blocks) ** 2)
        for i in range(width)
    ]


@settings(max_examples=40)
@given(blocks=st.integers(2, 4), width=st.integers(1, 5), groups=st.booleans(), data=st.data())
def test_the_divergence_of_norms_is_equation_9(blocks, width, groups, data):
    scale = st.sampled_from([-1.5, 0.0, 0.25, 1.0, 3.0])  # equal ones too
    values = data.draw(
        st.lists(st.lists(scale, min_size=width, max_size=width), min_size=blocks, max_size=blocks)
    )
    made = [nn.ModuleDict({"norm2": nn.LayerNorm(width)}) for _ in range(blocks)]
    for block, row in zip(made, values, strict=True):
        block["norm2"].weight.data = torch.tensor(row)
    model = nn.ModuleDict(
        {"blocks": nn.Sequential(nn.Sequential(*made)) if groups else nn.Sequential(*made)}
    )
    divergence = norm_divergence(model)
    assert list(divergence) == ["norm2.weight", "norm2.bias"]
    assert divergence["norm2.weight"].tolist() == pytest.approx(slow_divergence(values), abs=1e-12)
    assert divergence["norm2.bias"].tolist() == [0] * width


@pytest.mark.ci
def test_info_tells_the_divergence_of_a_checkpoints_norms(tmp_path, capsys):
    # A ViT, which the paper compares with, has no experts at all.
    names = ("ones_h", "vit_tiny_patch16_224")
    for index, made in enumerate(timm.create_model(name, **SMALL) for name in names):
        for name, parameter in made.named_parameters():
            if "norm" in name:
                nn.init.normal_(parameter, std=0.1 * (index + 1))
        save_for_hf(made, str(tmp_path / str(index)), safe_serialization=True)
        assert main(["info", str(tmp_path / str(index))]) == 0
        expected = norm_divergence(made)
        blocks = [
            norm.weight.tolist() for name, norm in made.named_modules() if name.endswith("norm2")
        ]
        assert expected["norm2.weight"].tolist() == pytest.approx(slow_divergence(blocks))
        told = ", ".join(f"{name} {value.mean():.4g}" for name, value in expected.items())
        assert f"LayerNorm divergence   {told} (WideNet, eq. 9)\n" in capsys.readouterr().out
    shared = timm.create_model("ones_h", shared_norm=True, **SMALL)
    save_for_hf(shared, str(tmp_path / "shared"), safe_serialization=True)
    assert main(["info", str(tmp_path / "shared")]) == 0
    assert main(["info", "vit_xtiny"]) == 0  # without weights
    assert "eq. 9" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("widenet_b", {**SMALL, "shared_norm": True}, "WideNet share their norm1"),
        ("resnet18", {}, "ResNet .*layer norms"),
        ("vit_tiny_patch16_224", {**SMALL, "depth": 1}, "VisionTransformer .*layer norms"),
    ],
)
def test_norms_that_cannot_be_compared(name, options, message):
    with pytest.raises(ValueError, match=message):
        norm_divergence(timm.create_model(name, **options))


@pytest.mark.parametrize("has_experts", [True, False])
def test_a_block_that_shares_no_more_keeps_its_weights(has_experts):
    """A fine-tuning may copy the last block, or leave out the first."""
    models = [widenet() if has_experts else widenet(num_experts=0) for _ in range(2)]
    for model in models:
        model.blocks[-1].attn = copy.deepcopy(model.blocks[-1].attn)
        nn.init.normal_(model.blocks[-1].attn.qkv.weight)
        model.blocks = model.blocks[1:]
    state = models[0].state_dict()
    assert sum(value.numel() for value in state.values()) == sum(
        parameter.numel() for parameter in models[0].parameters()
    )
    models[1].load_state_dict(state)
    torch.testing.assert_close(models[1].state_dict(), state, rtol=0, atol=0)
