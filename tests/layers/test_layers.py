"""Expert layers: values of the golden file, identities, shapes, gradients."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from common import SMALL_VIT
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import GluMlp, Mlp, SwiGLU
from torch import nn

import timm_moe
from timm_moe.layers import (
    EnsembleRouter,
    EwaMlp,
    ImageRouter,
    MoeMlp,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    Router,
    SharedExpertMlp,
    TilingRouter,
    TopKRouter,
)
from timm_moe.layers.living import living

FFNS = {
    "Mlp": lambda width, hidden: Mlp(width, hidden),
    "Mlp with norm": lambda width, hidden: Mlp(width, hidden, norm_layer=nn.LayerNorm),
    "Mlp without bias": lambda width, hidden: Mlp(width, hidden, bias=False),
    "GluMlp": lambda width, hidden: GluMlp(width, 2 * hidden),
    "SwiGLU": lambda width, hidden: SwiGLU(width, hidden, norm_layer=nn.LayerNorm),
}


def moe(width=5, hidden=6, num_experts=4, ffn="Mlp", **kwargs):
    return EwaMlp(
        FFNS[ffn](width, hidden),
        RandomPartition(num_experts),
        **{"expert_init": "independent", **kwargs},
    )


@pytest.fixture
def golden_layer(golden):
    rup = golden("rup")
    layer = moe().double()
    names = {"fc1.weight": "W1", "fc1.bias": "b1", "fc2.weight": "W2", "fc2.bias": "b2"}
    layer.load_state_dict({name: rup[key] for name, key in names.items()})
    return layer, rup


def test_training_forward_equals_the_golden_file(golden_layer, monkeypatch):
    layer, rup = golden_layer
    monkeypatch.setattr(torch, "randperm", lambda rows, device: rup["perm"])
    torch.testing.assert_close(layer(rup["x"]), rup["y"], rtol=0, atol=1e-12)


def test_eval_forward_is_the_averaged_ffn_of_the_golden_file(golden_layer):
    layer, rup = golden_layer
    torch.testing.assert_close(
        layer.eval()(rup["x"]), rup["y_eval_averaged_ffn"], rtol=0, atol=1e-12
    )


@given(rows=st.integers(0, 40), num_experts=st.integers(1, 12))
def test_partition_gives_every_row_to_one_expert_in_equal_parts(rows, num_experts):
    routing = RandomPartition(num_experts)(torch.zeros(rows, 2))
    order, ends = routing.token_indices, routing.offsets
    sizes = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype)).tolist()
    assert torch.equal(
        routing.experts()[order, 0].bincount(minlength=num_experts), torch.tensor(sizes)
    )
    assert routing.experts()[order, 0].diff().ge(0).all()
    assert routing.weights() is None
    assert sorted(order.tolist()) == list(range(rows))
    assert len(sizes) == num_experts
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1


def test_partition_is_fresh_at_each_call_and_uniform():
    partition, counts = RandomPartition(4), torch.zeros(8, 4)
    for _ in range(4000):
        order, ends, *_ = partition(torch.zeros(8, 2))
        counts[order, torch.bucketize(torch.arange(8), ends, right=True)] += 1
    torch.testing.assert_close(counts / 4000, torch.full((8, 4), 0.25), rtol=0, atol=0.035)


@settings(max_examples=30)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 9),
    num_experts=st.integers(1, 7),
    ffn=st.sampled_from(list(FFNS)),
)
def test_equal_experts_compute_the_dense_network(batch, tokens, num_experts, ffn):
    dense = FFNS[ffn](8, 12)
    layer = EwaMlp(dense, RandomPartition(num_experts), expert_init="same")
    x = torch.randn(batch, tokens, 8)
    torch.testing.assert_close(layer.train()(x), dense(x))
    torch.testing.assert_close(layer.eval()(x), dense(x))


@pytest.mark.parametrize("ffn", FFNS)
@pytest.mark.parametrize("rows", [1, 3, 4, 10])
@pytest.mark.first_case
def test_values_and_gradients_equal_a_plain_loop(ffn, rows):
    layer = moe(8, 12, ffn=ffn)
    x = torch.randn(rows, 8, requires_grad=True)
    routing = layer.router(x)
    layer(x, routing=routing).square().sum().backward()
    got = {name: parameter.grad for name, parameter in layer.named_parameters()}, x.grad

    # one expert at a time, by indexing: slow and plain
    experts = []
    for expert in range(4):
        ffn_e = FFNS[ffn](8, 12)
        ffn_e.load_state_dict(
            {name: stacked[expert] for name, stacked in layer.state_dict().items()}
        )
        experts.append(ffn_e)
    x_plain = x.detach().clone().requires_grad_()
    y = torch.zeros(rows, 8)
    start = 0
    for expert, end in zip(experts, routing.offsets, strict=True):
        chosen = routing.token_indices[start:end]
        y = y.index_put((chosen,), expert(x_plain[chosen]))
        start = end
    y.square().sum().backward()
    torch.testing.assert_close(got[1], x_plain.grad)
    for name, grad in got[0].items():
        expected = [dict(expert.named_parameters())[name].grad for expert in experts]
        torch.testing.assert_close(grad, torch.stack(expected))


def test_dropout_inside_experts_follows_the_layers_mode():
    layer = EwaMlp(Mlp(8, 16, drop=0.5), RandomPartition(2))
    x = torch.ones(4, 8)
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[1])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[1])


@pytest.mark.parametrize("ffn", ["Mlp", "SwiGLU"])
def test_dropout_inside_experts_is_found_among_the_modules(ffn):
    torch.manual_seed(0)
    layer = MoeMlp(FFNS[ffn](8, 16), TopKRouter(8, 3), expert_dropout=0.5)
    names = [name for name, module in layer.named_modules() if isinstance(module, nn.Dropout)]
    assert names == ["drop1", "drop2"]
    assert (
        layer.state_dict().keys() == MoeMlp(FFNS[ffn](8, 16), TopKRouter(8, 3)).state_dict().keys()
    )
    x = torch.ones(4, 8)
    for made in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not torch.equal(made.train()(x)[0], made(x)[1])
        assert torch.equal(made.eval()(x)[0], made(x)[1])
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.train()  # Monte Carlo dropout
        assert not torch.equal(made(x)[0], made(x)[1])
        made.train()
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        assert torch.equal(made(x)[0], made(x)[1])


def test_rates_of_dropout_that_were_set_later_are_exported(dense_vit):
    timm_moe.convert_to_moe(dense_vit, expert_dropout=0.5)
    dense_vit.blocks[1].mlp.drop1.p = 0.25
    dense = timm_moe.to_dense(dense_vit)
    assert [dense.blocks[block].mlp.drop1.p for block in (1, 3)] == [0.25, 0.0]
    assert dense.blocks[1].mlp.drop2.p == 0.0
    dense_vit.blocks[1].mlp.drop1 = nn.Identity()
    assert isinstance(timm_moe.to_dense(dense_vit).blocks[1].mlp.drop1, nn.Identity)


def test_rows_for_one_layer_of_all_experts_are_refused():
    layer = MoeMlp(FFNS["Mlp"](8, 16), TopKRouter(8, 3))
    with pytest.raises(TypeError, match="takes no rows: call the layer of the experts"):
        layer.fc1(torch.randn(2, 8))


def test_dropout_of_the_experts_is_that_of_the_shared_one_too():
    dense = Mlp(8, 16)
    layer = SharedExpertMlp(dense, TopKRouter(8, 2), expert_dropout=0.25)
    assert {
        name: m.p for name, m in layer.named_modules() if isinstance(m, nn.Dropout)
    } == dict.fromkeys(["drop1", "drop2", "shared.drop1", "shared.drop2"], 0.25)
    assert dense.drop1.p == 0


LOSSES = dict(
    noise_std=1.0,
    loss_weights=dict.fromkeys(["importance", "load", "balance", "balance_top_k"], 0.1),
)
ROUTERS = {
    "random": lambda: EwaMlp(Mlp(8, 16), RandomPartition(4)),
    "top-k": lambda: MoeMlp(Mlp(8, 16), TopKRouter(8, 4, 2, **LOSSES)),
    "priority": lambda: MoeMlp(
        Mlp(8, 16),
        TopKRouter(8, 4, 1, capacity_factor=1.0, batch_priority=True, group_images=2, **LOSSES),
    ),
    "renorm": lambda: MoeMlp(Mlp(8, 16), TopKRouter(8, 4, 2, gate_mode="renorm", **LOSSES)),
    "image": lambda: MoeMlp(Mlp(8, 16), ImageRouter(8, 4, 2, capacity_factor=1.0, **LOSSES)),
    "shared": lambda: SharedExpertMlp(Mlp(8, 16), TopKRouter(8, 4, gate_mode="one", **LOSSES)),
    "pbe": lambda: MoeMlp(
        Mlp(8, 16), EnsembleRouter(8, 4, ensemble_size=2, capacity_factor=1.0, **LOSSES)
    ),
    "tiling": lambda: MoeMlp(Mlp(8, 16), TilingRouter(8, 4, ensemble_size=2, **LOSSES)),
    "partitioning": lambda: MoeMlp(Mlp(8, 16), PartitionedRouter(8, 4, ensemble_size=2, **LOSSES)),
    "multi-head": lambda: MoeMlp(Mlp(8, 16), MultiHeadRouter(8, 4, 2, **LOSSES)),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_an_empty_batch_in_training_has_zero_losses_and_gradients(kind):
    layer = ROUTERS[kind]()
    x = torch.randn(0, 5, 8, requires_grad=True)
    y = layer(x)
    assert y.shape == (0, 5, 8)
    loss = y.sum()
    if kind != "random":
        (record,) = layer.router.records
        assert [float(loss) for loss in record.losses.values()] == [0] * 4
        loss = loss + record.weighted_loss
    loss.backward()
    assert x.grad.shape == x.shape
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
    assert layer.eval()(x).shape == (0, 5, 8)


def test_independent_init_keeps_the_first_expert_and_the_scale():
    dense = Mlp(64, 256)
    nn.init.trunc_normal_(dense.fc1.weight, std=0.02)
    nn.init.zeros_(dense.fc1.bias)
    layer = EwaMlp(dense, RandomPartition(4), expert_init="independent")
    assert torch.equal(layer.fc1.weight[0], dense.fc1.weight)
    assert layer.fc1.bias.abs().max() == 0
    flat = layer.fc1.weight.detach().flatten(1)
    torch.testing.assert_close(flat.std(1), torch.full((4,), 0.02), rtol=0.05, atol=0)
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.05


def test_independent_init_keeps_the_scale_of_each_half_of_a_gated_layer():
    """timm begins the gate's half near zero, with a bias of one."""
    dense = GluMlp(64, 2 * 96)
    dense.init_weights()
    layer = EwaMlp(dense, RandomPartition(4), expert_init="independent")
    for name in ("fc1.weight", "fc1.bias"):
        for half in layer.get_parameter(name).detach().chunk(2, dim=1):
            first, *others = half.flatten(1)
            for other in others:
                assert (other.mean() - first.mean()).abs() <= first.std()
                torch.testing.assert_close(other.std(), first.std(), rtol=0.3, atol=0)


