"""What must hold of every router, gathering method and placement, whatever the sizes."""

import pytest
import timm
import torch
from common import SMALL_VIT
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import GluMlp, Mlp, SwiGLU

import timm_moe
from timm_moe.convert.gather import METHODS
from timm_moe.layers import (
    EnsembleRouter,
    ImageRouter,
    MoeMlp,
    MultiHeadRouter,
    PartitionedRouter,
    TilingRouter,
    TopKRouter,
)
from timm_moe.layers.queues import expert_capacity

WIDTH = 5
TILED = (EnsembleRouter, TilingRouter)


@st.composite
def routers(draw, kinds=(TopKRouter, ImageRouter, *TILED, PartitionedRouter, MultiHeadRouter)):
    """A router, a batch for it (B, N, D), and how many choices a row of the batch has."""
    kind = draw(st.sampled_from(kinds))
    members, each = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_experts, images, rows = members * each, draw(st.integers(1, 5)), draw(st.integers(1, 7))
    top_k = draw(st.integers(1, each))
    options = dict(
        capacity_factor=draw(st.sampled_from([None, 0.4, 1.0, 1.5])),
        capacity_multiple=draw(st.sampled_from([1, 4])),
        batch_priority=draw(st.booleans()),
        group_images=draw(st.sampled_from([None, 1])),
    )
    if kind in (*TILED, PartitionedRouter):
        options["ensemble_size"] = members
    if kind is TilingRouter:
        options["noise_std"] = 1.0
    torch.manual_seed(draw(st.integers(0, 99)))
    router = kind(WIDTH, num_experts, top_k, **options)
    torch.nn.init.normal_(router.weight)
    copies = top_k if kind is MultiHeadRouter else members if kind in TILED else 1
    choices = {PartitionedRouter: members * top_k, MultiHeadRouter: 1}.get(kind, top_k)
    return router, torch.randn(images * copies, rows, WIDTH), choices


def capacity(router, x):
    """Rows that an expert may take of the whole batch, from the definition."""
    if router.capacity_factor is None:
        return float("inf")
    images, rows = x.shape[:2]
    if isinstance(router, MultiHeadRouter):
        images //= router.top_k
    members = getattr(router, "ensemble_size", 1)
    if isinstance(router, PartitionedRouter):
        images *= members
    groups = 1 if router.group_images is None else images // (members * router.group_images)
    together = rows if isinstance(router, ImageRouter) else 1
    choices = images // groups * rows // together * router.top_k
    return (
        groups
        * together
        * expert_capacity(
            choices,
            router.num_experts,
            router.capacity_factor,
            multiple_of=router.capacity_multiple,
        )
    )


@settings(max_examples=60)
@given(case=routers())
def test_every_kept_row_goes_out_and_comes_back_once(case):
    router, x, choices = case
    routing = router(x)
    order, ends, place, weight = (
        routing.token_indices,
        routing.offsets,
        routing.slots,
        routing.weights(),
    )
    sizes = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype)).tolist()
    total = x.shape[0] * x.shape[1]
    assert len(sizes) == router.num_experts
    assert min(sizes) >= 0
    assert sum(sizes) <= len(order) <= total * choices
    assert place.shape == weight.shape == (total, choices)
    kept = place < ends[-1]
    # Each place has one choice.
    assert torch.equal(place[kept].sort().values, torch.arange(sum(sizes)))
    assert (place < len(order)).all()
    assert (weight[~kept] == 0).all()
    rows = torch.arange(total)[:, None].expand_as(place)
    assert torch.equal(order[place[kept]], rows[kept])  # which finds its own row there
    expert = torch.repeat_interleave(torch.arange(router.num_experts), torch.tensor(sizes))
    for row in range(total):  # no expert takes a row twice
        taken = expert[place[row][kept[row]]]
        assert len(set(taken.tolist())) == len(taken)
    assert max(sizes) <= capacity(router, x)
    if router.capacity_factor is None:
        assert kept.all()


