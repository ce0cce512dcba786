"""The rooms of the package: the imports between them, and the rooms that may change timm."""

import ast
import re
from functools import cache

import pytest
from common import ROOT, SMALL_VIT
from processes import run_code

import timm_moe_cli
from timm_moe.convert.gather import METHODS

PACKAGE = ROOT / "timm_moe"
#: The map, from the ground to the roof. A room is a folder or a single module; it imports from
#: floors below its own.
FLOORS = (
    ("console",),
    ("layers", "files", "model_config", "schedules", "quick_init", "timm_classes", "outputs"),
    ("convert",),
    ("training",),
    ("integrations",),
    ("models",),
    ("checkpoints",),
    ("export",),
    ("callbacks",),
    ("registration",),
    ("__init__",),
    # The workbench, of which the library knows nothing.
    ("analysis",),
    ("cli",),
)
#: What modules of a room may not import from elsewhere; the first is of all rooms.
FORBIDDEN = {
    "": r"(studies|timm_moe)\b|(timm|torch)\..*\b_(?!_)",
    "layers": r"(timm|transformers|lightning|peft)\b",
}
#: Imported by every room, so that it belongs to none.
VERSION = "version"
#: Libraries whose objects only integrations may change.
OTHERS = ("timm", "torch", "sys", "transformers", "lightning")
#: Calls that assign to their first argument, or to all modules.
INTO = ("setattr", "sys.modules.update", "sys.modules.setdefault")
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.name != f"{VERSION}.py")


def module_of(file):
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def room_of(module):
    return module.partition(".")[0]


def floor_of(module):
    for number, rooms in enumerate(FLOORS):
        if room_of(module) in rooms:
            return number
    raise AssertionError(f"{module} is in no room of FLOORS")


@cache
def tree_of(file):
    return ast.parse(file.read_text())


def imports_of(file):
    """List the modules of the package that a module imports, in functions too.

    The package itself is ``__init__``.
    """
    package = ["timm_moe", *file.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(
                [*package[: len(package) - node.level + 1], *filter(None, [node.module])]
            )
            for alias in node.names:
                name = f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base
                yield name.removeprefix("timm_moe").removeprefix(".") or "__init__"


def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def libraries_of(file):
    """What a module imports from elsewhere: ``timm.layers.Mlp``, ``ast``, ..."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_a_module_imports_from_its_room_and_from_floors_below():
    upwards = [
        f"{module_of(file)} imports {imported}"
        for file in FILES
        for imported in imports_of(file)
        if room_of(imported) not in (VERSION, room_of(module_of(file)))
        and floor_of(imported) >= floor_of(module_of(file))
    ]
    assert not upwards, upwards


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_import_from_elsewhere_is_forbidden(room):
    """Nothing knows the studies or private names of others, and layers are plain PyTorch."""
    files = [file for file in FILES if room in ("", room_of(module_of(file)))]
    assert files
    assert [
        f"{module_of(file)} imports {name}"
        for file in files
        for name in libraries_of(file)
        if re.match(FORBIDDEN[room], name)
    ] == []


def test_an_export_imports_nothing_of_the_workbench(tmp_path):
    code = f"""
import sys
import timm, timm_moe
model = timm.create_model("vit_tiny_ewa_moe", **{SMALL_VIT!r})
timm_moe.export_dense(model, {str(tmp_path / "dense")!r})
timm_moe.push_dense
assert not [name for name in sys.modules if name.startswith("timm_moe.analysis")]
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr


def changes_of_others(tree):
    """Assignments that reach into another library's module or class, or into sys.modules."""
    outside = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and not getattr(node, "level", 0)
        and (getattr(node, "module", None) or node.names[0].name).partition(".")[0] in OTHERS
        for alias in node.names
    }
    for node in ast.walk(tree):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        for target in (
            targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else ()
        ):
            if (
                isinstance(target, (ast.Attribute, ast.Subscript))
                and name_at_the_root(target) in outside
            ):
                yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in INTO:
            name = (
                name_at_the_root(node.args[0]) if "setattr" in ast.unparse(node.func) else "module"
            )
            # And not a part of some model.
            if name in outside or name.endswith(("module", "owner", "class")):
                yield ast.unparse(node)


def name_at_the_root(node):
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return getattr(node, "id", "self")


def test_only_integrations_change_timm():
    changing = {module_of(file) for file in FILES if list(changes_of_others(tree_of(file)))}
    # Models enter themselves in their own module; of ewa's families that module exists in memory
    # only.
    assert changing - {"models.ewa", "models.variants"} == {
        "integrations.timm",
        "integrations.transformers",
    }
    ewa = changes_of_others(ast.parse((PACKAGE / "models/ewa.py").read_text()))
    assert {line.partition(",")[0] for line in ewa} == {"setattr(module"}


@pytest.mark.parametrize(
    "code",
    [
        "import timm.models as m\nm.build = 1",
        "import timm\ntimm.models.vision_transformer.build_model_with_cfg = None",
        "from timm.task import TrainingTask\nTrainingTask.forward = None",
        "import sys\nsys.modules['x'] = None",
        "setattr(stock_module, name, wrapper)",
    ],
)
def test_a_change_of_timm_is_found(code):
    assert list(changes_of_others(ast.parse(code)))


def test_the_command_line_names_every_method(capsys):
    with pytest.raises(SystemExit):
        timm_moe_cli.parser().parse_args(["export", "--help"])
    (names,) = re.findall(r"become one\s+network:(.*?)--svd", capsys.readouterr().out, re.DOTALL)
    assert set(re.findall(r"\w+", names)) - {"default", "or"} == METHODS.keys()


def test_help_needs_neither_torch_nor_timm():
    code = """
import sys
packages = ("torch", "timm", "timm_moe")
for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
    del sys.modules[name]
import timm_moe_cli
try:
    timm_moe_cli.main(["--version"])
finally:
    assert not [name for name in sys.modules if name.partition(".")[0] in packages]
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr
