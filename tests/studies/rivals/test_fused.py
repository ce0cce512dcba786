"""Fused experts: one network with learned weights.

It is what is trained, evaluated and exported.
"""

import copy

import pytest
import timm
import torch
from common import SMALL_VIT
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Mlp

import timm_moe
from studies.rivals import FusedMlp, Fusion
from timm_moe import convert_to_moe, moe_layers, to_dense
from timm_moe.analysis.info import model_info
from timm_moe.analysis.report.sections.model import model_section
from timm_moe.analysis.routes.statistics import routed_layers
from timm_moe.export.history import History


def fused_layer(width=6, num_experts=3, common_share=0.0):
    layer = FusedMlp(Mlp(width, 5), Fusion(num_experts, common_share), "independent")
    torch.nn.init.normal_(layer.router.logits)
    return layer


def fused_vit(**options):
    model = timm.create_model("vit_tiny_ewa_moe", router="fused", **{**SMALL_VIT, **options})
    for layer in moe_layers(model).values():
        torch.nn.init.normal_(layer.router.logits)
    return model


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 9), st.booleans(), st.data())
def test_the_network_is_the_weighted_sum_of_the_experts(num_experts, width, training, data):
    shares = st.just(0.0) if num_experts == 1 else st.sampled_from([0.0, 0.75])
    layer = fused_layer(width, num_experts, data.draw(shares)).double().train(training)
    x = torch.randn(2, 4, width, dtype=torch.float64)
    weights = layer.router.weights()
    share = layer.router.common_share
    logits = layer.router.logits
    expected = [share] * bool(share) + list((1 - share) * logits.exp() / logits.exp().sum())
    torch.testing.assert_close(
        weights, torch.stack([torch.as_tensor(w, dtype=torch.float64) for w in expected])
    )
    stacked = dict(layer.named_expert_parameters())
    hidden, out = (
        {
            kind: sum(w * e for w, e in zip(weights, stacked[f"{fc}.{kind}"], strict=True))
            for kind in ("weight", "bias")
        }
        for fc in ("fc1", "fc2")
    )
    by_hand = (
        torch.nn.functional.gelu(x @ hidden["weight"].T + hidden["bias"]) @ out["weight"].T
        + out["bias"]
    )
    torch.testing.assert_close(layer(x), by_hand)
    learned = [*stacked.values(), logits]
    torch.testing.assert_close(
        torch.autograd.grad(layer(x).square().sum(), learned),
        torch.autograd.grad(by_hand.square().sum(), learned),
    )


def test_equal_weights_are_the_mean_and_one_expert_is_dense():
    layer = fused_layer()
    torch.nn.init.zeros_(layer.router.logits)
    x = torch.randn(4, 6)
    torch.testing.assert_close(layer(x), layer.run_mean(x))
    dense = Mlp(6, 5)
    torch.testing.assert_close(FusedMlp(dense, Fusion(1))(x), dense(x))


def test_the_exported_model_is_stock_and_computes_the_same(images, tmp_path):
    model = fused_vit(common_share=0.5).eval()
    export = timm_moe.export_dense(model, tmp_path / "dense")
    assert export.exact
    dense = timm.create_model(f"local-dir:{tmp_path / 'dense'}", pretrained=True).eval()
    assert type(dense) is timm.models.VisionTransformer
    with torch.no_grad():
        torch.testing.assert_close(dense(images), model(images))


@pytest.mark.ci
def test_compiled_as_one_graph(images):
    model = fused_vit(common_share=0.5).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(model, backend="aot_eager", fullgraph=True)(images), model(images)
        )


def test_experts_trained_otherwise_are_merged_from_equal_weights(images):
    trained = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT).eval()
    model = fused_vit().eval()
    model.load_state_dict(trained.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(images), trained(images))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks\.1\.mlp\.router\.logits"):
        trained.load_state_dict(model.state_dict())
    again = fused_vit()
    torch.nn.init.normal_(model.blocks[1].mlp.router.logits)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.blocks[1].mlp.router.logits, model.blocks[1].mlp.router.logits)


