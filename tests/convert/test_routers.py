"""Routers plug in by a registered name, a spec or a callable.

Nothing of the package is edited.
"""

import copy
import inspect
import pickle
import re
import warnings
from dataclasses import asdict

import pytest
import timm
import torch
from common import OPTIONS, ROOT, SMALL_VIT, drawn_choices
from families import SMALL
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_code
from timm.layers import Mlp
from torch import nn

import timm_moe
from timm_moe.analysis.info import measure, model_info
from timm_moe.convert import registry
from timm_moe.convert.built_in_routers import TopKOptions
from timm_moe.convert.find import find_networks
from timm_moe.layers import MoeMlp, RecordingRouter, Router, SharedExpertMlp, TopKRouter, routing_to


class Modulo(Router):
    """Row i goes to the experts i, i + step, ... of E; for tests."""

    def __init__(self, dim, num_experts, step=1, choices=1):
        super().__init__(num_experts)
        self.step, self.choices = step, choices
        self.scale = nn.Parameter(torch.ones(num_experts))

    def experts_of_row(self):
        return self.choices

    def forward(self, x):
        rows = x.shape[:-1].numel()
        expert_TK = torch.arange(rows, device=x.device)[:, None] + self.step * torch.arange(
            self.choices, device=x.device
        )
        return routing_to(
            expert_TK % self.num_experts, self.scale[expert_TK % self.num_experts], self.num_experts
        )


class Plain(Router):
    """A router that overrides nothing, with weights that nothing can begin anew."""

    def __init__(self, dim, num_experts):
        super().__init__(num_experts)
        self.linear = nn.Linear(dim, num_experts)

    def forward(self, x):
        weight_TK, expert_TK = self.linear(x.flatten(0, -2)).softmax(1).max(1, keepdim=True)
        return routing_to(expert_TK, weight_TK, self.num_experts)


EXAMPLE = ROOT / "examples/own_router.py"
SPEC = timm_moe.RouterSpec("modulo", Modulo, {"step": 1, "choices": 1})


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    return timm_moe.register_router(SPEC)


def test_a_registered_router_is_an_option_of_every_model(registered, images):
    model = timm.create_model(
        "vit_tiny_ewa_moe", router="modulo", step=3, choices=2, num_experts=4, **SMALL_VIT
    )
    layer = model.blocks[1].mlp
    assert (type(layer), type(layer.router), layer.router.step) == (MoeMlp, Modulo, 3)
    assert layer.share_rate == 0
    model(images).sum().backward()
    assert (layer.router.scale.grad != 0).all()
    measured = model_info("vit_tiny_ewa_moe", router="modulo", choices=2, num_experts=4)
    once = model_info("vit_tiny_ewa_moe", router="modulo", choices=1, num_experts=4)
    assert (measured.experts_of_row, once.experts_of_row) == ("2", "1")
    assert (measured.routing_unit, measured.exported) == ("token", None)
    assert measured.gflops > 1.2 * once.gflops  # half of the networks are computed twice
    assert measured.activated > once.activated


def test_the_card_names_the_module_of_the_router_and_no_paper(registered, monkeypatch):
    options = dict(router="modulo", choices=2, num_experts=4)
    model = timm.create_model("vit_tiny_ewa_moe", **options, **SMALL_VIT)
    told = {**OPTIONS, **options}
    card = timm_moe.push_moe(model, "user/w", dry_run=True, model_args=told).card
    assert f"the module `{Modulo.__module__}`, whose import registers its router" in card
    assert "bibtex" not in card
    monkeypatch.setattr(Modulo, "__module__", "__main__")
    card = timm_moe.push_moe(model, "user/w", dry_run=True, model_args=told).card
    assert "beside timm, and the program that registers its router:" in card


def test_operations_are_those_of_an_even_spread():
    few, many = (model_info("vit_tiny_moe", num_experts=number).gflops for number in (3, 5))
    # Of the routers alone, in six layers.
    assert many - few == pytest.approx(2 * 192 * 2 * 197 * 6 / 1e9)


def test_a_model_with_a_routed_layer_is_evaluated_with_its_experts(dense_vit):
    model = timm_moe.convert_to_moe(dense_vit, moe_layers="1")
    timm_moe.convert_to_moe(model, moe_layers="3", router="top_k", top_k=2)
    info = measure(model.to("meta"), "mixed")
    assert info.exported is None
    assert (
        set(timm_moe.moe_layers(model)) == set(info.moe_layers) == {"blocks.1.mlp", "blocks.3.mlp"}
    )