@settings(max_examples=60)
@given(
    images=st.integers(1, 6), rows=st.integers(1, 6), num_experts=st.integers(1, 5), data=st.data()
)
def test_the_tokens_of_an_image_stay_together(images, rows, num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    router = ImageRouter(
        WIDTH, num_experts, top_k, capacity_factor=data.draw(st.sampled_from([None, 0.5, 1.0]))
    )
    routing = router(torch.randn(images, rows, WIDTH))
    # An expert of num_experts is a dropped choice.
    weight, experts = routing.gates, routing.experts().view(images, rows, top_k)
    assert (experts == experts[:, :1]).all()
    assert (weight.view(images, rows, top_k) == weight.view(images, rows, top_k)[:, :1]).all()
    assert (routing.offsets % rows == 0).all()


@settings(max_examples=60)
@given(
    case=routers((TopKRouter, EnsembleRouter, PartitionedRouter, MultiHeadRouter)), data=st.data()
)
def test_without_capacities_the_order_of_the_rows_does_not_matter(case, data):
    """But to an image router, for which the first row decides, and to one with noise."""
    router, x, _ = case
    router.capacity_factor = None
    layer = MoeMlp(Mlp(WIDTH, 6), router, "independent")
    new = torch.tensor(data.draw(st.permutations(range(x.shape[1]))))
    if isinstance(router, MultiHeadRouter):  # it decides by the first copy of an image
        x = x[:: router.top_k].repeat_interleave(router.top_k, 0)
    torch.testing.assert_close(layer(x[:, new]), layer(x)[:, new], rtol=1e-5, atol=1e-6)


@settings(max_examples=60)
@given(
    method=st.sampled_from(sorted(METHODS.keys() - {"random"})),
    ffn=st.sampled_from([Mlp, GluMlp, SwiGLU]),
    num_experts=st.integers(1, 5),
    width=st.integers(1, 6),
    half=st.integers(1, 6),
    data=st.data(),
)
def test_gathering_does_not_depend_on_the_order_of_the_experts(
    method, ffn, num_experts, width, half, data
):
    """They are equal but for the order of the hidden units.

    The network's function does not depend on that order either.
    """
    # That each expert gives the same number.
    hidden = 2 * half * (num_experts if method.startswith("topk") else 1)
    networks = [ffn(width, hidden).double() for _ in range(num_experts)]
    order = data.draw(st.permutations(range(num_experts)))
    x = torch.randn(3, width, dtype=torch.float64)

    def gathered(experts):
        states = [expert.state_dict() for expert in experts]
        dense = ffn(width, hidden).double()
        dense.load_state_dict(
            METHODS[method](
                {name: torch.stack([state[name] for state in states]) for name in states[0]}
            )
        )
        if method == "topk":  # the biases are averaged by position, whatever unit stands there
            for name, parameter in dense.named_parameters():
                parameter.data.mul_(not name.endswith("bias"))
        return dense(x)

    torch.testing.assert_close(
        gathered([networks[n] for n in order]), gathered(networks), rtol=1e-8, atol=1e-10
    )


@st.composite
def placements(draw):
    depth = SMALL_VIT["depth"]
    blocks = draw(st.sets(st.integers(0, depth - 1), min_size=1))
    rule = st.sampled_from(
        ["every-1", "every-2", "every-3", "last-1", "last-2", "tail-1", "tail-3", "tail-4"]
    )
    return draw(st.one_of(rule, st.just(sorted(blocks)), st.just(",".join(map(str, blocks)))))


@settings(max_examples=25)
@given(
    placement=placements(),
    num_experts=st.integers(2, 5),
    router=st.sampled_from(["random", "top_k"]),
)
def test_there_and_back_is_the_dense_model(placement, num_experts, router):
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).eval()
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    model = timm_moe.convert_to_moe(dense, num_experts, moe_layers=placement, router=router)
    back = timm_moe.to_dense(model)
    assert not timm_moe.moe_layers(back)
    assert back.state_dict().keys() == before.keys()
    for name, tensor in back.state_dict().items():
        # The mean of equal numbers, rounded.
        torch.testing.assert_close(tensor, before[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["vit_tiny_ewa_moe", "vit_tiny_moe"])
@settings(max_examples=10)
@given(placement=placements(), num_experts=st.integers(1, 4))
@pytest.mark.first_case
def test_a_model_takes_a_dense_checkpoint_at_any_placement(name, placement, num_experts):
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    share = {"share_rate": 0.0} if num_experts == 1 and "ewa" in name else {}
    if isinstance(placement, list):
        placement = ",".join(map(str, placement))
    model = timm.create_model(
        name, moe_layers=placement, num_experts=num_experts, **share, **SMALL_VIT
    )
    model.load_state_dict(dense.state_dict())
    for path, layer in timm_moe.moe_layers(model).items():
        for parameter, stacked in layer.named_expert_parameters():
            assert (stacked == dense.get_parameter(f"{path}.{parameter}")).all()
