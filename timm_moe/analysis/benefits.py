"""Share that a dense student keeps of the accuracy that experts bring.

It is the measure of OneS (arXiv 2201.10890, section 4.1).
"""


def benefits_kept(student: float, teacher: float, dense: float) -> float:
    """Divide the gain of a student over the dense model by the gain of its teacher.

    The teacher is the model with experts.

    Args:
        student: top-1 accuracy of the student, from 0 to 1, as the others.
        teacher: top-1 accuracy of the model that the student learns from.
        dense: top-1 accuracy of the same dense model, trained without a teacher.

    Raises:
        ValueError: if the teacher is not better than the dense model.
    """
    if not teacher > dense:
        raise ValueError(
            f"The teacher's accuracy of {teacher:.2%} is not above the dense model's {dense:.2%}: "
            "its experts bring nothing that a student could keep."
        )
    return (student - dense) / (teacher - dense)
