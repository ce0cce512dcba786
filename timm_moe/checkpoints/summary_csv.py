"""The table ``summary.csv`` of train.py, in which each row is an epoch."""

import csv
from collections.abc import Collection
from pathlib import Path

from ..console import describe
from ..files import require_inside

FILE = "summary.csv"


class DamagedTable(ValueError):
    """Error of a file that is not the table which train.py writes."""


def read_summary(folder: Path, columns: Collection[str]) -> list[dict[str, float]]:
    """Read the rows of train.py's table in the order of the file.

    Args:
        folder: the run's folder, out of which the table must not lead.
        columns: names of the columns to read, beside ``epoch``.

    Returns:
        The numbers of each row by column; none if there is no table. A value that is not there is
        left out. Rows of an earlier run in the same folder are kept, each read by the head above
        it: a resumed run writes another one, whose columns may differ.

    Raises:
        DamagedTable: if the file is not such a table.
        ValueError: if it leads out of the folder.
    """
    file = folder / FILE
    if not file.exists():
        return []
    require_inside(file, folder)
    rows: list[dict[str, float]] = []
    head: list[str] = []
    try:
        for values in csv.reader(file.read_text(encoding="utf-8").splitlines()):
            if "epoch" in values:
                head = values
                continue
            row = dict(zip(head, values, strict=False))  # the last row may be cut
            if row.get("epoch", "").isdecimal():
                rows.append(
                    {name: float(row[name]) for name in ("epoch", *columns) if row.get(name)}
                )
        return rows
    except (ValueError, csv.Error) as error:
        raise DamagedTable(
            f"{file} is damaged: it is not the table that train.py writes ({describe(error)})."
        ) from error