def test_a_spec_and_a_callable_need_no_name(dense_vit, images):
    model = timm_moe.convert_to_moe(
        dense_vit, router=SPEC, moe_layers="1", step=2, shared_expert=True
    )
    assert type(model.blocks[1].mlp) is SharedExpertMlp
    timm_moe.convert_to_moe(model, router=Plain, moe_layers="3", num_experts=3)
    assert type(model.blocks[3].mlp.router) is Plain
    assert model(images).isfinite().all()
    assert pickle.loads(pickle.dumps(model.blocks[3].mlp)).num_experts == 3
    assert isinstance(timm_moe.to_dense(model, "sum"), type(model))


def test_what_is_no_router_is_refused(dense_vit):
    for router, name in ((nn.Linear, "Linear"), (lambda dim, num_experts: None, "NoneType")):
        with pytest.raises(TypeError, match=rf"timm_moe\.layers\.Router, .*{name}"):
            timm_moe.convert_to_moe(dense_vit, router=router, num_experts=3)


def test_a_router_follows_the_network_in_place_and_type(dense_vit):
    model = timm_moe.convert_to_moe(dense_vit.to(torch.bfloat16), router=Plain)
    assert {parameter.dtype for parameter in model.blocks[1].mlp.router.parameters()} == {
        torch.bfloat16
    }
    with torch.device("meta"):
        meta = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    timm_moe.convert_to_moe(meta, router=Plain)
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_weights_that_cannot_begin_anew_are_told():
    model = timm.create_model("vit_tiny_ewa_moe", router=Plain, **SMALL_VIT)
    with pytest.raises(RuntimeError, match=r"Plain .*reset_parameters\(\)"):
        model.init_weights()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"router": "modulo", "top_k": 2},
            ValueError,
            "top_k .*router='top_k', .*router='modulo'",
        ),
        (
            {"router": "top_k", "step": 2},
            ValueError,
            "step .*router='modulo', .*router='top_k'",
        ),
        ({"router": "modulo", "stepp": 2}, TypeError, "unexpected keyword argument 'stepp'"),
        (
            {"router": "position"},
            ValueError,
            "top_k, expert_choice, soft, .*modulo.*'position'.*register_router",
        ),
        (
            {"router": "modulo", "shared_init": "zero_out"},
            ValueError,
            "shared_init='zero_out' .*shared_expert=True",
        ),
    ],
)
def test_what_does_not_go_together_leaves_the_model_as_it_was(
    registered, dense_vit, options, error, message
):
    with pytest.raises(error, match=message):
        timm_moe.convert_to_moe(dense_vit, **options)
    assert not timm_moe.moe_layers(dense_vit)


def test_names_and_options_of_the_package_are_not_taken(registered, dense_vit):
    with pytest.raises(ValueError, match="'top_k' is a router of timm_moe"):
        timm_moe.register_router(timm_moe.RouterSpec("top_k", Modulo))
    # A cell of a notebook may run twice.
    timm_moe.register_router(timm_moe.RouterSpec("modulo", Modulo, {"step": 2}))
    model = timm_moe.convert_to_moe(dense_vit, router="modulo", moe_layers="1")
    assert model.blocks[1].mlp.router.step == 2
    for name in ("modules", "num_experts", "model", "dim"):
        with pytest.raises(ValueError, match=f"{name} .*every router, .*'other'"):
            timm_moe.register_router(timm_moe.RouterSpec("other", Modulo, {name: 1}))


def test_an_option_that_is_an_argument_of_the_model_is_refused_only_where_it_is_used(registered):
    timm_moe.register_router(timm_moe.RouterSpec("heads", Modulo, {"num_heads": 12}))
    assert timm.create_model("vit_small_ewa_moe").blocks[0].attn.num_heads == 6
    assert timm.create_model("vit_tiny_ewa_moe", num_heads=12).blocks[0].attn.num_heads == 12
    with pytest.raises(ValueError, match=r"num_heads .*router .*VisionTransformer"):
        timm.create_model("vit_small_ewa_moe", router="heads")


def test_a_routing_of_wrong_shapes_is_refused():
    for expert, weight in (
        (torch.zeros(4).long(), torch.ones(4)),
        (torch.zeros(4, 1), torch.ones(4, 1)),
    ):
        with pytest.raises(ValueError, match=r"one shape \(T, K\)"):
            routing_to(expert, weight, 2)
    with pytest.raises(ValueError, match="of one shape"):
        routing_to(torch.zeros(4, 1).long(), torch.ones(4, 2), 2)


