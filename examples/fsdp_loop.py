"""Train experts sharded by FSDP2, on scikit-learn's digits:

torchrun --nproc-per-node 2 examples/fsdp_loop.py [EPOCHS]

In a clone, pip install ".[demo]" brings what it needs.
"""

import os
import sys

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import timm_moe
from timm_moe.analysis.demo import SMALL_VIT, load_images

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

    # The same weights in all processes; a large model stays on the CPU until it is sharded.
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
    sharding = dict(
        mesh=init_device_mesh(device.type, (world_size,)),
        # Each process averages its part of all experts.
        shard_placement_fn=timm_moe.expert_placement(model),
    )
    for block in model.blocks:
        fully_shard(block, **sharding)
    fully_shard(model, **sharding)

    steps = len(images) // (BATCH_SIZE * world_size)
    # The optimizer comes after fully_shard, which replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    timm_moe.start_averaging(model, optimizer, total_updates=epochs * steps)
    shuffle = torch.Generator().manual_seed(0)  # the same in all processes; each takes its part
    torch.manual_seed(1 + rank)  # each process draws its own partitions
    for epoch in range(epochs):
        model.train()
        for batch in torch.randperm(len(images), generator=shuffle)[rank::world_size].split(
            BATCH_SIZE
        )[:steps]:
            loss = nn.functional.cross_entropy(
                model(images[batch].to(device)), labels[batch].to(device)
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (
                (model(test_images.to(device)).argmax(1).cpu() == test_labels).float().mean().item()
            )
        if rank == 0:
            print(f"epoch {epoch + 1}: top-1 {100 * accuracy:.1f} %")

    # All processes take part. The first one gets the whole weights and loads them into an unsharded
    # model.
    weights = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        whole = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
        whole.load_state_dict(weights)
        print(timm_moe.export_dense(whole, "exported", overwrite=True))
    dist.barrier()  # a process that ends while gloo's threads still release tensors is aborted
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
