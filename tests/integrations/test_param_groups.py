"""Stacked parameters in timm's optimizers.

Groups are by name as in the dense model, and updates are those of E networks.
"""

import logging

import pytest
import timm
import timm.optim  # create_optimizer_v2 is taken from it at each call, as train.py finds it
import torch
from common import SMALL_VIT
from torch import nn

from timm_moe import convert_to_moe, moe_layers

EVA = dict(
    img_size=32,
    patch_size=8,
    embed_dim=32,
    depth=3,
    num_heads=2,
    num_classes=5,
    scale_mlp=True,
    swiglu_mlp=True,
)
WIDENET = dict(**SMALL_VIT, mlp_ratio=2)
#: A model with experts, and the dense one whose groups it must follow.
PAIRS = {
    "ewa": lambda: (
        timm.create_model("vit_tiny_ewa_moe", init_values=0.1, **SMALL_VIT),
        timm.create_model("vit_tiny_patch16_224", init_values=0.1, **SMALL_VIT),
    ),
    "v-moe": lambda: (
        timm.create_model("vmoe_s32", **SMALL_VIT),
        timm.create_model("vit_tiny_patch16_224", **SMALL_VIT),
    ),
    "shared expert": lambda: (
        timm.create_model("vimoe_s14_shared", **SMALL_VIT),
        timm.create_model("vit_small_patch14_dinov2", **SMALL_VIT),
    ),
    "ensemble": lambda: (
        timm.create_model("vmoe_pbe_s32", num_experts=4, **SMALL_VIT),
        timm.create_model("vit_tiny_patch16_224", **SMALL_VIT),
    ),
    "widenet": lambda: (
        timm.create_model("widenet_b", **WIDENET),
        timm.create_model("widenet_b", num_experts=0, **WIDENET),
    ),
    "converted": lambda: (
        convert_to_moe(timm.create_model("deit_tiny_patch16_224", **SMALL_VIT), num_experts=3),
        timm.create_model("deit_tiny_patch16_224", **SMALL_VIT),
    ),
    "converted, with a norm in each expert": lambda: (
        convert_to_moe(timm.create_model("eva02_tiny_patch14_224", **EVA), moe_layers="every-1"),
        timm.create_model("eva02_tiny_patch14_224", **EVA),
    ),
    "converted, inside another model": lambda: (
        nn.Sequential(
            convert_to_moe(timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)), nn.Linear(5, 5)
        ),
        nn.Sequential(timm.create_model("vit_tiny_patch16_224", **SMALL_VIT), nn.Linear(5, 5)),
    ),
}