@settings(max_examples=40)
@given(rows=st.integers(1, 30), experts=st.integers(1, 6), data=st.data())
def test_routing_to_sends_every_row_to_its_experts(rows, experts, data):
    choices = data.draw(st.integers(1, experts))
    expert_TK, weight_TK = drawn_choices(rows, experts, choices)
    routing = routing_to(expert_TK, weight_TK, experts)
    assert routing.offsets[-1] == rows * choices
    expert_of_place = torch.bucketize(torch.arange(rows * choices), routing.offsets, right=True)
    assert torch.equal(expert_of_place[routing.slots], expert_TK)
    assert torch.equal(
        routing.token_indices[routing.slots], torch.arange(rows)[:, None].expand(rows, choices)
    )
    assert torch.equal(routing.gates, weight_TK)


def test_a_router_that_chooses_more_experts_than_it_states_is_refused():
    router = Modulo(8, 4, choices=2)
    layer = MoeMlp(Mlp(8, 16), router)
    layer(torch.randn(3, 8))
    router.experts_of_row = lambda: 1
    with pytest.raises(ValueError, match=r"to 2 experts.* says 1: .*Modulo\.experts_of_row"):
        layer(torch.randn(3, 8))


def test_what_a_router_does_not_state():
    assert (Router(6).experts_of_row(), Router(6).routing_degree(), Router(6).routing_unit) == (
        1,
        6,
        "token",
    )
    assert TopKRouter(8, 6, 2).routing_degree() == 15


def test_options_of_a_registered_router_may_be_stated_by_files():
    code = f"""
import runpy
from timm_moe.checkpoints.description import architecture_arguments, check_arguments
assert "target" not in architecture_arguments("vit_small_ewa_moe")
stated = dict(target=0.4, router="sparse_gate")
try:
    check_arguments("vit_small_ewa_moe", stated, "a file")
except ValueError as error:
    print(error)
runpy.run_path({str(EXAMPLE)!r}, run_name="own_router")
check_arguments("vit_small_ewa_moe", stated, "a file")
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    assert re.search("a file: router .*'sparse_gate'.*timm_moe.register_router", done.stdout)


UNTRAINED = {
    "one of them, renormalised": dict(gate_mode="renorm", aux_loss_weight=0),
    "without a gate": dict(gate_mode="one", aux_loss_weight=0, top_k=2),
    "by a bias and the loss about large logits": dict(
        gate_mode="renorm", balance="bias", z_loss_weight=0.001
    ),
    "of an image": dict(gate_mode="renorm", aux_loss_weight=0.0, routing_unit="image"),
}
TRAINED = {
    "by its loss": dict(gate_mode="renorm"),
    "by its gates": dict(aux_loss_weight=0),
    "by the gates of two": dict(gate_mode="renorm", top_k=2, aux_loss_weight=0),
    "without a choice": dict(gate_mode="one", top_k=4, aux_loss_weight=0),
}


@pytest.mark.parametrize("how", UNTRAINED)
def test_a_router_that_nothing_would_train_is_named(how):
    with pytest.warns(UserWarning, match="top_k=.*aux_loss_weight.*gate_mode='prob'"):
        timm_moe.convert_to_moe(
            timm.create_model("vit_tiny_patch16_224", **SMALL_VIT), router="top_k", **UNTRAINED[how]
        )


@pytest.mark.parametrize("how", TRAINED)
def test_a_router_that_something_trains_is_not(how):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timm_moe.convert_to_moe(
            timm.create_model("vit_tiny_patch16_224", **SMALL_VIT), router="top_k", **TRAINED[how]
        )


@pytest.mark.parametrize("name", dict.fromkeys(["mobilevit_xxs", "tnt_s_patch16_224", *SMALL]))
@pytest.mark.first_case
def test_routers_of_images_refuse_what_gets_parts_of_images(name):
    """A real forward tells which networks get other than one entry for each image."""
    model = timm.create_model(name, num_classes=4, **SMALL[name]).eval()
    networks, entries = list(find_networks(model).items()), {}
    for path, network in networks:
        if isinstance(network, nn.Module):
            network.register_forward_pre_hook(
                lambda _, given, path=path: entries.update({path: len(given[0])})
            )
    size = 224 if name == "efficientformer_l3" else SMALL[name].get("img_size", 64)
    with torch.no_grad():
        model(torch.randn(3, 3, size, size))
    refused = {path for path, number in entries.items() if number != 3}
    assert bool(refused) == (name in ("mobilevit_xxs", "tnt_s_patch16_224"))
    for number, (path, _) in enumerate(networks):
        for options in (
            dict(router="soft"),
            dict(router="expert_choice"),
            dict(router="top_k", group_images=1),
        ):
            if path in refused:
                with pytest.raises(ValueError, match=f"whole images.* {path} .*moe_layers"):
                    timm_moe.convert_to_moe(model, 2, str(number), **options)
    assert not timm_moe.moe_layers(model)
    whole = [
        str(number)
        for number, (path, _) in enumerate(networks)
        if path in entries and path not in refused
    ]
    for options in [dict(router="soft", moe_layers=whole)] * bool(whole) + [
        dict(router="top_k", moe_layers="tail-1")
    ]:
        timm_moe.convert_to_moe(copy.deepcopy(model), 2, **options)


def test_parts_of_images_of_transformers():
    transformers = pytest.importorskip("transformers")
    model = transformers.MobileViTModel(
        transformers.MobileViTConfig(hidden_sizes=[16, 16, 16], num_hidden_layers=1)
    )
    with pytest.raises(ValueError, match=r"whole images.*another router"):
        timm_moe.convert_to_moe(model, router="soft")
    assert timm_moe.moe_layers(timm_moe.convert_to_moe(model, router="top_k"))


def test_options_that_the_router_takes_too_have_its_defaults():
    options = asdict(TopKOptions())
    for name, parameter in inspect.signature(TopKRouter).parameters.items():
        if name not in ("dim", "num_experts", "loss_weights", "bias_rate"):
            assert options[name] == parameter.default, name


class WithOwnLoss(TopKRouter):
    """Top-1 routing with a loss of the logits' mean square."""

    own_losses = ("square",)

    def extra_losses(self, logits_GSE, gate_GSE):
        return {"square": logits_GSE.square().mean((1, 2))}


