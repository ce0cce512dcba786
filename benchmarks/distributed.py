"""Bytes and memory of experts over processes: docs/generated/distributed.md.

They are counted by formulas, not timed.

A step of each process is that of a GPU, where an expert has equally many slots in each process.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from timm_moe import moe_layers
from timm_moe.convert.expert_layers import parameters, parameters_of_an_expert
from timm_moe.layers.queues import expert_capacity
from timm_moe.models.registered import weightless_model

PAGE = Path(__file__).parent.parent / "docs" / "generated" / "distributed.md"
MODELS = {
    "V-MoE-S/32": ("vmoe_s32", {}),
    "V-MoE-L/16": ("vmoe_l16", dict(moe_layers="every-2")),
}
IMAGES = 64  # of each process
ADAMW = 16  # bytes of a parameter in float32: itself, its gradient, two moments


@dataclass(frozen=True)
class Sizes:
    """Sizes of an expert model.

    Attributes:
        layers: expert layers.
        experts: E.
        width: D.
        expert: parameters of an expert.
        rest: parameters that are no expert's.
        tokens: rows of an image.
        router: of the first layer.
    """

    layers: int
    experts: int
    width: int
    expert: int
    rest: int
    tokens: int
    router: Any

    @classmethod
    def of(cls, model: nn.Module, tokens: int) -> "Sizes":
        layers: list[Any] = list(moe_layers(model).values())
        expert = parameters_of_an_expert(layers[0])
        rest = parameters(model) - expert * layers[0].num_experts * len(layers)
        width = layers[0].stacked_shapes["fc1.weight"][2]
        return cls(
            len(layers), layers[0].num_experts, width, expert, rest, tokens, layers[0].router
        )

    def slots(self, images: int) -> int:
        """Return the capacity of an expert: its slots for the rows of a process."""
        choices = images * self.tokens * self.router.top_k
        rounding, multiple = self.router.capacity_rounding, self.router.capacity_multiple
        return expert_capacity(
            choices, self.experts, self.router.capacity_factor, rounding, multiple
        )

    def all_to_all(self, images: int, processes: int, itemsize: int = 4) -> int:
        """Return the bytes that a process sends to others for a layer and step.

        Each element of the rows, outputs and gradients has ``itemsize`` bytes.

        Rows, outputs, and the gradients of both go once each, with a spare slot of each expert. The
        numbers of rows go before them, in 8 bytes.
        """
        elsewhere = self.experts - self.experts // processes
        return elsewhere * (4 * itemsize * self.width * (self.slots(images) + 1) + 8)

    def by_fsdp(self, processes: int) -> int:
        """Return the bytes that a process sends for a layer and step with FSDP2.

        FSDP2 gathers all experts twice and scatters their gradients.
        """
        return 3 * 4 * self.experts * self.expert * (processes - 1) // processes

    def all_reduce(self, processes: int, experts: int = 1) -> int:
        """Return the bytes that a process sends for a layer and step in a ring.

        The ring adds up EWA's means of the weights, or DDP's gradients.
        """
        return 2 * 4 * experts * self.expert * (processes - 1) // processes

    def memory(self, processes: int) -> int:
        """Return the bytes of parameters, gradients and AdamW's states in a process.

        The processes share all of them evenly.
        """
        return ADAMW * (self.experts * self.expert * self.layers + self.rest) // processes


def published() -> dict[str, Sizes]:
    """Return the sizes of the published models, for images of 224 pixels."""
    models = {name: weightless_model(model, **options) for name, (model, options) in MODELS.items()}
    return {name: Sizes.of(model, int(model.pos_embed.shape[1])) for name, model in models.items()}  # type: ignore


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def page() -> str:
    """Write the page: bytes and memory at 1, 2 and 4 processes, and a plan for 64."""
    sizes = published()
    each = [(name, size, processes) for name, size in sizes.items() for processes in (1, 2, 4)]
    routed = [
        (
            name,
            processes,
            f"{IMAGES * size.tokens:,}",
            f"{size.slots(IMAGES) * size.experts:,}",
            *map(mega, (size.all_to_all(IMAGES, processes), size.by_fsdp(processes))),
            mega(size.all_reduce(processes, size.experts)),
            giga(size.memory(processes)),
        )
        for name, size, processes in each
    ]
    ewa = [
        (
            name,
            processes,
            mega(size.all_reduce(processes)),
            mega(size.all_reduce(processes, processes)),
        )
        for name, size, processes in each
    ]
    large = sizes["V-MoE-L/16"]
    plan = [
        (
            f"efsdp {64 // ep}, ep {ep}",
            large.experts // ep,
            mega(large.all_to_all(IMAGES, ep) * 7 / (ep - 1)),
            mega(large.all_to_all(IMAGES, ep) * (ep - 8) / (ep - 1) + large.by_fsdp(64 // ep) / ep),
        )
        for ep in (8, 16, 32)
    ]
    slots = large.slots(IMAGES)
    flops = 3 * 4 * large.width * 4 * large.width  # of a slot in forward and backward
    sent = 2 * 8 * large.width  # bytes of a slot
    return TEXT.format(
        routed=table(
            ("model", "processes", "rows", "slots", "all-to-all", "FSDP2", "DDP", "memory"), routed
        ),
        ewa=table(
            ("network of", "processes", "EWA over processes, or DDP of one", "DDP of all experts"),
            ewa,
        ),
        plan=table(("mesh", "experts of a process", "inside nodes", "between nodes"), plan),
        images=IMAGES,
        layers=", ".join(f"{size.layers} layers in {name}" for name, size in sizes.items()),
        flops=f"{flops / 1e6:.0f}",
        sent=f"{sent / 1e3:.0f}",
        need=f"{0.5 * sent / flops * 4e14 / 1e9:.0f}",
        computing=f"{large.experts * slots * flops / 4e11:.1f}",
        gathering=f"{large.by_fsdp(8) / 8 / 5e7:.1f}",
        message=f"{slots * large.width * 4 / 1e6:.1f}",
        memory=giga(large.memory(64)),
    )


def mega(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def giga(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def write() -> None:
    PAGE.write_text(page())


TEXT = """# Experts over processes: bytes and memory

