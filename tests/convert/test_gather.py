"""Many networks into one: OneS's methods against the golden file, and what must hold exactly."""

import logging

import pytest
import timm
import torch
from common import SMALL_VIT
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import GluMlp, Mlp, SwiGLU

import timm_moe
from timm_moe.convert.gather import METHODS, add, average, get_method, singular_values, top_units
from timm_moe.layers import Experts


@pytest.fixture
def case(golden):
    return golden("ones_kg")


def stacked(case):
    """The golden file's networks in torch's layout."""
    return {
        "fc1.weight": case["W1"].mT,
        "fc1.bias": case["b1"],
        "fc2.weight": case["W2"].mT,
        "fc2.bias": case["b2"],
    }


def check(result, case, name):
    expected = {
        "fc1.weight": case[f"{name}_W1{'_sorted' if name == 'topk' else ''}"].T,
        "fc1.bias": case["b1_avg"],
        "fc2.weight": case[f"{name}_W2{'_sorted' if name == 'topk' else ''}"].T,
        "fc2.bias": case["b2_avg"],
    }
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            result[key], value, rtol=0, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize(("method", "name"), [(average, "avg"), (add, "sum"), (top_units, "topk")])
def test_methods_match_the_golden_file(case, method, name):
    check(method(stacked(case)), case, name)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 0.9, 1.0])
def test_svd_matches_the_golden_file(case, ratio):
    check(singular_values(stacked(case), ratio), case, f"svd{ratio}")
    check(get_method("svd", ratio)(stacked(case)), case, f"svd{ratio}")


def test_the_ratio_of_svd_is_three_quarters_by_default(case):
    check(get_method("svd")(stacked(case)), case, "svd0.75")


def test_svd_of_bfloat16_is_computed_in_float32_and_rounded_once():
    weights = torch.randn(3, 8, 6).bfloat16()
    low = singular_values({"fc.weight": weights})["fc.weight"]
    exact = singular_values({"fc.weight": weights.double()})["fc.weight"]
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=2**-8, atol=1e-5)


shapes = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 9))


def test_a_norm_of_the_hidden_units_goes_with_them():
    networks = (
        Experts(Mlp(6, 8, norm_layer=torch.nn.LayerNorm), 2, "independent")
        .double()
        .stacked_weights()
    )
    networks["norm.weight"] = torch.arange(16.0).double().view(2, 8)
    networks["norm.bias"] = -networks["norm.weight"]
    gathered = top_units(networks)
    for unit, (scale, shift) in enumerate(
        zip(gathered["norm.weight"], gathered["norm.bias"], strict=True)
    ):
        expert, kept = divmod(int(scale), 8)
        assert shift == -scale
        assert torch.equal(gathered["fc1.weight"][unit], networks["fc1.weight"][expert, kept])
        assert torch.equal(gathered["fc2.weight"][:, unit], networks["fc2.weight"][expert, :, kept])


@settings(max_examples=50)
@given(shape=shapes, ffn=st.sampled_from([Mlp, GluMlp, SwiGLU]), seed=st.integers(0, 99))
def test_identities(shape, ffn, seed):
    num_experts, width, hidden = shape
    torch.manual_seed(seed)
    hidden = 2 * hidden if ffn is GluMlp else hidden
    equal = Experts(ffn(width, hidden), num_experts, "same").double().stacked_weights()
    one = {name: tensor[0] for name, tensor in equal.items()}
    torch.testing.assert_close(average(equal), one)
    apart = Experts(ffn(width, hidden), num_experts, "independent").double().stacked_weights()
    total = add(apart)
    for name, tensor in apart.items():
        torch.testing.assert_close(
            total[name], tensor.sum(0) if tensor.ndim == 3 else tensor.mean(0)
        )
    torch.testing.assert_close(singular_values(apart, 1.0), total)
    if num_experts == 1:
        for method in (add, top_units):
            torch.testing.assert_close(
                method(apart), one | {name: tensor[0] for name, tensor in apart.items()}
            )
    assert {name: tensor.shape for name, tensor in top_units(apart).items()} == {
        name: tensor.shape[1:] for name, tensor in apart.items()
    }


