"""Memory over thousands of steps of training; see CONTRIBUTING.md.

    python tests/stress/memory.py --steps 2000

Each model trains in a process of its own in a loop with timm's task and scheduler, on images that
route differently at each step. After each fifth of the steps, the first of which has made every
buffer, resident memory, tensors and the objects that Python's collector knows are counted. The exit
status is 1 if a model is found to grow from then on.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask

import timm_moe

VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=5)
MODELS = {
    "EWA": ("vit_tiny_ewa_moe", {}),
    "top-1": ("vit_tiny_moe", {}),
    "V-MoE": ("vmoe_s32", dict(num_experts=8)),
    "ViMoE": ("vimoe_s14_shared", dict(num_experts=4)),
    "WideNet": ("widenet_b", dict(mlp_ratio=2)),
    "pBE": ("vmoe_pbe_b32", dict(num_experts=4)),
}


@dataclass
class Sample:
    """What a process holds at a step; resident memory in MiB."""

    step: int
    resident: float
    tensors: int
    objects: int


def sample(step: int) -> Sample:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
    resident = (
        int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    )
    return Sample(step, resident, tensors, len(objects))


def train(name: str, steps: int, width: int = 32, batch: int = 16) -> list[Sample]:
    """Train so many steps; the last sample is taken after the last."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    architecture, options = MODELS[name]
    model = timm.create_model(architecture, **{**VIT, "embed_dim": width, **options}).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler, _ = create_scheduler_v2(
        optimizer, num_epochs=10, updates_per_epoch=max(1, steps // 10)
    )
    task = ClassificationTask(model, criterion=torch.nn.CrossEntropyLoss())
    taken = []
    for step in range(1, steps + 1):
        images, labels = torch.randn(batch, 3, 32, 32), torch.randint(5, (batch,))
        optimizer.zero_grad()
        task(images, labels)["loss"].backward()
        optimizer.step()
        scheduler.step_update(step)
        if step % max(1, steps // 10) == 0:
            scheduler.step(step * 10 // steps)
            model.eval()
            with torch.no_grad():
                model(images)
            model.train()
        if step % (steps // 5) == 0:
            taken.append(sample(step))
    return taken


#: Environments of glibc's malloc that are compared.
MALLOCS = {
    "default": {},
    "MALLOC_ARENA_MAX=1": {"MALLOC_ARENA_MAX": "1"},
    "MALLOC_TRIM_THRESHOLD_=0": {"MALLOC_TRIM_THRESHOLD_": "0"},
    "MALLOC_MMAP_THRESHOLD_=1048576": {"MALLOC_MMAP_THRESHOLD_": "1048576"},
    "MALLOC_MMAP_THRESHOLD_=65536": {"MALLOC_MMAP_THRESHOLD_": "65536"},
}


def grows(taken: list[Sample]) -> bool:
    """Tell if there are more tensors after the last step than after the first fifth.

    50 objects or 50 MiB are within what varies.
    """
    first, last = taken[0], taken[-1]
    more_objects, more_memory = last.objects - first.objects, last.resident - first.resident
    return last.tensors > first.tensors or more_objects > 50 or more_memory > 50


def in_process(name: str, steps: int, env: dict[str, str], *options: str) -> list[Sample]:
    command = [sys.executable, __file__, "--child", name, "--steps", str(steps), *options]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    samples = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("sample ")]
    return [
        Sample(int(step), float(resident), int(tensors), int(objects))
        for step, resident, tensors, objects in samples
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=32, help="of the model (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=16, help="images of a step (default: %(default)s)"
    )
    parser.add_argument(
        "--models", nargs="*", default=list(MODELS), choices=list(MODELS), help="(default: all)"
    )
    parser.add_argument("--mallocs", action="store_true", help="compare settings of glibc's malloc")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for taken in train(args.child, args.steps, width=args.width, batch=args.batch):
            print("sample", taken.step, taken.resident, taken.tensors, taken.objects)
        sys.exit()
    print(
        "| model | malloc | "
        + " | ".join(f"MiB at {args.steps * n // 5}" for n in range(1, 6))
        + " | tensors | objects | s |"
    )
    print("|---|---|" + "---:|" * 8)
    growing = []
    for name in args.models:
        for malloc, env in MALLOCS.items() if args.mallocs else [("default", {})]:
            begin = time.monotonic()
            taken = in_process(
                name, args.steps, env, "--width", str(args.width), "--batch", str(args.batch)
            )
            resident = " | ".join(f"{one.resident:.0f}" for one in taken)
            tensors, objects = (
                [getattr(one, what) for one in (taken[0], taken[-1])]
                for what in ("tensors", "objects")
            )
            counts = f"{tensors[0]} → {tensors[1]} | {objects[0]} → {objects[1]}"
            print(
                f"| {name} | {malloc} | {resident} | {counts} | {time.monotonic() - begin:.0f} |",
                flush=True,
            )
            growing += [f"{name} ({malloc})"] * grows(taken)
    print(f"timm_moe {timm_moe.__version__}, timm {timm.__version__}, torch {torch.__version__}")
    print(f"growing: {', '.join(growing) or 'none'}")
    sys.exit(bool(growing))