`python -m benchmarks distributed` writes this page. The figures are counted, not timed.
`tests/benchmarks/test_distributed.py` compares the formulas with the bytes of 2 and 4 processes.
Nothing here was run on a GPU.

## Routed experts

Each process has {images} images of 224 pixels. There are 32 experts in each of {layers}. Bytes are
those that a process sends for one layer and step, in float32. Under bfloat16 autocast all-to-all
sends half of them. Slots are the rows that the experts of a process compute; they do not depend on
the number of processes. Memory is that of parameters, gradients and AdamW's states in a process,
with `fully_shard` of the rest; activations come on top.

{routed}
FSDP2 gathers all experts in forward and backward, and scatters their gradients. DDP sums all
gradients, and in each process needs the memory of one process.

## EWA

A process trains E / R experts and after each step adds up the means: one network for each layer.
DDP of a dense model sends as much for its gradients. Bytes are for a layer and step; the last
column has as many experts as processes.

{ewa}
## A plan for 64 GPUs

On paper: V-MoE-L/16, 8 nodes of 8 GPUs, {images} images a GPU. `ep` is the inner dimension of the
mesh, so that 8 processes of it are in one node. `efsdp` shards the experts of a process over the
others that hold the same ones. Bytes are for a layer and step, in float32, and leave out the rest
of the model. Memory is {memory} a GPU at any of them.

{plan}
- A slot costs {flops} MFLOP in forward and backward, and {sent} kB of sending in float32, half of
  that in bfloat16. At 400 TFLOP/s in bfloat16, sending takes as long as computing at {need} GB/s.
  Inside a node an H100 has 450 GB/s, between nodes 50 GB/s (data sheets). So scaling stops where
  all-to-all leaves the node, unless it overlaps with computing, which the dispatcher does not do:
  take ep 8.
- At ep 8 a layer computes for {computing} ms, and efsdp's part takes {gathering} ms between nodes,
  whatever the number of images. FSDP2 gathers ahead, so more images a GPU hide it, and half the
  bytes go in bfloat16.
- More than E = 32 processes cannot share a layer's experts: further ones are efsdp's.
- All-to-all sends nearly as much at any `ep`, but in smaller messages: {message} MB each at ep 32,
  in proportion to the images. The host waits once a layer for the numbers of rows.
"""
