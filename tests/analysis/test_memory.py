"""Memory of the measurements: a batch leaves numbers behind and no tensor of its own.

Small tensors of every batch would lie between the large ones that are freed, whose memory then is not given back.
"""

import gc

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchmetrics")
from timm_moe.analysis.evaluation import Figures


def tensors():
    gc.collect()
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("members", [1, 3])
def test_figures(members):
    figures = Figures(5)

    def run(batches):
        for _ in range(batches):
            log_p = torch.randn(4, members, 5, dtype=torch.float64).log_softmax(2)
            figures.update(log_p, torch.randint(5, (4,)))
            figures.update_ood(log_p)

    run(2)
    before = tensors()
    run(20)
    assert tensors() == before
    assert figures.result()["images"] == figures.result()["ood_images"] == 88
