"""Train routed experts that are spread over processes, on scikit-learn's digits.

Called again, it goes on where it ended:

torchrun --nproc-per-node 2 examples/expert_parallel.py [EPOCHS]

In a clone, pip install ".[demo]" brings what it needs.
"""

import os
import sys
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import timm_moe
from timm_moe.analysis.demo import SMALL_VIT, load_images

MODEL = dict(model_name="vit_tiny_moe", num_experts=8, top_k=2, **SMALL_VIT)
BATCH_SIZE = 32  # of each process


def main(epochs: int = 10) -> None:
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    (images, labels), (test_images, test_labels) = load_images()

    torch.manual_seed(0)  # the same weights in all processes
    model = timm.create_model(**MODEL).to(device)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("ep",))["ep"]
    # Each process keeps its experts, and all process each other's rows.
    timm_moe.parallelize_experts(model, mesh)
    # FSDP2 shards what is not an expert.
    fully_shard(model, mesh=mesh, ignored_params=set(timm_moe.expert_parameters(model).values()))
    torch.manual_seed(1 + rank)  # each process draws its own noise and dropout
    # The optimizer comes last, since both calls replace parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)

    first = 0
    # .metadata is the last file that is written to a checkpoint.
    saved = max(Path("checkpoints").glob("*/.metadata"), default=None)
    if saved is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=saved.parent)  # saved by any number of processes
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        first = int(saved.parent.name)
        if rank == 0:
            print(f"resuming after epoch {first}", flush=True)

    for epoch in range(first, epochs):
        model.train()
        # The same in all processes; each takes its part.
        shuffle = torch.Generator().manual_seed(epoch)
        steps = len(images) // (BATCH_SIZE * world_size)
        for batch in torch.randperm(len(images), generator=shuffle)[rank::world_size].split(
            BATCH_SIZE
        )[:steps]:
            loss = nn.functional.cross_entropy(
                model(images[batch].to(device)), labels[batch].to(device)
            )
            optimizer.zero_grad()
            timm_moe.add_router_losses(model, loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():  # all processes, as each holds some experts
            accuracy = (
                (model(test_images.to(device)).argmax(1).cpu() == test_labels).float().mean().item()
            )
        if rank == 0:
            print(f"epoch {epoch + 1}: top-1 {100 * accuracy:.1f} %", flush=True)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save(
            {"model": weights, "optimizer": moments}, checkpoint_id=f"checkpoints/{epoch + 1:03}"
        )

    # All processes take part. The first one gets the whole weights and loads them into a model of
    # its own.
    weights = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        whole = timm.create_model(**MODEL)
        whole.load_state_dict(weights)
        print(timm_moe.export_dense(whole, "exported", "average", overwrite=True))
    dist.barrier()  # a process that ends while gloo's threads still release tensors is aborted
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