def settings(model, opt, layer_decay, **options):
    """Weight decay and scale of the learning rate of each parameter by name."""
    optimizer = timm.optim.create_optimizer_v2(
        model, opt, lr=0.1, weight_decay=0.05, layer_decay=layer_decay, **options
    )
    of = {
        id(p): (g["weight_decay"], g.get("lr_scale", 1.0))
        for g in optimizer.param_groups
        for p in g["params"]
    }
    return {name: of[id(parameter)] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layer_decay", [None, 0.75])
@pytest.mark.parametrize("opt", ["adamw", "muon", "lookahead_adamw", "sgd", "lamb", "lion"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.first_case
def test_groups_are_those_of_the_dense_model(pair, opt, layer_decay):
    experts, dense = PAIRS[pair]()
    found, expected = settings(experts, opt, layer_decay), settings(dense, opt, layer_decay)
    assert {name: found[name] for name in expected} == expected
    # Routers are matrices, shared experts are networks, both of their block.
    for name in set(found) - set(expected):
        block = name.rsplit(".mlp.", 1)[0]
        kind = "bias" if name.endswith("bias") else "weight"
        assert found[name] == expected[f"{block}.mlp.fc1.{kind}"], name


@pytest.mark.parametrize("layer_decay", [None, 0.75])
@pytest.mark.parametrize("pair", PAIRS)
def test_biases_decay_where_the_dense_models_do(pair, layer_decay):
    experts, dense = PAIRS[pair]()
    found, expected = (
        settings(model, "adamw", layer_decay, filter_bias_and_bn=False)
        for model in (experts, dense)
    )
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("excludes_1d", [True, False])
@pytest.mark.parametrize("group", ["param_groups_weight_decay", "param_groups_layer_decay"])
def test_timms_functions_of_groups_know_the_experts_biases(group, excludes_1d):
    experts, dense = PAIRS["converted, inside another model"]()

    def decays(model):
        groups = getattr(timm.optim, group)(model, 0.05, weight_decay_exclude_1d=excludes_1d)
        of = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
        return {name: of[id(parameter)] for name, parameter in model.named_parameters()}

    assert decays(experts) == decays(dense)


def test_the_models_own_method_decides():
    model = convert_to_moe(timm.create_model("vit_tiny_patch16_224", **SMALL_VIT))
    model.no_weight_decay = lambda: {"head.weight"}  # an owner's
    found = settings(model, "sgd", 0.5)
    assert found["head.weight"][0] == found["blocks.1.mlp.fc1.bias"][0] == 0
    assert model.no_weight_decay() == {"head.weight"}


def test_a_compiled_model_and_parameters_without_a_model():
    model = convert_to_moe(timm.create_model("vit_tiny_patch16_224", **SMALL_VIT))
    found = settings(torch.compile(model, backend="eager"), "muon", 0.5)
    assert found["_orig_mod.blocks.1.mlp.fc1.bias"][0] == 0
    assert found["_orig_mod.blocks.1.mlp.fc1.weight"][0] == 0.05
    assert (
        len(timm.optim.create_optimizer_v2(model.parameters(), "adamw", lr=0.1).param_groups) == 1
    )


# --- Muon


@pytest.mark.parametrize("opt", ["muon", "nmuon", "adamuon", "lookahead_muon"])
@pytest.mark.parametrize("layer_decay", [None, 0.75])
def test_muon_leaves_the_experts_to_its_fallback(opt, layer_decay, caplog):
    model = timm.create_model("vit_tiny_ewa_moe", share_rate=0, **SMALL_VIT)
    with caplog.at_level(logging.INFO):
        optimizer = timm.optim.create_optimizer_v2(
            model, opt, lr=0.1, weight_decay=0.05, layer_decay=layer_decay, fallback_list=["head.*"]
        )
    assert caplog.text.count("Muon leaves the experts to its fallback") == 1
    fallback = {
        id(p)
        for group in optimizer.param_groups
        if group.get("use_fallback")
        for p in group["params"]
    }
    names = {name for name, parameter in model.named_parameters() if id(parameter) in fallback}
    experts = {
        f"blocks.{b}.mlp.fc{i}.{kind}"
        for b in (1, 3)
        for i in (1, 2)
        for kind in ("weight", "bias")
    }
    assert names == experts | {"head.weight", "head.bias"}


def update_of_muon(make):
    """Make an optimizer for a model; return a step of an expert's stacked biases, and AdamW's."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_ewa_moe", expert_init="same", share_rate=0, **SMALL_VIT)
    bias = moe_layers(model)["blocks.1.mlp"].fc1.bias
    optimizer = make(model)
    before = bias.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return bias.detach() - before, -0.01 * bias.grad.sign()


#: What create_optimizer_v2 may be given.
GIVEN = {
    "a model": lambda model: model,
    "parameters": lambda model: model.parameters(),
    "named parameters": lambda model: list(model.named_parameters()),
    "groups": lambda model: timm.optim.param_groups_weight_decay(model, 0.05),
    "a group of experts": lambda model: [
        {"params": [layer.fc1.bias]} for layer in moe_layers(model).values()
    ],
}


@pytest.mark.parametrize("given", list(GIVEN))
@pytest.mark.parametrize("opt", ["muon", "lookahead_muon"])
def test_muons_update_of_an_expert_is_adamws(given, opt, caplog):
    with caplog.at_level(logging.INFO):
        update, of_adamw = update_of_muon(
            lambda model: timm.optim.create_optimizer_v2(GIVEN[given](model), opt, lr=0.01)
        )
    torch.testing.assert_close(update, of_adamw, rtol=1e-3, atol=1e-6)
    assert caplog.text.count("Muon leaves the experts to its fallback") == 1


def test_muons_rule_by_shape_takes_the_stacked_biases_for_a_matrix():
    update, of_adamw = update_of_muon(
        lambda model: timm.optim.Muon(model.parameters(), lr=0.01, weight_decay=0.1)
    )
    assert (update.abs() - of_adamw.abs()).abs().max() > 0.005


@pytest.mark.parametrize("opt", ["muon", "Muon"])
def test_every_process_leaves_the_experts_to_the_fallback(opt, monkeypatch, caplog):
    """The first process alone says so, but all train the same weights."""
    monkeypatch.setattr("timm_moe.integrations.timm.is_primary", lambda: False)
    model = timm.create_model("vit_tiny_ewa_moe", share_rate=0, **SMALL_VIT)
    with caplog.at_level(logging.INFO):
        optimizer = timm.optim.create_optimizer_v2(model, opt, lr=0.1)
    left = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("use_fallback")
        for parameter in group["params"]
    }
    assert {id(layer.fc1.bias) for layer in moe_layers(model).values()} <= left
    assert caplog.messages == []


def test_muon_keeps_the_names_of_parameters_in_their_groups():
    model = timm.create_model("vit_tiny_ewa_moe", share_rate=0, **SMALL_VIT)
    optimizer = timm.optim.create_optimizer_v2(list(model.named_parameters()), "muon", lr=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        assert group["param_names"] == [names[id(parameter)] for parameter in group["params"]]


def test_a_group_that_says_who_trains_it_stays():
    model = timm.create_model("vit_tiny_ewa_moe", share_rate=0, **SMALL_VIT)
    given = {"params": model.blocks[1].parameters(), "use_fallback": False}
    optimizer = timm.optim.create_optimizer_v2([given], "muon", lr=0.1)
    assert [group["use_fallback"] for group in optimizer.param_groups] == [False]


def test_muon_keeps_options_and_other_parameters_of_the_groups_that_it_gets():
    model = timm.create_model("vit_tiny_ewa_moe", share_rate=0, **SMALL_VIT)
    parts = {"no": model.blocks[1], "yes": model.blocks[3], "told": model.head}
    optimizer = timm.optim.create_optimizer_v2(
        [
            {"params": parts["no"].parameters(), "lr": 0.3},
            {"params": parts["yes"].parameters(), "use_muon": True},
            {"params": parts["told"].parameters()},
        ],
        "muon",
        lr=0.1,
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    *given, added = optimizer.param_groups
    assert [len(group["params"]) for group in given] == [8, 12, 2]
    assert {names[id(p)] for p in added["params"]} == {
        f"blocks.1.mlp.fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
    }
    assert (added["lr"], added["use_fallback"]) == (0.3, True)
    assert not any("use_fallback" in group for group in given)


# --- the table in docs/train.md

EXACT = ["adamw", "sgd", "lion", "nadamw", "adopt", "radam", "rmsprop", "lookahead_adamw"]
PER_TENSOR = ["lamb", "lars", "adamp", "novograd", "mars", "adafactor", "cadamw"]
DAILY = ("adamw", "lamb", "adafactor")


def optimizers(names):
    """Return cases of timm's optimizers, whose code is tested there: all but a few for ci."""
    return [pytest.param(name, marks=[] if name in DAILY else pytest.mark.ci) for name in names]


def updates_together_and_apart(opt, shape, scale):
    """Return the largest difference between two optimizers after 3 steps.

    One has stacked tensors, the other as many single ones.
    """
    torch.manual_seed(0)
    start = torch.randn(4, *shape) * torch.as_tensor(scale).view(4, *(1 for _ in shape))
    stacked, single = nn.Parameter(start.clone()), [nn.Parameter(part.clone()) for part in start]
    optimizers = [
        timm.optim.create_optimizer_v2([dict(params=parameters, weight_decay=0.1)], opt, lr=0.01)
        for parameters in ([stacked], single)
    ]
    for _ in range(3):
        stacked.grad = torch.randn_like(start)
        for part, gradient in zip(single, stacked.grad, strict=True):
            part.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    return (stacked - torch.stack(single)).abs().max().item()


@pytest.mark.parametrize("opt", optimizers(EXACT))
def test_elementwise_optimizers_train_each_expert_as_a_network_of_its_own(opt):
    assert updates_together_and_apart(opt, (64, 32), [1.0, 2.0, 3.0, 4.0]) < 1e-6
    assert updates_together_and_apart(opt, (64,), [1.0, 2.0, 3.0, 4.0]) < 1e-6


@pytest.mark.parametrize("opt", optimizers(PER_TENSOR))
def test_others_have_numbers_that_the_experts_share(opt):
    assert updates_together_and_apart(opt, (64, 32), [1.0, 2.0, 3.0, 4.0]) > 1e-5


def test_lambs_trust_ratio_is_an_experts_own_while_their_norms_agree():
    def first_updates(scale):
        stacked = (
            torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))
            * torch.tensor(scale)[:, None, None]
        )
        parameter = nn.Parameter(stacked.clone())
        parameter.grad = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(1))
        timm.optim.create_optimizer_v2(
            [dict(params=[parameter], weight_decay=0.1)], "lamb", lr=0.01
        ).step()
        return (parameter.detach() - stacked).flatten(1).norm(dim=1), stacked.flatten(1).norm(dim=1)

    updates, norms = first_updates([1.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(updates, 0.01 * norms, rtol=0.05, atol=0)
    updates, norms = first_updates([0.1, 1.0, 1.0, 1.0])
    # Not 0.01 * norms[0].
    torch.testing.assert_close(updates[0], 0.01 * norms.square().mean().sqrt(), rtol=0.1, atol=0)


def test_no_dense_parameter_is_taken_for_an_experts():
    """The hook leaves a dense model's call as it is."""
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    optimizer = timm.optim.create_optimizer_v2(dense, "muon", lr=0.1, weight_decay=0.1)
    assert not any("use_fallback" in group for group in optimizer.param_groups)
