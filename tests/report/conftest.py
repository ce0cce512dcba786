"""Images for a report, and a report on two models."""

import pytest
import torch
from observations import HERE, make_model, write_images

from timm_moe.analysis.data import image_folder
from timm_moe.report import write_report

#: A folder may have any name.
CLASSES = ["apple", "baby", "<script><b>chair", "dolphin", 'elephant "grey"']


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "val", CLASSES, [4] * 5)
    write_images(folder / "other", CLASSES, [2] * 5)
    return folder


@pytest.fixture(scope="session")
def report(data, tmp_path_factory):
    """The page of two models."""
    folder = tmp_path_factory.mktemp("report")
    torch.manual_seed(0)
    images = image_folder(data)
    models = [make_model("vit_tiny_moe", num_experts=4), make_model("vmoe_pbe_s32", num_experts=4)]
    return write_report(models, images, folder / "page", image_folder(data, "other"), inference=HERE)