def test_weights_are_summed_in_float32_under_autocast_and_of_narrow_experts():
    layer = fused_layer(64, 4)
    weights = layer.router.weights().double()
    exact = sum(w * e.double() for w, e in zip(weights, layer.fc1.weight, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            layer._fused()["fc1.weight"].double(), exact, rtol=1e-6, atol=1e-6
        )
    layer.bfloat16()
    weights = layer.router.weights()
    assert weights.dtype == torch.float32
    exact = sum(w.double() * e.double() for w, e in zip(weights, layer.fc1.weight, strict=True))
    torch.testing.assert_close(
        layer._fused()["fc1.weight"].double(), exact.bfloat16().double(), rtol=2**-8, atol=1e-6
    )


def test_loading_leaves_nothing_without_values_and_trained_weights_alone(images):
    trained = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT).eval()
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_ewa_moe", router="fused", **SMALL_VIT)
    model.load_state_dict(trained.state_dict(), assign=True)
    torch.testing.assert_close(model.eval()(images), trained(images))
    model = fused_vit()
    logits = model.blocks[1].mlp.router.logits.clone()
    model.load_state_dict(
        {"blocks.1.mlp.fc1.weight": trained.blocks[1].mlp.fc1.weight}, strict=False
    )
    assert torch.equal(model.blocks[1].mlp.router.logits, logits)
    routed = timm.create_model("vit_tiny_moe", **SMALL_VIT)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*router\.weight"):
        model.load_state_dict(routed.state_dict())


def test_to_gather_one_network_gives_it(images):
    model = fused_vit().eval()
    for method in ("sum", "topk"):
        torch.testing.assert_close(to_dense(model, method).eval()(images), model(images))


def test_nothing_is_routed():
    assert not routed_layers(fused_vit())
    info = model_info("vit_tiny_ewa_moe", router="fused")
    told = model_section(fused_vit(), info, History()).parts[0].text
    assert "No router looks at the images" in told


def test_processes_that_hold_some_of_the_experts_cannot_merge_them(images):
    model = fused_vit()
    model.blocks[1].mlp.dispatcher = object()
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp merges its experts"):
        model(images)


def test_experts_that_are_dropped_are_no_copies(dense_vit, recwarn):
    model = convert_to_moe(dense_vit, router="fused", expert_init="drop")
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).state_dict()
    model.load_state_dict(
        {**model.state_dict(), **{name: value for name, value in dense.items() if ".mlp." in name}}
    )
    weight = model.blocks[1].mlp.fc1.weight
    assert not torch.equal(weight[0], weight[1])
    assert not [warning for warning in recwarn if "copies" in str(warning.message)]


def test_offloaded_experts_are_merged_as_before(images):
    accelerate = pytest.importorskip("accelerate")
    model = fused_vit().eval()
    offloaded = accelerate.cpu_offload(copy.deepcopy(model))
    with torch.no_grad():
        assert torch.equal(offloaded(images), model(images))


def test_adapters_are_merged_into_the_experts_first(images):
    peft = pytest.importorskip("peft", minversion="0.17")
    config = peft.LoraConfig(
        r=2, target_parameters=["fc1.weight"], init_lora_weights=False, target_modules=[]
    )
    adapted = peft.get_peft_model(fused_vit(), config).eval()
    with pytest.raises(ValueError, match="merge_and_unload"):
        to_dense(adapted)
    with torch.no_grad():
        outputs = adapted(images)
        torch.testing.assert_close(to_dense(adapted.merge_and_unload()).eval()(images), outputs)


def test_copies_are_warned_of(dense_vit):
    with pytest.warns(UserWarning, match="begin as copies"):
        fused_vit().load_state_dict(dense_vit.state_dict())
    with pytest.warns(UserWarning, match="remain copies"):
        convert_to_moe(dense_vit, router="fused")


def test_it_trains_and_is_reset(images):
    model = fused_vit()
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images)
    output.float().square().mean().backward()
    optimizer.step()
    moved = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert {"blocks.1.mlp.router.logits", "blocks.1.mlp.fc1.weight"} <= moved
    undecayed = next(group for group in optimizer.param_groups if not group["weight_decay"])[
        "params"
    ]
    assert any(parameter is model.blocks[1].mlp.router.logits for parameter in undecayed)
    model.init_weights()
    assert not model.blocks[1].mlp.router.logits.any()


def test_what_is_not_possible_is_said():
    for experts, share in ((2, 1.0), (2, -0.1), (1, 0.5)):
        with pytest.raises(ValueError, match="common_share must"):
            Fusion(experts, share)
    with pytest.raises(ValueError, match=r"common_share .*router='fused'"):
        timm.create_model("vit_tiny_ewa_moe", common_share=0.5, **SMALL_VIT)


def test_the_cost_is_that_of_a_dense_model():
    fused, ewa = (model_info("vit_tiny_ewa_moe", router=router) for router in ("fused", "random"))
    assert fused.gflops == ewa.gflops
    assert fused.exported == ewa.exported
