"""The studies, one file for each."""

from ..study import Study
from . import scratch

STUDIES: dict[str, Study] = {study.name: study for study in (scratch.STUDY,)}
