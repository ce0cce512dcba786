"""Export of a ViT-L with 4 experts every-2, compared with writing the dense model's bytes.

Each runs in its own process.
"""

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
from torch import nn

import timm_moe
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.convert.dense import to_dense_

from .protocol import Row, Setting

MODEL = "vit_large_ewa_moe"


def measure(setting: Setting) -> Iterator[Row]:
    """Measure CPU time and peak memory.

    The time includes copies to the page cache. The memory is without mapped files.
    """
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "last.pth.tar")
        _in_a_process("train", checkpoint, folder)
        runs = [
            {name: _in_a_process(name, checkpoint, folder) for name in TITLES}
            for _ in range(setting.rounds)
        ]
    for name, title in TITLES.items():
        low, ratio, high = statistics.quantiles(
            [run[name]["seconds"] / run["write"]["seconds"] for run in runs], n=4
        )
        seconds = statistics.median(run[name]["seconds"] for run in runs)
        yield Row("time", title, ratio, low, high, seconds, "s")
    for name in ("convert", "export"):
        low, ratio, high = statistics.quantiles(
            [run[name]["peak"] / run[name]["allowed"] for run in runs], n=4
        )
        peak = statistics.median(run[name]["peak"] for run in runs)
        yield Row(
            "peak memory / that of the model and one layer",
            TITLES[name],
            ratio,
            low,
            high,
            peak / 2**20,
            "MiB",
        )


def train(checkpoint: Path, folder: str, memory: "_Peak") -> dict[str, float]:
    torch.save({"arch": MODEL, "state_dict": timm.create_model(MODEL).state_dict()}, checkpoint)
    return {}


def write(checkpoint: Path, folder: str, memory: "_Peak") -> dict[str, float]:
    """Only write the dense weights with safetensors."""
    dense = to_dense_(timm.create_model(MODEL)).state_dict()
    start = time.process_time()
    save_file(dense, Path(folder, "written.safetensors"))
    return {"seconds": time.process_time() - start}


def convert(checkpoint: Path, folder: str, memory: "_Peak") -> dict[str, float]:
    """Average the experts and write the result, without reading it back and comparing outputs."""
    model = timm.create_model(MODEL)
    _, layer = _sizes(model)
    allowed = memory.restart() + layer
    start = time.process_time()
    save_file(to_dense_(model).state_dict(), Path(folder, "written.safetensors"))
    return {"seconds": time.process_time() - start, "allowed": allowed}


def export(checkpoint: Path, folder: str, memory: "_Peak") -> dict[str, float]:
    start = time.process_time()
    spec = ModelSpec(name=MODEL)
    timm_moe.export_dense(checkpoint, Path(folder, "exported"), spec=spec, overwrite=True)
    seconds = time.process_time() - start
    with torch.device("meta"):
        return {"seconds": seconds, "allowed": sum(_sizes(timm.create_model(MODEL)))}


WORKS = {"train": train, "write": write, "convert": convert, "export": export}
TITLES = {
    "write": "safetensors alone",
    "convert": "average and write",
    "export": "export_dense: read the checkpoint, average, write, load with timm, compare outputs",
}


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Count the bytes of the model and of its largest expert layer."""
    parts = [model, *timm_moe.moe_layers(model).values()]
    whole, *layers = [sum(parameter.nbytes for parameter in part.parameters()) for part in parts]
    return whole, max(layers)


def _in_a_process(work: str, checkpoint: Path, folder: str) -> dict[str, float]:
    print(f"  {work} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.exporting", work, str(checkpoint), folder]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


class _Peak(threading.Thread):
    """Watches the anonymous memory of this process, relative to its start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.at_first = _anonymous_bytes()
        self.bytes = 0
        self.start()

    def restart(self) -> int:
        """Reset the peak; returns the bytes in use now."""
        self.bytes = _anonymous_bytes() - self.at_first
        return self.bytes

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, _anonymous_bytes() - self.at_first)
            time.sleep(0.005)


def _anonymous_bytes() -> int:
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    memory = _Peak()
    result = WORKS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3], memory)
    print(json.dumps({**result, "peak": memory.bytes}))
