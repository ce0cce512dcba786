"""Promise: experts spread over processes (gloo) train as in one process, whatever the layout."""

import copy

import pytest
import timm
import torch
import torch.distributed.checkpoint as dcp
from common import SMALL_VIT, InTurn
from processes import join_group, run_ranks
from timm.layers import Mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import timm_moe
from timm_moe.layers import MoeMlp, TopKRouter, routing_to

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
MODELS = {
    "capacity": ("vit_tiny_moe", dict(top_k=2, capacity_factor=0.8, group_images=1)),
    "dropless": ("vit_tiny_moe", dict(top_k=2, capacity_factor="none", group_images=2)),
    "sigmoid, bias": (
        "vit_tiny_moe",
        dict(top_k=2, score="sigmoid", balance="bias", group_images=1, bias_rate=0.5),
    ),
    "shared expert": ("vit_tiny_moe", dict(shared_expert=True, group_images=1)),
    "expert choice": ("vit_tiny_ewa_moe", dict(router="expert_choice", noise_std=0.0)),
    "Soft MoE": ("vit_tiny_ewa_moe", dict(router="soft", slots_per_expert=3)),
    "WideNet": ("widenet_b", dict(noise_std=0.0, group_images=1, mlp_ratio=2)),
}


def make_model(name):
    torch.manual_seed(0)
    name, options = MODELS[name]
    model = timm.create_model(name, **{**SMALL_VIT, "depth": 2, "num_experts": 4, **options})
    experts = timm_moe.expert_parameters(model)
    for path, parameter in model.named_parameters():
        if path in experts or "router" in path:
            nn.init.normal_(parameter, std=0.2)
    return model


def train(model, images, targets, steps=3, micro_batches=2, recomputed=False, dtype=None):
    """Losses, outputs and norms of steps of AdamW; the weights afterwards are in the model."""
    meshes = {getattr(parameter, "device_mesh", None) for parameter in model.parameters()}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, foreach=None if len(meshes) == 1 else False
    )
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        for part, labels in zip(
            images.chunk(micro_batches), targets.chunk(micro_batches), strict=True
        ):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                y = checkpoint(model, part, use_reentrant=False) if recomputed else model(part)
                loss = F.cross_entropy(y, labels) + timm_moe.auxiliary_loss(model)
            (loss / micro_batches).backward()
            seen.append(y.detach().float())
        norm = clip(model)
        optimizer.step()
    return torch.cat(seen), norm


def whole_batch(micro_batches, processes):
    """The images of all processes, and the order in which one process sees them."""
    random = torch.Generator().manual_seed(1)
    images = torch.randn(16, 3, 32, 32, generator=random)
    order = torch.arange(16).view(processes, micro_batches, -1).transpose(0, 1).flatten()
    return images, torch.arange(16) % 5, order


def shard(model, mesh, processes):
    """Shard the rest of the model; beside an efsdp dimension the experts of each process too."""
    if mesh.ndim == 1:
        return fully_shard(
            model, mesh=mesh, ignored_params=set(timm_moe.expert_parameters(model).values())
        )
    every = init_device_mesh("cpu", (processes,))
    for layer in timm_moe.moe_layers(model).values():
        fully_shard(layer.router, mesh=every)
        fully_shard(layer, mesh=mesh["efsdp"])
    return fully_shard(model, mesh=every)


def clip(model):
    """Clip gradients; torch's clip_grad_norm_ cannot do it for two meshes at once."""
    by_mesh = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(by_mesh) == 1:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return getattr(norm, "full_tensor", lambda: norm)()
    norms = [nn.utils.get_total_norm([p.grad for p in part]) for part in by_mesh.values()]
    norm = nn.utils.get_total_norm(
        [getattr(norm, "full_tensor", lambda norm=norm: norm)() for norm in norms]
    )
    for part in by_mesh.values():
        nn.utils.clip_grads_with_norm_(part, 0.1, norm, foreach=False)
    return norm


