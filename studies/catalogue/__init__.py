"""All studies, one file for each."""

from ..study import Study
from . import (
    ablations,
    confirmation,
    ensembles,
    finetuning,
    nearest,
    recipe,
    routers,
    routing,
    scratch,
    search,
    students,
    vimoe,
    widenet,
)

_MODULES = (
    *(scratch, search, confirmation, finetuning),
    *(recipe, nearest, routers, routing, ablations, vimoe, widenet, students, ensembles),
)
STUDIES: dict[str, Study] = {module.STUDY.name: module.STUDY for module in _MODULES}
