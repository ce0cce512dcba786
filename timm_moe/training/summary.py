"""The table ``summary.csv`` of train.py, in which each row is an epoch."""

import csv
from collections.abc import Collection
from pathlib import Path

from ..console import describe
from ..files import read_text, require_file

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
        left out, as is the second head that a resumed run writes. Rows of an earlier run in the
        same folder are kept.

    Raises:
        DamagedTable: if the file is not such a table.
        ValueError: if it leads out of the folder.
        OSError: if it is a pipe or a device.
    """
    file = folder / FILE
    if not file.exists():
        return []
    require_file(file, folder)
    try:
        return [
            {name: float(row[name]) for name in ("epoch", *columns) if row.get(name)}
            for row in csv.DictReader(read_text(file).splitlines())
            if (row.get("epoch") or "").isdecimal()
        ]
    except (ValueError, csv.Error) as error:
        raise DamagedTable(
            f"{file} is damaged: it is not the table that train.py writes ({describe(error)})."
        ) from error
