"""A suite in one setting, in its own process: ``python -m benchmarks.worker SUITE SETTING`` prints JSON."""

import dataclasses
import importlib
import json
import sys

import torch

from .protocol import Row, Setting, environment


def main(suite: str, options: str) -> None:
    setting = Setting(**json.loads(options))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for row in importlib.import_module(f"benchmarks.{suite}").measure(setting):
        rows.append(row)
        print(f"  {_line(row)}", file=sys.stderr, flush=True)
    result = {
        "suite": suite,
        "setting": dataclasses.asdict(setting),
        "environment": environment(setting),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    json.dump(result, sys.stdout)


def _line(row: Row) -> str:
    gauge = "" if row.gauge is None else f", gauge {row.gauge:.3f}{'' if row.counts else ': too much noise'}"
    return (
        f"{row.contest}: {row.entry} {row.ratio:.3f} ({row.low:.3f}-{row.high:.3f}), {row.value:.4g} {row.unit}{gauge}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
