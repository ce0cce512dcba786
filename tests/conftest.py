"""Settings and fixtures that all tests share.

It is their order and time limits, one thread so that results repeat, small models, and a browser.

xdist's controller imports this file before it starts its workers. It runs no test, so torch and
timm, which take seconds, are imported in functions.
"""

import gc
import logging
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

gc.disable()  # until all is imported, since none of that is garbage

settings.register_profile("timm_moe", deadline=None)  # a test may be slow on a busy machine
settings.load_profile("timm_moe")

SLOWEST = (
    "test_train_script",
    "test_hub",
    "test_autoload",
    "test_train_options",
    "test_models",
    "test_ewa_families",
    "test_transformers",
    "test_documents",
)
#: Folders that test no part of the package. They run with the longer tests, or if they are named.
WORKBENCH = [Path(__file__).parent / name for name in ("benchmarks", "studies")]
#: Begins a file whose tests are all marked.
CI_FILE = "\npytestmark = [pytest.mark.ci"
#: Seconds for a test that needs more than the limit in setup.cfg.
LIMITS = {"stress": 3 * 60 * 60, "gpu": 3 * 60, "ci": 15 * 60}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run the tests of a file in one worker, which shares what they make.

    The slowest files begin.
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    return LoadScopeScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before options of the command line choose by marks
def pytest_collection_modifyitems(config, items):
    if not config.option.keyword and not any("::" in argument for argument in config.args):
        mark_later_cases(items)
    items.sort(
        key=lambda item: (
            SLOWEST.index(item.path.stem) if item.path.stem in SLOWEST else len(SLOWEST)
        )
    )
    for item in items:
        is_of_workbench = any(item.path.is_relative_to(folder) for folder in WORKBENCH)
        if is_of_workbench and "not ci" not in config.option.markexpr:
            item.add_marker(pytest.mark.ci)
        if item.get_closest_marker("timeout") is None:
            marks = [name for name in LIMITS if item.get_closest_marker(name)]
            if marks:
                item.add_marker(pytest.mark.timeout(LIMITS[marks[0]]))


def mark_later_cases(items):
    """Mark as ``ci`` all cases but the first of each test that is marked ``first_case``."""
    seen = set()
    for item in items:
        if item.get_closest_marker("first_case") and not item.get_closest_marker("ci"):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.ci)
            seen.add(test)


def pytest_ignore_collect(collection_path, config):
    """Skip the longer tests' folders and files where ci is left out: their import takes seconds.

    pytest does not ask for what the command line names.
    """
    if "not ci" not in config.option.markexpr:
        return None
    if collection_path.suffix == ".py":
        return CI_FILE in collection_path.read_text() or None
    return collection_path in WORKBENCH or None


def pytest_collectstart():
    import timm_moe  # noqa: F401  (registers the models)


def pytest_collection_finish():
    """Hide imported objects from the garbage collector.

    Looking through them takes a tenth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def repeatable():
    import torch

    torch.set_num_threads(1)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes 0.5 ms for a look at devices


@pytest.fixture(autouse=True)
def quiet():
    """Undo what the command line sets up in logging: it expects a process of its own."""
    level, handlers = logging.root.level, [*logging.root.handlers]
    yield
    logging.getLogger("timm_moe").setLevel(logging.NOTSET)
    logging.root.setLevel(level)
    for handler in {*logging.root.handlers} - {*handlers}:
        logging.root.removeHandler(handler)


@pytest.fixture
def golden():
    """Load a golden file as tensors by name."""
    import numpy as np
    import torch
    from common import DATA

    return lambda name: {
        key: torch.from_numpy(array) for key, array in np.load(DATA / f"{name}.npz").items()
    }


@pytest.fixture
def ewa_vit():
    import timm
    from common import SMALL_VIT

    return timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)


@pytest.fixture
def dense_vit():
    import timm
    from common import SMALL_VIT

    return timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).eval()


@pytest.fixture
def images():
    import torch

    return torch.randn(6, 3, 32, 32)


@pytest.fixture(scope="module")
def browser():
    """Start Chromium without a window; it keeps its log and its requests."""
    chromium, chromedriver = (
        shutil.which("chromium") or shutil.which("google-chrome"),
        shutil.which("chromedriver"),
    )
    if chromium is None or chromedriver is None:
        pytest.skip("There is no Chromium here: apt install chromium chromium-driver.")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "window-size=1300,1000",
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()
