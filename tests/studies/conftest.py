"""Images for studies."""

import pytest
from PIL import Image


@pytest.fixture
def folder(tmp_path):
    """Two classes of a few images of 8 pixels."""
    for split, number in (("train", 12), ("test", 6)):
        for shade, name in enumerate(("dark", "light")):
            (tmp_path / "all" / split / name).mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (8, 8), (100 * shade + index,) * 3).save(
                    tmp_path / "all" / split / name / f"{index:02}.png"
                )
    return tmp_path