@settings(max_examples=25)
@given(shape=shapes, ffn=st.sampled_from([Mlp, GluMlp, SwiGLU]), seed=st.integers(0, 99))
def test_hidden_units_stay_whole(shape, ffn, seed):
    """The gathered network is the sum of what each expert's strongest units compute.

    Biases are left aside.
    """
    num_experts, width, hidden = shape
    torch.manual_seed(seed)
    layer = Experts(
        ffn(width, 2 * hidden if ffn is GluMlp else hidden), num_experts, "independent"
    ).double()
    networks = {
        name: tensor * (tensor.ndim == 3) for name, tensor in layer.stacked_weights().items()
    }
    outward = networks["fc2.weight"]
    hidden = outward.shape[2]
    inward = [
        tensor.unflatten(1, (-1, hidden))
        for name, tensor in networks.items()
        if name.startswith("fc1") and tensor.ndim == 3
    ]
    expected, x = 0, torch.randn(3, width).double()
    for expert in range(num_experts):
        strength = outward[expert].norm(dim=0) + sum(w[expert].norm(dim=2).sum(0) for w in inward)
        count = hidden // num_experts + (expert < hidden % num_experts)
        silent = torch.ones(hidden, dtype=torch.bool)
        silent[strength.argsort(descending=True)[:count]] = False
        weights = {name: tensor[expert].clone() for name, tensor in networks.items()}
        weights["fc2.weight"][:, silent] = 0
        expected = expected + layer.to_ffn(weights)(x)
    gathered = {name: tensor * (tensor.ndim == 2) for name, tensor in top_units(networks).items()}
    torch.testing.assert_close(layer.to_ffn(gathered)(x), expected)


def test_the_switch_baseline_keeps_everything_but_the_experts():
    torch.manual_seed(0)
    teacher = timm.create_model("widenet_b", **SMALL_VIT | {"embed_dim": 64})
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter)
    student = timm_moe.to_dense(teacher, "random").state_dict()
    kept = {name: tensor for name, tensor in teacher.state_dict().items() if ".mlp." not in name}
    assert len(kept) == len(student) - 4
    for name, tensor in kept.items():
        assert torch.equal(student[name], tensor)
    drawn = {
        name.removeprefix("blocks.0.mlp."): tensor
        for name, tensor in student.items()
        if ".mlp." in name
    }
    assert 0.018 < drawn["fc1.weight"].std() < 0.022
    assert 0.018 < drawn["fc2.weight"].std() < 0.022
    assert not drawn["fc1.bias"].any()
    assert not drawn["fc2.bias"].any()
    again = timm_moe.to_dense(teacher, "random").state_dict()
    assert not torch.equal(again["blocks.0.mlp.fc1.weight"], student["blocks.0.mlp.fc1.weight"])
    networks = (
        Experts(Mlp(6, 8, norm_layer=torch.nn.LayerNorm), 2, "independent")
        .to(torch.bfloat16)
        .stacked_weights()
    )
    drawn = METHODS["random"](networks)
    assert drawn["norm.weight"].unique().tolist() == [1]
    assert not drawn["norm.bias"].any()
    assert {tensor.dtype for tensor in drawn.values()} == {torch.bfloat16}