def worker(rank, folder, processes, name, recomputed=False, dtype=None, groups=1):
    join_group(rank, folder, processes)
    dtype = dtype and getattr(torch, dtype)
    options = dict(recomputed=recomputed, dtype=dtype)
    images, targets, order = whole_batch(2, processes)
    model = make_model(name)
    reference = copy.deepcopy(model)
    names, sizes = (
        (("ep",), (processes,)) if groups == 1 else (("efsdp", "ep"), (groups, processes // groups))
    )
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    assert timm_moe.parallelize_experts(model, mesh["ep"]) is model
    experts = timm_moe.expert_parameters(model).values()
    assert all(parameter.to_local().shape[0] == 4 * groups // processes for parameter in experts)
    shard(model, mesh, processes)
    own = slice(rank * 16 // processes, (rank + 1) * 16 // processes)
    outputs, norm = train(model, images[own], targets[own], **options)
    expected, expected_norm = train(reference, images[order], targets[order], **options)
    tolerance = dict(rtol=1e-3, atol=1e-5) if dtype is None else dict(rtol=0.1, atol=0.02)
    expected = expected.view(3, 2, processes, -1, 5)[:, :, rank].flatten(0, 2)
    torch.testing.assert_close(outputs, expected, **tolerance)
    torch.testing.assert_close(norm, expected_norm, **tolerance)
    for path, tensor in get_model_state_dict(model, options=FULL).items():
        if rank == 0:
            torch.testing.assert_close(tensor, reference.state_dict()[path], **tolerance, msg=path)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("processes", [2, 4, 1])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.first_case
def test_training_is_that_of_one_process(tmp_path, name, processes):
    run_ranks(worker, (str(tmp_path), processes, name), processes)


@pytest.mark.ci
@pytest.mark.parametrize(("recomputed", "dtype"), [(True, None), (False, "bfloat16")])
def test_recomputed_and_under_autocast(tmp_path, recomputed, dtype):
    run_ranks(worker, (str(tmp_path), 2, "capacity", recomputed, dtype), 2)


@pytest.mark.ci
def test_with_experts_sharded_by_fsdp_too(tmp_path):
    run_ranks(worker, (str(tmp_path), 4, "capacity", False, None, 2), 4)


def saving_worker(rank, folder, processes):
    """Save at so many processes, or open what others saved."""
    join_group(rank, folder, processes)
    model = make_model("capacity")
    expected = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    parallel = timm_moe.parallelize_experts(
        copy.deepcopy(model), init_device_mesh("cpu", (processes,))
    )
    if processes == 4:
        parallel.load_state_dict({n: t + 1 for n, t in parallel.state_dict().items()})
        dcp.save({"model": parallel.state_dict()}, checkpoint_id=f"{folder}/../saved")
    else:
        state = {"model": parallel.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/../saved")
        parallel.load_state_dict(state["model"])
    whole = get_model_state_dict(parallel, options=FULL)
    if rank == 0:
        assert all(torch.equal(whole[name], tensor) for name, tensor in expected.items())
    torch.distributed.destroy_process_group()


@pytest.mark.ci
def test_a_checkpoint_of_four_processes_opens_in_one_and_two(tmp_path):
    for processes in (4, 2, 1):
        folder = tmp_path / str(processes)
        folder.mkdir()
        run_ranks(saving_worker, (str(folder), processes), processes)


def resuming_worker(rank, folder):
    """Make two steps, then two more by models and optimizers of their own.

    The latter start from the checkpoint of the first two.
    """
    join_group(rank, folder)
    images, targets, _ = whole_batch(1, 2)
    mesh, own = init_device_mesh("cpu", (2,)), slice(8 * rank, 8 * rank + 8)

    def two_steps(model, optimizer):
        for _ in range(2):
            (
                F.cross_entropy(model(images[own]), targets[own]) + timm_moe.auxiliary_loss(model)
            ).backward()
            optimizer.step()
            optimizer.zero_grad()

    def begin():
        model = timm_moe.parallelize_experts(make_model("sigmoid, bias"), mesh)
        shard(model, mesh, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = begin()
    two_steps(model, optimizer)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/saved")
    two_steps(model, optimizer)
    other, its_optimizer = begin()
    weights, moments = get_state_dict(other, its_optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    set_state_dict(
        other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    two_steps(other, its_optimizer)
    for (name, expected), resumed in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(local(expected), local(resumed)), name
    torch.distributed.destroy_process_group()


def local(tensor):
    return getattr(tensor, "to_local", lambda: tensor)()


@pytest.mark.ci
def test_resuming_goes_on_bit_for_bit(tmp_path):
    run_ranks(resuming_worker, (str(tmp_path),), 2)


def ewa_worker(rank, folder, processes, optimizer, name):
    """Each process trains its own expert on its own images.

    In one process, these are parts of the batch.
    """
    join_group(rank, folder, processes)
    torch.manual_seed(0)
    options = {
        "vit_tiny_ewa_moe": {},
        "vit_tiny_moe": dict(share_schedule="early", group_images=2),
    }[name]
    model = timm.create_model(
        name, expert_init="independent", **{**SMALL_VIT, "num_experts": processes, **options}
    )
    reference = copy.deepcopy(model)
    for layer in timm_moe.moe_layers(reference).values() if name == "vit_tiny_ewa_moe" else ():
        layer.router = InTurn(range(processes), held=1)
    mesh = init_device_mesh("cpu", (processes,))
    timm_moe.parallelize_experts(model, mesh)
    shard(model, mesh, processes)
    images, targets = (
        torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
        torch.arange(8) % 5,
    )
    for network, part in (
        (model, slice(rank * 8 // processes, (rank + 1) * 8 // processes)),
        (reference, slice(8)),
    ):
        steps = getattr(torch.optim, optimizer)(
            network.parameters(), lr=1e-3 if optimizer == "AdamW" else 0.1
        )
        timm_moe.ExpertWeightAveraging(network, steps, share_rate=0.3, total_updates=3)
        for _ in range(3):
            loss = F.cross_entropy(network(images[part]), targets[part]) + timm_moe.auxiliary_loss(
                network
            )
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            steps.step()
            steps.zero_grad()
    with torch.no_grad():
        close = dict(rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(model.eval()(images), reference.eval()(images), **close)
    for path, tensor in get_model_state_dict(model, options=FULL).items():
        torch.testing.assert_close(tensor, reference.state_dict()[path], **close, msg=path)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("processes", "optimizer", "name"),
    [
        (2, "SGD", "vit_tiny_ewa_moe"),
        (4, "AdamW", "vit_tiny_ewa_moe"),
        (2, "SGD", "vit_tiny_moe"),
    ],
)
@pytest.mark.first_case
def test_averaging_over_processes_is_that_of_one_process(tmp_path, processes, optimizer, name):
    run_ranks(ewa_worker, (str(tmp_path), processes, optimizer, name), processes)


def rows_worker(rank, folder, processes):
    """All rows go to experts of the last process; then a process has no rows of its own either."""
    join_group(rank, folder, processes)
    torch.manual_seed(0)
    layer = MoeMlp(Mlp(5, 6), TopKRouter(5, 4), "independent").double()
    whole = copy.deepcopy(layer)
    timm_moe.parallelize_experts(
        nn.ModuleDict({"mlp": layer}), init_device_mesh("cpu", (processes,))
    )
    for rows in (3, 0 if rank == 0 else 2):
        x = torch.randn(
            1, rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
        )
        routing = routing_to(
            torch.full((rows, 1), 3), torch.full((rows, 1), 0.5, dtype=torch.float64), 4
        )
        expected, y = whole(x, routing=routing), layer(x, routing=routing)
        torch.testing.assert_close(y, expected)
        layer.zero_grad(), whole.zero_grad()
        y.square().sum().backward()
        expected.square().sum().backward()
        for (name, stacked), (_, other) in zip(
            layer.named_expert_parameters(), whole.named_expert_parameters(), strict=True
        ):
            torch.distributed.all_reduce(other.grad)
            torch.testing.assert_close(stacked.grad.full_tensor(), other.grad / processes, msg=name)
    torch.distributed.destroy_process_group()


def test_processes_without_rows(tmp_path):
    run_ranks(rows_worker, (str(tmp_path), 2), 2)


def refusals(rank, folder):
    join_group(rank, folder)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("efsdp", "ep"))

    def refused(message, model, *args, act=timm_moe.parallelize_experts):
        with pytest.raises((ValueError, KeyError), match=message):
            act(model, *args)

    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    refused("no experts to parallelize", dense, mesh["ep"])
    refused(r"mesh, got 2: .*mesh\['ep'\]", make_model("capacity"), mesh)
    odd = timm.create_model("vit_tiny_moe", **{**SMALL_VIT, "num_experts": 3})
    before = copy.deepcopy(odd.state_dict())
    refused(r"2 processes .*3 experts in blocks\.1\.mlp", odd, mesh["ep"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in odd.state_dict().items())
    model = timm_moe.parallelize_experts(make_model("capacity"), mesh["ep"])
    refused(r"blocks\.1\.mlp .*already: .*parallelize_experts", model, mesh["ep"])
    refused("FSDP2.*get_model_state_dict", model, act=timm_moe.to_dense)
    refused(
        "FSDP2.*get_model_state_dict", model, f"{folder}/dense{rank}", act=timm_moe.export_dense
    )
    sharded = make_model("capacity")
    fully_shard(sharded, mesh=mesh["ep"])
    refused("already: .*parallelize_experts", sharded, mesh["ep"])
    torch.distributed.destroy_process_group()


def test_refusals(tmp_path):
    run_ranks(refusals, (str(tmp_path),), 2)
