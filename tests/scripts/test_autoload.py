"""timm's scripts find the package by themselves.

A broken installation of the package breaks nothing else.
"""

import os
import shutil
import subprocess
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import pytest
from common import ROOT
from processes import run_code

import timm_moe_autoload

HERE = Path(__file__).parent
#: What timm imports before its own modules; forked processes have it, and so the hook, but nothing
#: of timm.
BEFORE_TIMM = (
    "torch",
    "torchvision",
    "huggingface_hub",
    "safetensors.torch",
    "yaml",
    "torch.utils.flop_counter",
)


def run(code, *path):
    """Run Python in a process that has imported torch.

    Folders are put before the installed packages.
    """
    return run_code(code, cwd=HERE, modules=BEFORE_TIMM, **_search(path))


def run_anew(code, *path, **env):
    """Run Python in a process that has imported nothing."""
    env = {**os.environ, **_search(path), **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=HERE
    )


def _search(path):
    folders = [str(folder) for folder in path] + [os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(folders).strip(os.pathsep)}


@pytest.mark.parametrize(
    "imports",
    [
        "import torch\nfrom timm.models import create_model",
        "import torch, timm",
        "import timm",
        "from timm import utils",
    ],
)
@pytest.mark.first_case
def test_models_are_there_whatever_is_imported_first(imports):
    done = run(f"{imports}\nimport timm\nassert timm.is_model('vit_small_ewa_moe')")
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_names_imported_after_timm_are_the_hooked_ones():
    done = run(
        "import torch\nfrom timm.scheduler import create_scheduler_v2 as create\nassert "
        "create.__wrapped__"
    )
    assert done.returncode == 0, done.stderr


