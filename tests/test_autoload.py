"""timm's scripts find the package by themselves, and a broken installation of it breaks nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code, *path, **env):
    """Run Python in a new process, with folders put before the installed packages."""
    search = os.pathsep.join([str(folder) for folder in path] + [os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    env = {**os.environ, "PYTHONPATH": search, **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=Path(__file__).parent
    )


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, timm",
        "import timm",
        "from timm import utils",
        "import torch\nfrom timm.models import create_model",
    ],
)
def test_models_are_there_whatever_is_imported_first(imports):
    done = run(f"{imports}\nimport timm\nassert timm.is_model('vit_small_ewa_moe')")
    assert done.returncode == 0, done.stderr


def test_names_imported_after_timm_are_the_hooked_ones():
    done = run("import torch\nfrom timm.scheduler import create_scheduler_v2 as create\nassert create.__wrapped__")
    assert done.returncode == 0, done.stderr


def test_import_torch_alone_imports_nothing_of_the_package():
    done = run("import sys, torch\nassert 'timm_moe_autoload' in sys.modules\nassert 'timm_moe' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("switch", ["TIMM_MOE_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_can_be_switched_off(switch):
    done = run("import torch, timm\nassert not timm.is_model('vit_small_ewa_moe')", **{switch: "0"})
    assert done.returncode == 0, done.stderr


@pytest.fixture
def installation(tmp_path):
    """An installation of its own, to be damaged; it comes before the real one."""
    shutil.copytree(ROOT / "timm_moe", tmp_path / "timm_moe", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "timm_moe_autoload.py", tmp_path)
    metadata = tmp_path / "timm_moe-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: timm_moe\nVersion: 9.9\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntimm_moe = timm_moe_autoload:autoload\n")
    return tmp_path


DAMAGES = {
    "syntax error": lambda package: (package / "convert.py").write_text("def"),
    "module emptied": lambda package: (package / "convert.py").write_text(""),
    "raises at import": lambda package: (package / "__init__.py").write_text("raise RuntimeError('broken')"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_installation_breaks_neither_torch_nor_timm(installation, damage):
    DAMAGES[damage](installation / "timm_moe")
    done = run("import torch; print('torch')", installation)
    assert (done.returncode, done.stdout, done.stderr) == (0, "torch\n", "")
    done = run("import timm; print(timm.is_model('vit_small_patch16_224'))", installation)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "timm_moe could not be loaded, its models are missing" in done.stderr


NO_PACKAGE = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "timm_moe":
            raise ModuleNotFoundError("No module named 'timm_moe'")
sys.meta_path.insert(0, Missing())
import timm
print(timm.is_model("vit_small_patch16_224"))
"""


def test_only_the_autoload_module_left():
    """The package's folder is gone, its entry point is not."""
    done = run(NO_PACKAGE)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "timm_moe could not be loaded" in done.stderr


def test_a_probe_for_timm_models_does_not_use_the_hook_up():
    code = """
import sys, torch, importlib.util
for finder in list(sys.meta_path):
    if type(finder).__name__ == "_ImportAfter":
        finder.find_spec("timm.models")
import timm
assert timm.is_model("vit_small_ewa_moe")
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "_ImportAfter"]
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
