"""Rows that go to different numbers of experts, as in top-p routing."""

import pytest
import torch
from common import output_of_expert
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Mlp
from torch import nn

from timm_moe.layers import MoeMlp, Router, routing_to
from timm_moe.layers.router import linear_logits


class TopP(Router):
    """The fewest experts whose probabilities sum to p, and at most K."""

    number_varies = True

    def __init__(self, dim, num_experts, top_k, p):
        super().__init__(num_experts)
        self.top_k, self.p = top_k, p
        self.weight = nn.Parameter(torch.randn(num_experts, dim, dtype=torch.float64))

    def experts_of_row(self):
        return self.top_k

    def choices(self, x):
        gate_TK, expert_TK = linear_logits(x, self.weight).softmax(-1).topk(self.top_k, dim=1)
        return expert_TK, gate_TK, gate_TK.cumsum(1) - gate_TK < self.p

    def forward(self, x):
        expert_TK, gate_TK, is_chosen_TK = self.choices(x.flatten(0, -2))
        return routing_to(expert_TK, gate_TK, self.num_experts, is_chosen_TK)


def layer_of(top_k=3, p=0.5, num_experts=4):
    router = TopP(6, num_experts, top_k, p)
    return MoeMlp(Mlp(6, 8).double(), router, "independent")


def test_the_routing_degree_counts_sets_of_all_sizes():
    assert TopP(6, 4, 4, 0.5).routing_degree() == 2**4
    assert TopP(6, 4, 2, 0.5).routing_degree() == 1 + 4 + 6


def slow(layer, x):
    """Compute the layer one choice after the other."""
    expert_TK, gate_TK, is_chosen_TK = layer.router.choices(x)
    rows = []
    for row in range(len(x)):
        y = torch.zeros_like(x[row])
        for choice in range(expert_TK.shape[1]):
            if is_chosen_TK[row, choice]:
                output = output_of_expert(layer, expert_TK[row, choice], x[row])
                y = y + gate_TK[row, choice] * output
        rows.append(y)
    return torch.stack(rows)


@given(rows=st.integers(1, 30), top_k=st.integers(1, 4), p=st.floats(-1, 1), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_values_and_gradients_are_those_of_the_slow_layer(rows, top_k, p, seed):
    torch.manual_seed(seed)
    layer, x = layer_of(top_k, p), torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    target = torch.randn(rows, 6, dtype=torch.float64)
    found, expected = layer(x), slow(layer, x)
    torch.testing.assert_close(found, expected)
    of_found, of_expected = (
        torch.autograd.grad((y * target).sum(), leaves, allow_unused=True, materialize_grads=True)
        if y.requires_grad
        else [torch.zeros_like(leaf) for leaf in leaves]
        for y in (found, expected)
    )
    for one, other in zip(of_found, of_expected, strict=True):
        torch.testing.assert_close(one, other)


def test_choices_that_are_not_made_need_no_rows_on_a_cpu():
    layer, x = layer_of(top_k=4, p=0.3), torch.randn(100, 6, dtype=torch.float64)
    routing = layer.router(x)
    made = int(layer.router.choices(x)[2].sum())
    assert made < 200
    assert len(routing.token_indices) == made + 1
    assert int((routing.experts() < 4).sum()) == made


@pytest.mark.ci
def test_compiled_and_exported_for_any_batch_it_is_the_same():
    torch.manual_seed(0)
    layer = layer_of().eval()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    rows = torch.export.Dim("rows", min=2)
    x = torch.randn(12, 6, dtype=torch.float64)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},)).module()
    for size in (12, 5):
        x = torch.randn(size, 6, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), slow(layer, x))
        torch.testing.assert_close(exported(x), slow(layer, x))


def test_a_mask_of_another_kind_is_refused():
    expert_TK, weight_TK = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2)
    for mask in (torch.ones(3, 2), torch.ones(3, 1, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"is_chosen_TK .*boolean"):
            routing_to(expert_TK, weight_TK, 4, mask)
