"""A suite in one setting, in its own process.

``python -m benchmarks.worker SUITE SETTING FILE`` writes to the results in FILE.

It writes after each contest, so that what is killed loses little. Its last line is the number of
contests whose figures there are.
"""

import dataclasses
import datetime
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from .machine import versions
from .protocol import Contest, Row, Setting, run


def main(suite: str, options: str, file: str, until: str = "") -> None:
    """Measure a suite.

    With ``until``, in seconds since 1970, only contests are measured that are missing, and that
    begin early enough to end before it.
    """
    stated, path = json.loads(options), Path(file)
    setting = Setting(**stated)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    result = begin(suite, stated, path)
    if not until:
        result["rows"] = []
    result["whole"] = False
    known = _contests(result)
    names, failed = set(), []
    try:
        for found in importlib.import_module(f"benchmarks.{suite}").measure(setting):
            name = found.name if isinstance(found, Contest) else found.contest
            names.add(name)
            if isinstance(found, Contest) and (name in known or _is_late(found, until)):
                continue
            try:
                rows = run(found, setting) if isinstance(found, Contest) else [found]
            except Exception:  # the others do not depend on it
                traceback.print_exc()
                failed.append(name)
                continue
            for row in rows:
                _add(row, result)
                print(f"  {_line(row)}", file=sys.stderr, flush=True)
            _store(suite, stated, path, result)
    finally:
        measured = names & _contests(result)
        print(f"{len(measured)} of {len(names)} contests", file=sys.stderr, flush=True)
    if measured == names:
        _store(suite, stated, path, {**result, "whole": True})
    if failed:
        sys.exit(f"Not measured, see above: {', '.join(failed)}.")


def _contests(result: dict[str, Any]) -> set[str]:
    return {row["contest"] for row in result["rows"]}


def _is_late(contest: Contest, until: str) -> bool:
    return bool(until) and time.time() + contest.seconds > float(until)


def _add(row: Row, result: dict[str, Any]) -> None:
    """Add a figure, in the place of an older one."""
    new = (row.contest, row.entry)
    others = [old for old in result["rows"] if (old["contest"], old["entry"]) != new]
    result["rows"] = [*others, dataclasses.asdict(row)]


def begin(suite: str, stated: dict[str, Any], path: Path) -> dict[str, Any]:
    """Make the result of a suite.

    It has the figures that this machine had with this setting and these versions.
    """
    setting = dataclasses.asdict(Setting(**stated))
    place = {**versions(setting["device"]), "date": datetime.date.today().isoformat()}
    old = _read(path).get(_key(suite, stated), {})
    is_same = (
        old.get("setting") == setting and {**old["environment"], "date": place["date"]} == place
    )
    kept = (
        {"rows": old["rows"], "whole": old.get("whole", False)}
        if is_same
        else {"rows": [], "whole": False}
    )
    return {"suite": suite, "setting": setting, "environment": place, **kept}


def _store(suite: str, stated: dict[str, Any], path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**_read(path), _key(suite, stated): result}, indent=1))
    temporary.replace(path)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _key(suite: str, stated: dict[str, Any]) -> str:
    return " ".join(
        [suite, *(str(stated[name]) for name in ("dtype", "mode", "allocator") if name in stated)]
    )


def _line(row: Row) -> str:
    gauge = (
        ""
        if row.gauge is None
        else f", gauge {row.gauge:.3f}{'' if row.counts else ': too much noise'}"
    )
    return (
        f"{row.contest}: {row.entry} {row.ratio:.3f} ({row.low:.3f}-{row.high:.3f}), "
        f"{row.value:.4g} {row.unit}{gauge}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
