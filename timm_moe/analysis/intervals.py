"""Student's interval of the mean of some values."""

import math
from collections.abc import Sequence

from scipy.stats import sem, t

CONFIDENCE = 0.95


def half_width(values: Sequence[float]) -> float:
    """Compute half the 95 % interval of the mean; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * sem(values))
