"""Expert Choice: values and gradients against a slow reference, groups, refusals."""

import pytest
import torch
from common import output_of_expert
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Mlp

from timm_moe.layers import ExpertChoiceRouter, MoeMlp


def layer(width=5, num_experts=3, hidden=6, **options):
    router = ExpertChoiceRouter(width, num_experts, **{"noise_std": 0.0, **options})
    torch.nn.init.normal_(router.weight)
    return MoeMlp(Mlp(width, hidden), router, "independent").double()


def reference(moe, rows):
    """Compute the rows (S, D) of one group expert by expert (arXiv 2202.09368, section 3.2)."""
    router, experts = moe.router, moe.num_experts
    gates = [list((router.weight @ row).softmax(0)) for row in rows]
    capacity = min(round(len(rows) * router.capacity_factor / experts), len(rows))
    takes = [
        sorted(range(len(rows)), key=lambda s: -gates[s][e].item())[:capacity]
        for e in range(experts)
    ]
    outputs = []
    for s, row in enumerate(rows):
        takers = [e for e in range(experts) if s in takes[e]]
        total = sum(gates[s][e] for e in takers) if router.gate_mode == "renorm" else 1
        y = torch.zeros_like(row)
        for e in takers:
            y = y + gates[s][e] / total * output_of_expert(moe, e, row)
        outputs.append(y)
    return torch.stack(outputs)


@given(
    groups=st.integers(1, 3),
    group_images=st.integers(1, 2),
    tokens=st.integers(4, 7),
    num_experts=st.integers(1, 4),
    capacity_factor=st.sampled_from([1.0, 1.5, 2.0, 9.0]),
    gate_mode=st.sampled_from(["prob", "renorm"]),
)
@settings(max_examples=20)
def test_values_and_gradients_equal_the_reference(
    groups, group_images, tokens, num_experts, **options
):
    moe = layer(num_experts=num_experts, group_images=group_images, **options)
    x = torch.randn(groups * group_images, tokens, 5, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn_like(x)
    tensors = [x, *moe.parameters()]
    expected = torch.cat([reference(moe, rows) for rows in x.view(groups, -1, 5)]).view_as(x)
    y = moe(x)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    found, gradients = (
        torch.autograd.grad((out * wanted).sum(), tensors, materialize_grads=True)
        for out in (y, expected)
    )
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-9)


def test_all_experts_have_equally_many_rows_and_rows_differ():
    moe = layer(num_experts=4, capacity_factor=1.5).eval()
    routing = moe.router(torch.randn(2, 16, 5, dtype=torch.float64))
    experts = routing.experts()
    assert experts.shape == (32, 4)
    assert [int((experts == e).sum()) for e in range(4)] == [12] * 4
    assert len({int(count) for count in (experts < 4).sum(1)}) > 1


@pytest.mark.parametrize("form", ["eager", "compiled", "exported", "traced"])
@pytest.mark.first_case
def test_of_equal_rows_the_first_are_taken(form):
    """Equal gates are taken as by the reference, also those that large logits make equal."""
    moe, x = layer(num_experts=2).eval().float(), torch.ones(2, 6, 5)
    x[1] = 100 * torch.randn(6, 5)
    torch.nn.init.eye_(moe.router.weight)
    x[1, :, 0] = torch.arange(200.0, 206.0)
    x[1, :, 1] = 0
    router = Rows(moe.router)
    if form == "compiled":
        router = torch.compile(router, backend="aot_eager")
    elif form == "exported":
        router = torch.export.export(router, (x,), strict=False).module()
    elif form == "traced":
        router = torch.jit.trace(router, (x,))
    rows = router(x)
    assert rows[:6].tolist() == [0, 1, 2, 6, 7, 8]
    assert rows[6:9].tolist() == [0, 1, 2]


class Rows(torch.nn.Module):
    def __init__(self, router):
        super().__init__()
        self.router = router

    def forward(self, x):
        return self.router(x).token_indices


def test_a_row_whose_only_expert_gives_it_no_weight_has_finite_gates():
    moe = layer(width=3, gate_mode="renorm").float()
    moe.router.weight.data = torch.eye(3)  # The rows are the logits.
    # The first expert prefers the second row, the third the third. The second takes the first row,
    # though its gate is 0 as for all rows.
    x = torch.tensor([[[10.0, -1000, 5], [100, -1000, 0], [0, -1000, 100]]])
    y = moe(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in moe.parameters())


def test_noise_is_of_training_alone():
    moe = layer(noise_std=1.0)
    x = torch.randn(2, 8, 5, dtype=torch.float64)
    assert not torch.equal(moe(x), moe(x))
    moe.eval()
    assert torch.equal(moe(x), moe(x))


def test_noise_is_the_stated_one_divided_by_the_number_of_experts(monkeypatch):
    # Every expert takes all rows, so that all gates are seen.
    router = layer(num_experts=3, capacity_factor=3.0, noise_std=6.0).router
    x = torch.randn(1, 8, 5, dtype=torch.float64)
    noise = torch.randn(1, 8, 3, dtype=torch.float64)
    monkeypatch.setattr(torch, "randn_like", lambda x, **_: noise.view_as(x))
    logits = x @ router.weight.T + 6.0 / 3 * noise
    torch.testing.assert_close(router(x).weights(), logits.softmax(2)[0])


def test_router_computes_in_float32_under_autocast():
    router = layer(num_experts=3, capacity_factor=3.0).float().router
    x = torch.randn(1, 8, 5)
    expected = router(x).weights()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(router(x).weights(), expected)


def test_weights_are_drawn_as_those_of_timms_vit():
    weight = ExpertChoiceRouter(64, 32).weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_last_batch_of_an_evaluation_is_one_group():
    router = layer(group_images=4).router.eval()
    x = torch.randn(6, 7, 5, dtype=torch.float64)
    experts = router(x).experts()
    router.group_images = 6
    assert torch.equal(experts, router(x).experts())


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"capacity_factor .*number above 0.* 0\."):
        layer(capacity_factor=0)
    with pytest.raises(ValueError, match=r"leaves no place"):
        layer(num_experts=4, capacity_factor=0.1)(torch.randn(1, 4, 5, dtype=torch.float64))
    moe = layer(group_images=2)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"group_images=2 .*3 images; 1, 3 "):
        moe(x)
    assert moe.eval()(x).shape == x.shape


@pytest.mark.parametrize("factor", [1, 2])
def test_values_and_gradients_equal_vmoe(golden, factor):
    case = golden("expert_choice")
    moe = layer(6, 4, hidden=5, capacity_factor=factor)
    tensors = {name: case[f"{name[:3]}_{name[4]}"] for name in moe.stacked_shapes}
    moe.load_state_dict({**tensors, "router.weight": case[f"c{factor}_kernel"].T})
    x = case["x"].requires_grad_()
    y = moe(x)
    torch.testing.assert_close(y, case[f"c{factor}_y"], rtol=1e-9, atol=1e-9)
    gradients = torch.autograd.grad((y * case["wanted"]).sum(), [x, moe.router.weight])
    torch.testing.assert_close(
        list(gradients),
        [case[f"c{factor}_grad_x"], case[f"c{factor}_grad_kernel"].T],
        rtol=1e-9,
        atol=1e-9,
    )