def test_loads_its_own_state_dict_and_a_dense_one():
    layer, dense = moe(), Mlp(5, 6)
    other = moe()
    other.load_state_dict(layer.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True)
    )
    other.load_state_dict(dense.state_dict())
    assert all(
        torch.equal(other.state_dict()[name][e], t)
        for name, t in dense.state_dict().items()
        for e in range(4)
    )
    other.load_state_dict(dense.state_dict(), assign=True)
    other.fc1.weight.data[0] += 1  # every expert owns its copy
    assert torch.equal(other.fc1.weight[1], dense.fc1.weight)


#: Options of routers with weights of every kind.
WITH_WEIGHTS = [
    dict(router="top_k", shared_expert=True),
    dict(router="top_k", score="sigmoid", balance="bias"),
    dict(router="top_k", score="cosine"),
    dict(router="top_k", routing_unit="image"),
    dict(router="soft"),
    dict(router="expert_choice"),
]


def assigned(model, weights):
    return model.load_state_dict(weights, assign=True)


def in_empty_memory(model, weights):
    model.to_empty(device="cpu")
    return model.load_state_dict(weights)


@pytest.mark.filterwarnings("ignore:Fused experts")
@pytest.mark.parametrize("load", [assigned, in_empty_memory])
@pytest.mark.first_case
def test_a_dense_checkpoint_in_a_model_on_meta_leaves_routers_that_are_drawn(load):
    dense, images = (
        timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).eval(),
        torch.randn(2, 3, 32, 32),
    )
    for options in WITH_WEIGHTS:
        expected = timm_moe.convert_to_moe(copy.deepcopy(dense), moe_layers="1", **options)
        with torch.device("meta"):
            model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).eval()
            timm_moe.convert_to_moe(model, moe_layers="1", **options)
        junk = [torch.full((size,), 3) for size in (4, 128, 256) for _ in range(99)]
        del junk  # which new memory may hold
        torch.manual_seed(1)
        load(model, dense.state_dict())
        torch.manual_seed(1)
        expected.blocks[1].mlp.router.reset_parameters()
        with torch.no_grad():
            assert torch.equal(model(images), expected(images)), options
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), (options, name)


