"""Run timm's tests of its models on this package's models.

    python tests/timm_models.py [--models PATTERN ...] [pytest's options]

The tests are from the source distribution of the installed timm, which pip fetches once into
``.timm-tests``. The environment variable TIMM_TESTS may name an unpacked one instead. See
CONTRIBUTING.md.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import pytest
import timm

from timm_moe.models.registered import is_registered_here

CACHE = Path(__file__).parents[1] / ".timm-tests"
#: Vision transformers whose names lack the prefix vit_, which timm's lists go by.
VITS = ("vmoe_", "vimoe_", "widenet_", "ones_", "t2t_")
#: Skipped tests: test, models, reason.
EXCLUDED = (
    ("test_model_*_pretrained", "*", "needs the weights of every tag from the Hub"),
    (
        "test_model_inference",
        "*",
        "needs files that timm keeps on the Hub under a model's own name",
    ),
    ("test_model_forward*_torchscript", "*moe*", "expert layers have no TorchScript form"),
    ("test_model_forward*_torchscript", "widenet_*", "expert layers have no TorchScript form"),
    ("test_model_forward*_torchscript", "t2t_*", "its windows have no TorchScript form"),
    ("test_model_backward*", "t2t_*", "its positions are fixed, so they get no gradient"),
    ("test_model_default_cfgs_non_std", "t2t_*", "it has no first convolution"),
    (
        "test_model_default_cfgs*",
        "*_pbe_*",
        "its outputs are float32: the mean of members is not rounded to bfloat16",
    ),
)


def sources() -> Path:
    """Return the folder of timm's source distribution."""
    if "TIMM_TESTS" in os.environ:
        return Path(os.environ["TIMM_TESTS"])
    folder = CACHE / f"timm-{timm.__version__}"
    if not folder.is_dir():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as download:
            print(f"Fetching the source distribution of timm {timm.__version__} ...", flush=True)
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                ":all:",
            ]
            subprocess.run([*pip, "--dest", download, f"timm=={timm.__version__}"], check=True)
            shutil.unpack_archive(next(Path(download).glob("*.tar.gz")), download)
            (Path(download) / folder.name).rename(folder)
    return folder


class TheseModels:
    """A pytest plugin: in timm's test files, ``timm.list_models`` lists this package's models."""

    def __init__(self, patterns: Iterable[str]):
        self.patterns = list(patterns)
        self.listed: set[str] = set()
        self.all_models = timm.list_models

    def list_models(
        self, filter="", module="", pretrained=False, exclude_filters="", **options
    ) -> list[str]:
        """List like timm, but ignore ``module``.

        All models here have what timm's tests select modules for.
        """
        names = [
            name
            for name in self.all_models(pretrained=pretrained, **options)
            if is_registered_here(name)
            and _matches(name, self.patterns)
            and (not filter or _matches(name, filter))
            and not _matches(name, exclude_filters)
        ]
        self.listed.update(names)
        return names

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self):
        list_pretrained = mock.patch(
            "timm.list_pretrained", lambda filter="": self.list_models(filter, pretrained=True)
        )
        with mock.patch("timm.list_models", self.list_models), list_pretrained:
            return (yield)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out tests of single stock models and skip the excluded ones."""
        of_these = [item for item in items if _model_name(item) in self.listed]
        config.hook.pytest_deselected(items=[item for item in items if item not in of_these])
        items[:] = of_these
        if not items:
            raise pytest.UsageError(
                f"No test of timm's is for a model of this package named {' '.join(self.patterns)}."
            )
        for item in items:
            for test, models, reason in EXCLUDED:
                if fnmatch(item.originalname, test) and fnmatch(_model_name(item), models):
                    item.add_marker(pytest.mark.skip(reason=reason))


def _model_name(item: pytest.Item) -> str | None:
    return item.callspec.params.get("model_name") if hasattr(item, "callspec") else None


def _matches(name: str, patterns: str | Iterable[str]) -> bool:
    """Return whether a pattern matches a name, or the name that timm would give to such a model."""
    architecture = name.partition(".")[0]
    stock = (
        f"vit_{architecture}"
        if architecture.startswith(VITS)
        else architecture.removesuffix("_ewa_moe")
    )
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch(name, pattern) for pattern in patterns for name in (architecture, stock))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--models", nargs="+", default=["*"], metavar="PATTERN", help="names, with wildcards"
    )
    options, pytest_options = parser.parse_known_args()
    folder = sources()
    print(f"timm {timm.__version__}, tests of {folder}")
    files = ["-c", str(folder / "pyproject.toml"), str(folder / "tests" / "test_models.py")]
    quiet = [
        "--import-mode=importlib",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
    ]  # marks of plugins, maybe absent
    return pytest.main([*files, *quiet, *pytest_options], [TheseModels(options.models)])


if __name__ == "__main__":
    sys.exit(main())
