"""Shared by all tests: models small enough to train in a second, and one thread so that results repeat."""

import logging
import shutil

import numpy as np
import pytest
import timm
import torch
from common import DATA, SMALL_VIT
from hypothesis import settings

import timm_moe  # noqa: F401  (registers the models)

settings.register_profile("timm_moe", deadline=None)  # a busy machine is no failure
settings.load_profile("timm_moe")

SLOWEST = (
    "test_documents",
    "test_train_script",
    "test_hub",
    "test_autoload",
    "test_train_options",
    "test_transformers",
    "test_models",
)
CI_FILE = "\npytestmark = [pytest.mark.ci"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of a file run in one worker, which shares what they make; the slowest files first, so that none is last."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    return LoadScopeScheduling(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST))


def pytest_ignore_collect(collection_path, config):
    """Where the mark ci is left out, files whose tests all have it are not even imported, which takes seconds."""
    if collection_path.suffix == ".py" and "not ci" in config.option.markexpr:
        return CI_FILE in collection_path.read_text() or None
    return None


@pytest.fixture(autouse=True)
def repeatable():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def quiet():
    """timm's scripts and the command line set up logging for their process, which here runs the other tests too."""
    level, handlers = logging.root.level, [*logging.root.handlers]
    yield
    logging.getLogger("timm_moe").setLevel(logging.NOTSET)
    logging.root.setLevel(level)
    for handler in {*logging.root.handlers} - {*handlers}:
        logging.root.removeHandler(handler)


@pytest.fixture
def golden():
    """Load a golden file as tensors."""
    return lambda name: {key: torch.from_numpy(array) for key, array in np.load(DATA / f"{name}.npz").items()}


@pytest.fixture
def ewa_vit():
    return timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)


@pytest.fixture
def dense_vit():
    return timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).eval()


@pytest.fixture
def images():
    return torch.randn(6, 3, 32, 32)


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window; its log and its requests can be asked for."""
    chromium, chromedriver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("There is no Chromium here: apt install chromium chromium-driver.")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1300,1000"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()