def test_a_router_on_meta_that_blocks_share_is_drawn():
    """``to_empty`` comes to the layer once for each block."""
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
        for block in model.blocks[1:]:
            block.mlp = model.blocks[0].mlp
        timm_moe.convert_to_moe(model, moe_layers="every-1", router="top_k")
    (layer,) = timm_moe.moe_layers(model).values()
    junk = [torch.full(layer.router.weight.shape, 3.0) for _ in range(99)]
    del junk  # which new memory may hold
    model.to_empty(device="cpu")
    assert layer.router.weight.std().item() == pytest.approx(0.02, rel=0.5)
    assert pickle.loads(pickle.dumps(copy.deepcopy(layer))).router.weight.std() > 0


class Undrawn(Router):
    def __init__(self):
        super().__init__(4)
        self.linear = nn.Linear(5, 4)


def test_a_router_on_meta_that_cannot_be_drawn_is_refused_or_nan():
    with torch.device("meta"):
        layer = MoeMlp(Mlp(5, 6), Undrawn())
    with pytest.raises(RuntimeError, match=r"Undrawn .*reset_parameters\(\)"):
        layer.load_state_dict(Mlp(5, 6).state_dict(), assign=True)
    weights = {**Mlp(5, 6).to("meta").state_dict(), **layer.router.state_dict(prefix="router.")}
    # Of a model without weights.
    assert layer.load_state_dict(weights, assign=True).missing_keys == []
    layer.to_empty(device="cpu").load_state_dict(Mlp(5, 6).state_dict())
    assert layer.router.linear.weight.isnan().all()
    layer.load_state_dict(MoeMlp(Mlp(5, 6), Undrawn()).state_dict())
    assert layer.router.linear.weight.isfinite().all()