def test_equal_experts_give_their_strongest_units_many_times():
    layer = Experts(Mlp(4, 8), 4, "same")
    gathered = top_units(layer.stacked_weights())["fc1.weight"]
    torch.testing.assert_close(gathered, gathered[:2].repeat(4, 1))


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize(
    "name", ["vit_tiny_moe", "vit_tiny_ewa_moe", "vimoe_s14_shared", "vmoe_pbe_s32"]
)
@pytest.mark.first_case
def test_every_kind_of_model_becomes_a_stock_model(method, name, images, tmp_path):
    options = dict(num_experts=2) if "ewa" not in name else {}
    model = timm.create_model(name, **options, **SMALL_VIT).eval()
    torch.manual_seed(0)  # for random
    dense = timm_moe.to_dense(model, method).eval()
    assert type(dense).__name__ == "VisionTransformer"
    torch.manual_seed(0)
    export = timm_moe.export_dense(model, tmp_path / "dense", method)
    loaded = timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images), dense(images))


def test_a_shared_expert_is_one_of_the_experts():
    model = timm.create_model(
        "vimoe_s14_shared", num_experts=2, expert_init="independent", **SMALL_VIT
    )
    layer = timm_moe.moe_layers(model)["blocks.3.mlp"]
    mean = timm_moe.to_dense(model).blocks[3].mlp.fc1.weight
    expected = (layer.fc1.weight.sum(0) + layer.shared.fc1.weight) / 3
    torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mean",), "method .*average, sum, topk, svd, random.*'mean'"),
        (("sum", 0.5), "svd_ratio .*method='svd'.*method='sum'"),
    ],
)
def test_bad_methods(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_method(*arguments)


@pytest.mark.parametrize("ratio", [0, -1, 1.1, float("nan")])
def test_bad_ratios(case, ratio):
    with pytest.raises(ValueError, match=f"svd_ratio .*got {ratio}"):
        get_method("svd", ratio)(stacked(case))


def test_top_k_needs_hidden_units():
    with pytest.raises(ValueError, match=r"last layer .*fc2"):
        top_units({"linear.weight": torch.zeros(2, 3, 3)})
    with pytest.raises(ValueError, match="hidden units of fc2"):
        top_units({"fc1.weight": torch.zeros(2, 5, 3), "fc2.weight": torch.zeros(2, 3, 4)})


def test_only_the_mean_of_ewas_experts_is_what_was_trained(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    exact = "The mean of these experts, method='average', is exact."
    ewa = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
    assert timm_moe.export_dense(ewa, tmp_path / "average").exact
    assert exact not in caplog.text
    assert not timm_moe.export_dense(ewa, tmp_path / "svd", "svd", svd_ratio=0.5).exact
    assert exact in caplog.text
    caplog.clear()
    assert not timm_moe.export_dense(
        timm.create_model("vit_tiny_moe", **SMALL_VIT), tmp_path / "moe"
    ).exact
    assert exact not in caplog.text


@pytest.mark.parametrize(
    ("name", "method", "told"),
    [
        ("vit_tiny_moe", "average", ["train it further"]),
        ("vit_tiny_moe", "svd", ["train it further"]),
        ("vit_tiny_ewa_moe", "average", []),
        ("vit_tiny_ewa_moe", "topk", ["take method='average', which is exact"]),
    ],
)
def test_a_network_that_computes_another_function_is_told_of(name, method, told, caplog):
    timm_moe.to_dense(timm.create_model(name, **SMALL_VIT), method)
    start = "The dense model computes another function than the one with experts in blocks.1.mlp: "
    assert caplog.messages == [f"{start}{remedy} (docs/ones.md)." for remedy in told]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda stacked: stacked[:2], r"made with 4 experts and holds 2 now: .*num_experts=2"),
        (lambda stacked: stacked[:, :16], r"and has \(4, 16, 32\) now: cut the dense model, and"),
    ],
)
def test_experts_that_were_cut_are_told_of(cut, message):
    model = timm.create_model("vit_tiny_moe", num_experts=4, **SMALL_VIT)
    for layer in timm_moe.moe_layers(model).values():
        for name, stacked in list(layer.named_expert_parameters()):
            owner, _, last = name.rpartition(".")
            setattr(layer.get_submodule(owner), last, torch.nn.Parameter(cut(stacked.detach())))
    with pytest.raises(ValueError, match=message):
        timm_moe.to_dense(model)
