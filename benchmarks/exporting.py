"""Export of a ViT-L with 4 experts every-2 beside writing the dense model's bytes, each in a process of its own."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

import timm_moe
from timm_moe.callbacks.source import ModelSpec
from timm_moe.convert import to_dense_

from .protocol import Row, Setting

MODEL = "vit_large_ewa_moe"
RUNS = 3


def measure(setting: Setting) -> Iterator[Row]:
    """CPU time, in which copying to the system's page cache counts, and peak of the memory that is not a file's."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "last.pth.tar")
        _in_a_process("train", checkpoint, folder)
        runs = {name: [_in_a_process(name, checkpoint, folder) for _ in range(RUNS)] for name in TITLES}
    baseline = [run["seconds"] for run in runs["write"]]
    for name in runs:
        times = [run["seconds"] for run in runs[name]]
        ratios = [a / b for a, b in zip(times, baseline, strict=True)]
        seconds = statistics.median(times)
        yield Row("time", TITLES[name], statistics.median(ratios), min(ratios), max(ratios), seconds, "s")
    bytes_of = runs["write"][0]["bytes"]
    for name in ("convert", "export"):
        peak = statistics.median(run["peak"] for run in runs[name])
        ratio = peak / (bytes_of["model"] + bytes_of["layer"])
        yield Row(
            "peak memory / that of the model and one layer", TITLES[name], ratio, ratio, ratio, peak / 2**20, "MiB"
        )


def train(checkpoint: Path, folder: str) -> None:
    model = timm.create_model(MODEL)
    torch.save({"arch": MODEL, "state_dict": model.state_dict()}, checkpoint)


def write(checkpoint: Path, folder: str) -> dict[str, float]:
    """Write the dense weights with safetensors, nothing else."""
    model = timm.create_model(MODEL)
    layers = timm_moe.moe_layers(model).values()
    sizes = {"model": _bytes(model.parameters()), "layer": max(_bytes(layer.parameters()) for layer in layers)}
    dense = timm_moe.to_dense(model).state_dict()
    start = time.process_time()
    save_file(dense, Path(folder, "written.safetensors"))
    return {"seconds": time.process_time() - start, "bytes": sizes}


def convert(checkpoint: Path, folder: str) -> dict[str, float]:
    """Average the experts and write the result: an export without reading it back and comparing outputs."""
    model = timm.create_model(MODEL)
    start = time.process_time()
    save_file(to_dense_(model).state_dict(), Path(folder, "written.safetensors"))
    return {"seconds": time.process_time() - start}


def export(checkpoint: Path, folder: str) -> dict[str, float]:
    start = time.process_time()
    spec = ModelSpec(name=MODEL)
    timm_moe.export_dense(checkpoint, Path(folder, "exported"), spec=spec, overwrite=True)
    return {"seconds": time.process_time() - start}


WORKS = {"train": train, "write": write, "convert": convert, "export": export}
TITLES = {
    "write": "safetensors alone",
    "convert": "average and write",
    "export": "export_dense: read the checkpoint, average, write, load with timm, compare outputs",
}


def _bytes(parameters) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _in_a_process(work: str, checkpoint: Path, folder: str) -> dict[str, float]:
    print(f"  {work} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.exporting", work, str(checkpoint), folder]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


class _Peak(threading.Thread):
    """Watches the anonymous memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes = self.bytes = _anonymous_bytes()

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, _anonymous_bytes())
            time.sleep(0.005)


def _anonymous_bytes() -> int:
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    peak = _Peak()
    peak.start()
    result = WORKS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3]) or {}
    print(json.dumps({**result, "peak": peak.bytes - peak.start_bytes}))