def test_another_number_of_experts_is_named():
    with pytest.raises(RuntimeError, match=r"8 experts in fc1\.weight, .*4"):
        moe(num_experts=4).load_state_dict(moe(num_experts=8).state_dict())


def test_copies_are_independent_and_registered():
    layer = moe()
    for duplicate in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert duplicate in living(MoeMlp)
        x = torch.randn(3, 5)
        assert torch.equal(duplicate.eval()(x), layer.eval()(x))
        duplicate.fc1.weight.data.zero_()
        assert layer.fc1.weight.abs().max() > 0


def test_low_precision():
    layer = moe(8, 16)
    x = torch.randn(10, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == layer.eval()(x).dtype == torch.bfloat16
    layer = layer.bfloat16()
    torch.testing.assert_close(
        layer.fc1.weight.float().mean(0).bfloat16(), _mean_weight(layer), rtol=0, atol=0
    )
    assert layer.train()(x.bfloat16()).dtype == torch.bfloat16


def _mean_weight(layer):
    from timm_moe.convert.gather import average

    return average(layer.stacked_weights())["fc1.weight"]


def test_torchscript_is_refused_with_the_way_out():
    with pytest.raises(RuntimeError, match=r"TorchScript .*--torchcompile.*to_dense"):
        torch.jit.script(moe())


def test_traces_for_torchscript():
    layer = moe(8, 16).eval()
    x = torch.randn(3, 8)
    traced = torch.jit.trace(layer, torch.randn(5, 8))
    assert torch.equal(traced(x), layer(x))


def test_threads_and_plain_tensors_as_weights():
    """What nn.DataParallel and torch.func do to a module."""
    layer = moe(8, 16).eval()
    x = torch.randn(50, 8)
    expected = layer(x)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, expected) for y in pool.map(lambda _: layer(x), range(200)))
    doubled = {name: 2 * parameter.detach() for name, parameter in layer.named_parameters()}
    y = torch.func.functional_call(layer, doubled, (x,))
    layer.load_state_dict(doubled)
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize("name", ["vit_tiny_ewa_moe", "vit_tiny_moe"])
def test_vmap_is_refused_with_the_way_out(name):
    model = timm.create_model(name, **SMALL_VIT).train()
    parameters = dict(model.named_parameters())

    def loss(parameters, image):
        return torch.func.functional_call(model, parameters, (image[None],)).sum()

    per_image = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")
    with pytest.raises(RuntimeError, match=r"torch\.func\.vmap .*timm_moe\.to_dense"):
        per_image(parameters, torch.randn(2, 3, 32, 32))


def test_an_unknown_init():
    with pytest.raises(ValueError, match=r"expert_init .*same, independent, drop, .*'zeros'"):
        moe(expert_init="zeros")


def test_a_network_with_buffers_is_refused():
    with pytest.raises(ValueError, match="buffers"):
        EwaMlp(Mlp(8, 16, norm_layer=nn.BatchNorm1d), RandomPartition(2))
