"""The benefit of experts that a dense student keeps (OneS)."""


def moe_benefits(student: float, teacher: float, dense: float) -> float:
    """Share of the accuracy gained by experts that a dense student keeps (OneS, arXiv 2201.10890, section 4.1).

    All are accuracies: the teacher's with experts, its student's, and a dense model's that was trained alone.

    Raises:
        ValueError: if the teacher is not better than the dense model.
    """
    if not teacher > dense:
        raise ValueError(
            f"The teacher's accuracy of {teacher:.2%} is not above the dense model's {dense:.2%}: its experts bring "
            "nothing that a student could keep."
        )
    return (student - dense) / (teacher - dense)
