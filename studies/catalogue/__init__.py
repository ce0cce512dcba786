"""All studies, one file for each."""

from ..study import Study
from . import (
    ablations,
    adamw,
    confirmation,
    ensembles,
    finetuning,
    near,
    nearest,
    recipe,
    routers,
    routing,
    scratch,
    search,
    students,
    twenty,
    vimoe,
    widenet,
)

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        scratch.STUDY,
        search.STUDY,
        confirmation.STUDY,
        finetuning.STUDY,
        recipe.STUDY,
        near.STUDY,
        nearest.STUDY,
        twenty.STUDY,
        twenty.PILOT,
        adamw.STUDY,
        routers.STUDY,
        routing.STUDY,
        ablations.STUDY,
        vimoe.STUDY,
        widenet.STUDY,
        students.STUDY,
        ensembles.STUDY,
    )
}