def test_import_torch_alone_imports_nothing_of_the_package():
    code = (
        "import sys, torch\n"
        "assert 'timm_moe_autoload' in sys.modules\n"
        "assert 'timm_moe' not in sys.modules"
    )
    done = run_anew(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


OFF = "import torch, timm\nassert not timm.is_model('vit_small_ewa_moe')"


@pytest.mark.ci
def test_can_be_switched_off():
    # Its parent imported torch and timm with TIMM_MOE_AUTOLOAD=0.
    done = run_code(OFF, autoload="0")
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("switch", ["TIMM_MOE_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_can_be_switched_off_in_a_process_of_its_own(switch):
    done = run_anew(OFF, **{switch: "0"})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("value", ["false", "OFF", "No", " 0"])
def test_words_that_switch_it_off(value, monkeypatch):
    monkeypatch.setenv("TIMM_MOE_AUTOLOAD", value)
    for name in ("timm_moe", "timm.models"):
        monkeypatch.delitem(sys.modules, name)
    finders = [*sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", [*finders])
    timm_moe_autoload.autoload()
    assert sys.meta_path == finders
    monkeypatch.setenv("TIMM_MOE_AUTOLOAD", "1")
    timm_moe_autoload.autoload()
    assert sys.meta_path != finders


@pytest.mark.ci
@pytest.mark.parametrize("name", ["timm_moe.py", "timm_moe/__init__.py", "timm_moe/readme.txt"])
def test_a_users_own_file_is_not_run(tmp_path, name):
    """In the working directory, where Python looks first."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemExit('the file of this folder was run')\n")
    code = (
        "import timm\n"
        "assert timm.is_model('vit_small_ewa_moe')\n"
        "import timm_moe\n"
        "print(timm_moe.__file__)"
    )
    done = run_code(code, cwd=tmp_path, modules=BEFORE_TIMM, PYTHONPATH="")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        Path(done.stdout.strip())
        == Path(timm_moe_autoload.__file__).parent / "timm_moe/__init__.py"
    )


@pytest.mark.ci
def test_a_users_own_module_keeps_its_name(tmp_path):
    """If it is imported before timm, it is left alone, and a warning says what is missing."""
    (tmp_path / "timm_moe.py").write_text("OWN = True\n")
    code = "import timm_moe, timm\nassert timm_moe.OWN\nprint(timm.is_model('vit_small_ewa_moe'))"
    done = run_code(code, cwd=tmp_path, modules=BEFORE_TIMM, PYTHONPATH="")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert f"missing: ImportError: {tmp_path / 'timm_moe.py'} has the name" in done.stderr


#: Two threads, of which the second begins when the first looks for a module. The first waits until
#: that one is blocked.
THREADS = """
import sys, threading, time, warnings
warnings.simplefilter("error")
first, name = sys.argv[1:]

class Pause:
    def find_spec(self, fullname, path=None, target=None):
        if fullname == name:
            sys.meta_path.remove(self)
            threads[-1].start()
            time.sleep(0.1)

def import_timm():
    import timm
    seen["timm"] = timm.is_model("vit_small_ewa_moe") and timm.is_model("vmoe_b16")

def import_package():
    import timm_moe
    seen["timm_moe"] = hasattr(timm_moe, "moe_layers")

seen = {}
threads = [threading.Thread(target=target) for target in (import_timm, import_package)]
threads = threads if first == "timm" else threads[::-1]
sys.meta_path.insert(0, Pause())
threads[0].start()
for thread in threads:
    thread.join()
import timm.optim
assert hasattr(timm.optim.create_optimizer_v2, "__wrapped__")
print(*sorted(seen.items()))
"""


@pytest.mark.parametrize(
    ("first", "name"),
    [
        ("timm", "timm"),
        ("timm", "timm.layers"),
        ("timm", "timm_moe"),
        ("timm", "timm_moe.layers"),
        ("timm_moe", "timm_moe"),
        ("timm_moe", "timm"),
        ("timm_moe", "timm.models.vision_transformer"),
        ("timm_moe", "timm_moe.layers"),
        ("timm_moe", "timm_moe.models"),
    ],
)
@pytest.mark.first_case
def test_threads_that_import_timm_and_the_package_at_once(first, name):
    done = run_code(THREADS, first, name, modules=BEFORE_TIMM)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "('timm', True) ('timm_moe', True)\n",
        "",
    )


@pytest.fixture
def installation(tmp_path):
    """An installation of its own, to be damaged; it comes before the real one."""
    shutil.copytree(
        ROOT / "timm_moe", tmp_path / "timm_moe", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "timm_moe_autoload.py", tmp_path)
    metadata = tmp_path / "timm_moe-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: timm_moe\nVersion: 9.9\n")
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\ntimm_moe = timm_moe_autoload:autoload\n"
    )
    return tmp_path


DAMAGES = {
    "syntax error": lambda package: (package / "convert/convert.py").write_text("def"),
    "module emptied": lambda package: (package / "convert/convert.py").write_text(""),
    "raises at import": lambda package: (package / "__init__.py").write_text(
        "raise RuntimeError('broken')"
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_installation_breaks_neither_torch_nor_timm(installation, damage):
    DAMAGES[damage](installation / "timm_moe")
    done = run_anew("import torch; print('torch')", installation)
    assert (done.returncode, done.stdout, done.stderr) == (0, "torch\n", "")
    done = run("import timm; print(timm.is_model('vit_small_patch16_224'))", installation)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "timm_moe could not be loaded" in done.stderr


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


@pytest.mark.ci
def test_only_the_autoload_module_left():
    """The package's folder is gone, its entry point is not."""
    done = run(NO_PACKAGE)
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert "timm_moe could not be loaded" in done.stderr


def test_a_loader_of_many_modules_loads_the_package_after_timms_models(monkeypatch):
    """A zip has one loader for all of its modules."""

    class Loader:
        def create_module(self, spec):
            return None

        def exec_module(self, module):
            pass

    class Finder:
        loader = Loader()

        def find_spec(self, name, path=None, target=None):
            return ModuleSpec(name, self.loader)

    loaded = []
    monkeypatch.setattr(timm_moe_autoload, "_load", lambda: loaded.append(True))
    hook = timm_moe_autoload._ImportAfter()
    monkeypatch.setattr(sys, "meta_path", [hook, Finder()])
    spec = hook.find_spec("timm.models")
    for name in ("timm.models.vision_transformer", "timm.models"):
        assert not loaded
        spec.loader.exec_module(module_from_spec(ModuleSpec(name, Finder.loader)))
    assert loaded == [True]


@pytest.mark.ci
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


#: As a timm that is too old to have a task that is wrapped.
OLD_TIMM = """
import importlib.abc, sys
from importlib.machinery import PathFinder
class Older(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != "timm.task":
            return None
        spec = PathFinder.find_spec(fullname, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            del module.TokenDistillationTask
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(sys.meta_path.index(PathFinder), Older())
"""
#: Nothing of ours may be there: no name in the registry, nothing wrapped, no hook in any optimizer.
UNTOUCHED = """
import sys, timm, timm.optim, timm.scheduler, timm.utils, torch
names = timm.list_models()
assert not [name for name in names if "moe" in name or name.startswith(("vit_xtiny", "pit_xs_32"))]
functions = (timm.optim.create_optimizer_v2, timm.scheduler.create_scheduler_v2,
             timm.utils.adaptive_clip_grad, timm.utils.clip_grad.adaptive_clip_grad,
             timm.scheduler.scheduler.Scheduler.step,
             timm.scheduler.PlateauLRScheduler.step_update)
assert not [function for function in functions if hasattr(function, "__wrapped__")]
assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
"""
IMPORT_FAILS = """
for attempt in range(2):
    try:
        import timm_moe
    except {error} as error:
        print(error)
    else:
        raise SystemExit("imported")
"""


@pytest.mark.ci
@pytest.mark.parametrize("switch", ["1", "0"])
def test_an_older_timm_is_told_once_and_nothing_is_registered(switch):
    import timm

    attempts = IMPORT_FAILS.format(error="ImportError")
    start = run if switch == "1" else partial(run_anew, TIMM_MOE_AUTOLOAD="0")
    done = start(OLD_TIMM + "import timm\n" + UNTOUCHED + attempts + UNTOUCHED)
    assert done.returncode == 0, done.stderr
    sentence = (
        f"timm_moe needs timm 1.0.28 or newer, this is timm {timm.__version__}: pip install -U "
        "timm."
    )
    assert done.stdout == f"{sentence}\n" * 2
    told = f"timm_moe could not be loaded, its models are missing: ImportError: {sentence}"
    assert done.stderr.count(told) == int(switch)


#: A line to break, among the hooks or in the models.
LATE_FAILURES = {
    "hooks": (
        "integrations/timm.py",
        "    _undo.append(register_optimizer_step_pre_hook(before_step)",
        "    raise RuntimeError('broken')\n",
    ),
    "models": ("models/mixin.py", "class MoeMixin", "raise RuntimeError('broken')\n"),
}


@pytest.mark.ci
@pytest.mark.parametrize("where", LATE_FAILURES)
def test_a_package_half_loaded_leaves_nothing_behind(installation, where):
    file, line, broken = LATE_FAILURES[where]
    path = installation / "timm_moe" / file
    source = path.read_text()
    assert source.count(line) == 1
    path.write_text(source.replace(line, broken + line))
    code = "import timm\n" + UNTOUCHED + IMPORT_FAILS.format(error="RuntimeError") + UNTOUCHED
    done = run(code, installation)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "broken\n" * 2
    assert "timm_moe could not be loaded" in done.stderr
    assert "missing: RuntimeError: broken" in done.stderr


@pytest.mark.ci
def test_a_model_registered_before_a_failure_is_not_built(installation):
    """timm cannot forget a name.

    So what came before the failure must not train without its averaging.
    """
    path = installation / "timm_moe/models/widenet.py"
    path.write_text("raise RuntimeError('broken')\n")
    code = """
import timm, timm.optim
assert not hasattr(timm.optim.create_optimizer_v2, "__wrapped__")
for name in timm.list_models("*moe*"):
    try:
        timm.create_model(name)
    except ImportError as error:
        assert "timm_moe could not be loaded" in str(error), error
    else:
        raise SystemExit(name)
    break
"""
    done = run(code, installation)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_installing_twice_wraps_once():
    code = """
import sys, timm, timm_moe, timm.scheduler, torch
from timm_moe.integrations import timm as timm_hooks
hooks = list(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks)
timm_hooks.install()
assert not hasattr(timm.scheduler.create_scheduler_v2.__wrapped__, "__wrapped__")
assert not hasattr(timm.scheduler.scheduler.Scheduler.step.__wrapped__, "__wrapped__")
assert list(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks) == hooks
timm_hooks.uninstall()
assert not hasattr(timm.scheduler.create_scheduler_v2, "__wrapped__")
assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
timm_hooks.install()
assert not hasattr(timm.scheduler.create_scheduler_v2.__wrapped__, "__wrapped__")
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