def test_a_subclass_of_top_k_adds_a_loss_of_its_own():
    router = WithOwnLoss(8, 4, loss_weights={"square": 0.5, "balance": 0.01})
    layer = MoeMlp(Mlp(8, 16), router)
    x = torch.randn(2, 5, 8)
    layer(x)
    (record,) = router.records
    expected = (x @ router.weight.T).square().mean()
    torch.testing.assert_close(record.losses["square"], expected.detach())
    assert record.weighted_loss.item() == pytest.approx(
        0.5 * record.losses["square"].item() + 0.01 * record.losses["balance"].item()
    )
    with pytest.raises(ValueError, match=r"square.*'other'"):
        WithOwnLoss(8, 4, loss_weights={"other": 1.0})


class WithProducts(WithOwnLoss):
    def extra_losses(self, logits_GSE, gate_GSE):
        return {"square": (logits_GSE.mT @ logits_GSE).square().mean((1, 2))}


def test_a_loss_of_its_own_is_computed_in_float32_under_autocast():
    router = WithProducts(8, 4, loss_weights={"square": 1.0})
    x = torch.randn(2, 5, 8)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            router(x)
    plain, under_autocast = router.records
    torch.testing.assert_close(under_autocast.losses["square"], plain.losses["square"])


def test_a_loss_without_a_weight_is_named():
    router = RecordingRouter(4, {"a": 1.0})
    with pytest.raises(ValueError, match="'b' has no weight"):
        router.record({"a": torch.ones(()), "b": torch.ones(())}, torch.ones(1, 4))


def test_a_loss_that_is_no_mean_is_named():
    router = RecordingRouter(4, {"a": 1.0})
    with pytest.raises(ValueError, match=r"'a' .* has the shape \(2,\): take its mean"):
        router.record({"a": torch.ones(2)}, torch.ones(1, 4))


def test_a_weight_without_a_loss_is_named():
    router = RecordingRouter(4, {"a": 1.0, "after a warm-up": 1.0})
    with pytest.raises(ValueError, match="records no loss 'after a warm-up'"):
        router.record({"a": torch.ones(())}, torch.ones(1, 4))


def test_a_factory_with_another_number_of_experts_is_refused(dense_vit):
    with pytest.raises(
        ValueError, match=r"'eight' has 8 experts in blocks\.1\.mlp, not num_experts=4"
    ):
        timm_moe.convert_to_moe(
            dense_vit,
            4,
            router=timm_moe.RouterSpec("eight", lambda dim, num_experts: TopKRouter(dim, 8)),
        )
    assert not timm_moe.moe_layers(dense_vit)


