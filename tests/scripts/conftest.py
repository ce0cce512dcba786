"""Shared by the tests of timm's own scripts."""

import pytest
from common import write_images


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Write a folder of images in three colours that are easily told apart.

    There are 72 to train on and 39 to test.
    """
    return write_images(tmp_path_factory.mktemp("images"), {"train": 24, "test": 13})
