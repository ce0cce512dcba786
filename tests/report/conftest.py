"""Images for a report, and a report on two models."""

import numpy as np
import pytest
import torch
from observations import HERE, make_model
from PIL import Image

from timm_moe.analysis.data import image_folder
from timm_moe.report import write_report

#: A folder may have any name.
CLASSES = ["apple", "baby", "<script><b>chair", "dolphin", 'elephant "grey"']


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for split, number in (("val", 4), ("other", 2)):
        for label, name in enumerate(CLASSES):
            place = folder / split / name.replace("/", "")
            place.mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, 90, (32, 32, 3)) + 30 * label
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{index}.png")
    return folder


@pytest.fixture(scope="session")
def report(data, tmp_path_factory):
    """The page of two models, of which one was trained by timm's loop."""
    folder = tmp_path_factory.mktemp("report")
    torch.manual_seed(0)
    images = image_folder(data)
    models = [make_model("vit_tiny_moe", num_experts=4), make_model("vmoe_pbe_s32", num_experts=4)]
    return write_report(models, images, folder / "page", image_folder(data, "other"), inference=HERE)
