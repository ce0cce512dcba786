"""Routers, losses, dispatch and a model against the golden values of V-MoE's reference."""

from types import SimpleNamespace

import pytest
import timm
import torch
from common import TINY, cases, dense_combine, loads

import timm_moe
from timm_moe.checkpoints.vmoe import state_dict_from_flax
from timm_moe.layers import TopKRouter
from timm_moe.layers.dispatch import combine, dispatch
from timm_moe.layers.grouped import sizes_of_runs
from timm_moe.layers.losses import balance_loss, importance_loss, load_loss
from timm_moe.layers.queues import assign, expert_capacity, queue


def test_capacity_matches_the_reference(golden):
    rows = golden("capacity")
    columns = (
        "num_tokens_times_k",
        "num_experts",
        "capacity_factor",
        "is_round",
        "multiple_of",
        "capacity",
    )
    for choices, experts, factor, is_round, multiple, expected in zip(
        *(rows[name].tolist() for name in columns), strict=True
    ):
        arguments = (choices, experts, factor, "round" if is_round else "ceil", multiple or 1)
        if expected == -1:
            with pytest.raises(ValueError, match="below 1"):
                expert_capacity(*arguments)
        else:
            assert expert_capacity(*arguments) == expected, arguments


def test_dispatch_matches_the_reference(golden):
    for case in cases(golden("dispatch"), "c"):
        _, num_experts, top_k, capacity, priority = case.meta_S_E_K_C_bpr.tolist()
        weight, expert = case.gates.sort(dim=2, descending=True, stable=True)
        weight, expert = weight[..., :top_k], expert[..., :top_k]
        assert torch.equal(expert.int(), case.topk_index)
        queues = queue(expert, num_experts, weight[..., 0] if priority else None)
        assert torch.equal(queues.rank - 1, case.buffer_index)
        routing = assign(expert, weight, queues, capacity)
        torch.testing.assert_close(
            dense_combine(routing, num_experts), case.combine_GSE.flatten(0, 1), rtol=0, atol=1e-5
        )
        x_ND = dispatch(case.x.flatten(0, 1), routing)
        *inputs, unused = x_ND.split(sizes_of_runs(routing.offsets, x_ND))
        for e, rows in enumerate(inputs):
            expected = case.expert_inputs[e]
            expected = expected[expected.abs().sum(1) > 0]
            assert sorted(rows.tolist()) == sorted(expected.tolist())
        outputs = [rows @ case.expert_A[e] + case.expert_b[e] for e, rows in enumerate(inputs)]
        y = combine(
            torch.cat([*outputs, torch.zeros(len(unused), outputs[0].shape[1])]), routing
        ).view_as(case.y)
        torch.testing.assert_close(y, case.y, rtol=1e-5, atol=1e-5)
        assert (y[~case.kept.any(2)] == 0).all()


