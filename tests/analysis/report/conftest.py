"""Images for a report, and a report on two models."""

import pytest
import torch
from common import make_model, write_images
from observations import HERE

from timm_moe.analysis.data import image_folder
from timm_moe.analysis.report import write_report

#: A folder may have any name.
CLASSES = ["apple", "baby", "<script><b>chair", "dolphin", 'elephant "grey"']


@pytest.fixture(scope="session")
def splits(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), {"val": 4, "other": 2}, CLASSES)


@pytest.fixture(scope="session")
def report(splits, tmp_path_factory):
    """The page of two models."""
    folder = tmp_path_factory.mktemp("report")
    torch.manual_seed(0)
    images = image_folder(splits)
    models = [make_model("vit_tiny_moe", num_experts=4), make_model("vmoe_pbe_s32", num_experts=4)]
    return write_report(
        models, images, folder / "page", image_folder(splits, "other"), inference=HERE
    )