@pytest.mark.parametrize("load", [torch.ones(4), torch.ones(1, 3)])
def test_a_load_of_another_shape_is_refused_where_it_is_recorded(load):
    with pytest.raises(ValueError, match=r"not \(groups, 4 experts\)"):
        RecordingRouter(4, {}).record({}, load)


def test_the_example_of_a_router_trains_with_its_loss():
    code = f"""
import runpy, timm, timm_moe, torch
runpy.run_path({str(EXAMPLE)!r}, run_name="own_router")
model = timm.create_model("vit_tiny_ewa_moe", router="sparse_gate", top_k=2, **{SMALL_VIT!r})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2, 3, 32, 32)).sum().backward()
try:
    optimizer.step()
except RuntimeError as error:
    print(error)  # nobody added the loss
optimizer.zero_grad()
(model(torch.randn(2, 3, 32, 32)).sum() + timm_moe.auxiliary_loss(model)).backward()
assert all(layer.router.weight.grad.any() for layer in timm_moe.moe_layers(model).values())
optimizer.step()
print(timm_moe.routing_summary(model))
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    assert "auxiliary_loss" in done.stdout
    assert "'gate': " in done.stdout


class Limited(Router):
    def __init__(self, dim, num_experts, limit):
        super().__init__(num_experts)
        self.limit = limit


def test_none_is_read_in_the_options_of_every_router(monkeypatch):
    """Reads a word where the default is a word; timm drops options that are None."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for limit, read in ((1.05, None), (None, None), ("all", "none")):
        spec = timm_moe.RouterSpec("limited", Limited, options={"limit": limit})
        timm_moe.register_router(spec)
        model = timm.create_model("vit_tiny_ewa_moe", router="limited", limit="none", **SMALL_VIT)
        layers = timm_moe.moe_layers(model).values()
        assert [layer.router.limit for layer in layers] == [read] * 2


def low_rank(ffn, router, **options):
    return MoeMlp(Mlp(ffn.fc1.in_features, 4), router)


def other_activation(ffn, router, **options):
    return MoeMlp(Mlp(ffn.fc1.in_features, ffn.fc1.out_features, act_layer=nn.ReLU), router)


@pytest.mark.parametrize("layer", [low_rank, other_activation])
def test_a_layer_whose_experts_are_no_copies_is_refused(layer):
    """Its dense form would have another width, or compute something else."""
    spec = timm_moe.RouterSpec("own", TopKRouter, layer=layer, layer_options={})
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    with pytest.raises(ValueError, match=r"router='own' .*another network than blocks\.1\.mlp"):
        timm_moe.convert_to_moe(model, router=spec)
    assert timm_moe.moe_layers(model) == {}


class Scaled(MoeMlp):
    """Has a weight of its own, which begins at one whatever the dense network."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.ones(1))

    def weights_from_dense(self, dense, init):
        return super().weights_from_dense(dense, init) | {"scale": torch.ones(1)}

    def stacked_weights(self):
        weights = super().stacked_weights()
        return weights | {name: weights[name] * self.scale for name in ("fc2.weight", "fc2.bias")}


def test_a_layer_with_a_weight_of_its_own_comes_from_a_dense_network_and_goes_back(dense_vit):
    spec = timm_moe.RouterSpec("scaled", Modulo, layer=Scaled, layer_options={})
    model = timm_moe.convert_to_moe(copy.deepcopy(dense_vit), router=spec)
    (*_, layer) = timm_moe.moe_layers(model).values()
    nn.init.constant_(layer.scale, 2)
    bias = timm_moe.to_dense(copy.deepcopy(model)).get_submodule(layer.path).fc2.bias
    torch.testing.assert_close(bias, layer.fc2.bias[0] * 2)
    model.load_state_dict(dense_vit.state_dict())
    assert layer.scale.item() == 1


class Tenth(MoeMlp):
    share_rate = 0.1


def test_a_schedule_leaves_the_share_rate_of_a_layers_class(dense_vit):
    spec = timm_moe.RouterSpec("own", TopKRouter, layer=Tenth, layer_options={})
    timm_moe.convert_to_moe(dense_vit, router=spec, share_schedule="early")
    layers = timm_moe.moe_layers(dense_vit).values()
    assert {(layer.share_rate, layer.share_schedule) for layer in layers} == {(0.1, "early")}
