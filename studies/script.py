"""A script, run with what studies register.

The command is ``python -m studies.script [NAME[=VALUE] ...] SCRIPT OPTIONS``.

SCRIPT is a Python file, such as timm's train.py, or ``timm-moe``; it is unmodified. Known to it are
the models and routers of :mod:`studies.rivals` and :mod:`studies.candidates`. Names of
:mod:`studies.callbacks` before it, with their values, change its training.
"""

import runpy
import sys
from pathlib import Path

import timm_moe_cli

from .callbacks import CALLBACKS


def main(*arguments: str) -> int:
    """Run a script and return its exit status.

    Raises:
        ValueError: if there is no script, or a word before it is no callback.
    """
    scripts = [
        number
        for number, word in enumerate(arguments)
        if word == "timm-moe" or word.endswith(".py")
    ]
    if not scripts:
        raise ValueError("Name a script to run: a Python file, such as train.py, or timm-moe.")
    place = scripts[0]
    for callback in arguments[:place]:
        name, _, value = callback.partition("=")
        if name not in CALLBACKS:
            raise ValueError(f"{name} is no callback of studies: these are {', '.join(CALLBACKS)}.")
        CALLBACKS[name](value)
    script, *options = arguments[place:]
    if script == "timm-moe":
        return timm_moe_cli.main(options)
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