@pytest.mark.parametrize("noisy", [False, True])
def test_router_matches_the_reference(golden, noisy, monkeypatch):
    for case in cases(golden("router"), "r"):
        result = SimpleNamespace(
            **{
                k.split("_", 1)[1]: v
                for k, v in vars(case).items()
                if k.startswith("noisy" if noisy else "det")
            }
        )
        num_experts, top_k, noise_std = case.meta_E_K_noise.tolist()
        importance, load, balance = case.weights_importance_load_gshard.tolist()
        router = TopKRouter(
            case.inputs.shape[2],
            int(num_experts),
            int(top_k),
            noise_std=noise_std if noisy else 0.0,
            capacity_factor=case.capacity_factor.item(),
            batch_priority=bool(case.batch_priority),
            group_images=1,  # a group stands as an image of S tokens
            loss_weights={
                "importance": importance,
                "load": load if noisy else 0.0,
                "balance": balance,
            },
        )
        router.weight.data = case.kernel.T.clone()
        monkeypatch.setattr(torch, "randn_like", lambda x, eps=case.eps, **_: eps.view_as(x))
        inputs = case.inputs.clone().requires_grad_()
        routing = router(inputs)
        combined = dense_combine(routing, int(num_experts)).view_as(result.combine_GSE)
        torch.testing.assert_close(combined, result.combine_GSE, rtol=0, atol=1e-5)
        logits = inputs @ router.weight.T
        rows = inputs.shape[1]
        assert (router._capacity(rows) or rows) == min(int(result.capacity), rows)
        losses = router.records[-1].losses
        torch.testing.assert_close(
            importance_loss(logits.softmax(2)), result.importance_loss, rtol=1e-3, atol=0
        )
        noisy_logits = logits + case.eps * (noise_std / num_experts if noisy else 0)
        gates = noisy_logits.softmax(2)
        torch.testing.assert_close(
            balance_loss(gates, loads(gates.argmax(2, keepdim=True), gates.shape[2]), 1),
            result.gshard_loss,
            rtol=1e-3,
            atol=0,
        )
        if noisy:
            last = gates.sort(dim=2, descending=True, stable=True).indices[..., int(top_k) - 1]
            torch.testing.assert_close(
                load_loss(logits, noisy_logits, last, noise_std / num_experts),
                result.load_loss,
                rtol=1e-3,
                atol=0,
            )
        assert set(losses) == {
            name
            for name, weight in (
                ("importance", importance),
                ("load", load * noisy),
                ("balance", balance),
            )
            if weight
        }
        weighted = router.records[-1].weighted_loss
        torch.testing.assert_close(weighted, result.auxiliary_loss.mean(), rtol=1e-3, atol=0)
        kernel_grad, input_grad = torch.autograd.grad(
            weighted, [router.weight, inputs], retain_graph=True
        )
        for grad, expected in (
            (kernel_grad.T, result.grad_aux_kernel),
            (input_grad, result.grad_aux_inputs),
        ):
            torch.testing.assert_close(
                grad, expected, rtol=0, atol=5e-3 * expected.abs().max().item()
            )
        (probe_grad,) = torch.autograd.grad((combined * result.probe_R).sum(), [router.weight])
        expected = result.grad_sum_combine_R_kernel
        torch.testing.assert_close(
            probe_grad.T, expected, rtol=0, atol=5e-3 * expected.abs().max().item()
        )


@pytest.mark.parametrize("run", ["k2_c105", "k1_c10_bpr", "k2_c05_bpr", "k2_c8"])
def test_model_matches_the_reference(golden, run):
    arrays = golden("vit_moe_tiny")
    top_k, capacity_factor, priority = arrays[f"{run}/meta_K_C_bpr"].tolist()
    model = timm.create_model(
        "vmoe_s32",
        **TINY,
        top_k=int(top_k),
        capacity_factor=capacity_factor,
        eval_capacity_factor=capacity_factor,
        batch_priority=bool(priority),
        noise_std=0,  # the reference's deterministic mode, in training
        aux_loss="importance",
        aux_loss_weight=0.005,
    )
    model.load_state_dict(
        state_dict_from_flax({k: v for k, v in arrays.items() if k.startswith("params/")})
    )
    images = arrays["images_NHWC"].permute(0, 3, 1, 2)
    torch.testing.assert_close(model(images), arrays[f"{run}/logits"], rtol=0, atol=1e-4)
    loss = timm_moe.auxiliary_loss(model)
    torch.testing.assert_close(loss, arrays[f"{run}/auxiliary_loss_G"].mean(), rtol=1e-3, atol=0)
    summary = timm_moe.routing_summary(model)
    for block in (1, 3):
        expected = arrays[f"{run}/importance_loss_block{block}"].mean().item()
        assert summary[f"blocks.{block}.mlp"].losses["importance"] == pytest.approx(
            expected, rel=1e-3
        )
    torch.testing.assert_close(model.eval()(images), arrays[f"{run}/logits"], rtol=0, atol=1e-4)


def test_model_in_training_matches_the_reference(golden, monkeypatch):
    arrays = golden("vit_moe_tiny")
    model = timm.create_model("vmoe_s32", **TINY)
    model.load_state_dict(
        state_dict_from_flax({k: v for k, v in arrays.items() if k.startswith("params/")})
    )
    monkeypatch.setattr(
        torch, "randn_like", lambda x, **_: arrays["noisy/eps_same_for_both_layers"].view_as(x)
    )
    logits = model(arrays["images_NHWC"].permute(0, 3, 1, 2))
    torch.testing.assert_close(logits, arrays["noisy/logits"], rtol=0, atol=1e-4)
    loss = timm_moe.auxiliary_loss(model)
    torch.testing.assert_close(loss, arrays["noisy/auxiliary_loss_G"].mean(), rtol=1e-3, atol=0)
    for block in (1, 3):
        losses = timm_moe.routing_summary(model)[f"blocks.{block}.mlp"].losses
        for name in ("importance", "load"):
            assert losses[name] == pytest.approx(
                arrays[f"noisy/{name}_block{block}"].mean().item(), rel=1e-3
            )
