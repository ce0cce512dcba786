"""Memory of a pass over images: a batch leaves rows of numbers behind, and no tensor of its own.

Small tensors of every batch would lie between the large ones that are freed, whose memory then is
not given back.
"""

import gc
import importlib

import pytest
import torch
from common import make_model, write_images
from torch import Tensor

pytest.importorskip("torchmetrics")
from timm_moe.analysis.data import Inference, image_folder
from timm_moe.analysis.evaluation import Figures, evaluate
from timm_moe.analysis.fewshot import Folder, fewshot
from timm_moe.analysis.routes.statistics import collect_routes
from timm_moe.analysis.rows import Rows

BY_ONE = Inference(batch_size=1, workers=0, device="cpu")
IMAGES = 20


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return image_folder(
        write_images(tmp_path_factory.mktemp("data"), {"val": IMAGES // 2}, ["a", "b"])
    )


def tensors():
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


class Counter:
    """Count the tensors at the beginning of some forwards of a model.

    These are so late that what is kept once is there.
    """

    def __init__(self, model, forwards=(IMAGES - 8, IMAGES - 1)):
        self.done, self.found, self.forwards = 0, [], forwards
        model.register_forward_pre_hook(self.count)

    def count(self, *_):
        if self.done in self.forwards:
            self.found.append(tensors())
        self.done += 1


def evaluated(model, images):
    evaluate([model], images, inference=BY_ONE)


def evaluated_on_other_data(model, images):
    evaluate([model], images, images, inference=BY_ONE)


def observed(model, images):
    pytest.importorskip("altair")
    observe = importlib.import_module("timm_moe.analysis.report.observe")
    with pytest.MonkeyPatch.context() as patch:  # what is shown is found early
        patch.setattr(observe, "SHOWN", 1)
        patch.setattr(observe, "SUREST", 1)
        observe.observe(model, "it", images, None, BY_ONE)


def routed(model, images):
    collect_routes(model, images, BY_ONE)


@pytest.mark.parametrize("run", [evaluated, evaluated_on_other_data, routed, observed])
@pytest.mark.first_case
def test_a_batch_leaves_no_tensor(run, images):
    model = make_model("vit_tiny_moe", num_experts=2, num_classes=2)
    counter = Counter(model)
    run(model, images)
    assert counter.found[1] <= counter.found[0]


def test_few_shots_keep_the_features(images):
    model = make_model("vit_tiny_moe", num_experts=2, num_classes=2)
    counter = Counter(model.blocks[0], (IMAGES + 5, 2 * IMAGES - 3))  # of the test images
    (result,) = fewshot([model], [Folder("it", images, images)], [IMAGES // 2], 1, inference=BY_ONE)
    assert result.accuracy == 1
    assert counter.found[1] <= counter.found[0]


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.first_case
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


def test_rows():
    rows, batches = Rows(), [torch.randn(number, 3).double() for number in (2, 0, 7, 1, 40)]
    for number, batch in enumerate(batches):
        with torch.inference_mode(number % 2 == 0):
            rows.add(batch)
    assert torch.equal(rows.tensor(), torch.cat(batches))
    assert len(rows) == 50
    assert len(Rows().tensor()) == len(Rows()) == 0
