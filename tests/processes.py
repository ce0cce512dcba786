"""New processes that need not import torch and timm, which takes seconds: forked from one that did nothing else."""

import atexit
import inspect
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch.multiprocessing

#: What the process does from which others are forked: it only imports, so that nothing of a test is in the next one.
_ZYGOTE = """
import atexit, importlib, json, os, runpy, sys, traceback
for name in sys.argv[1:]:
    importlib.import_module(name)

def begin(request):
    for number, (file, flags) in enumerate(request["streams"]):
        os.dup2(os.open(file, flags, 0o600), number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    folder = os.path.dirname(os.path.abspath(sys.argv[0])) if request["code"] is None else ""
    sys.path[0:1] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if "timm" in sys.modules and os.environ["TIMM_MOE_AUTOLOAD"] != "0":
        import timm_moe

def run(request):
    try:
        begin(request)
        if request["code"] is None:
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        status = run(request)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # without the interpreter's own end: to free torch and timm takes a second
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@cache
def _zygote(modules, autoload, settings):
    own = {"TIMM_MOE_AUTOLOAD": autoload, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env = {**os.environ, **own, **dict(settings)}
    process = subprocess.Popen(
        [sys.executable, "-c", _ZYGOTE, *modules], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.stdin.close)
    assert process.stdout.readline() == "ready\n"
    return process


def _run(modules, autoload, argv, code, cwd, env, input, settings=()):
    # torch hands over to the package when it is imported itself; where timm is there already, the child imports it.
    zygote = _zygote(modules, "0" if "timm" in modules else autoload, settings)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        files[0].write_text(input)
        flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
        streams = [(str(file), flag) for file, flag in zip(files, flags, strict=True)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TIMM_MOE_AUTOLOAD": autoload, **dict(settings), **env}
        request = dict(argv=argv, code=code, cwd=str(cwd or Path.cwd()), env=env, streams=streams)
        zygote.stdin.write(json.dumps(request) + "\n")
        zygote.stdin.flush()
        status = int(zygote.stdout.readline())
        return subprocess.CompletedProcess(argv, status, files[1].read_text(), files[2].read_text())


def run_script(path, *arguments, cwd=None, autoload="1", input="", **env):
    """``python PATH ARGUMENTS`` in a process that has imported timm and, unless autoload is "0", this package.

    What train.py imports besides, which takes half a second, is there too.
    """
    return _run(("timm", "functorch.compile"), autoload, [str(path), *map(str, arguments)], None, cwd, env, input)


def run_code(code, *arguments, cwd=None, autoload="1", modules=("timm",), input="", settings=(), **env):
    """``python -c CODE ARGUMENTS``, likewise.

    ``modules`` are what the process has imported, ``settings`` the pairs of its environment that they read by then.
    """
    return _run(modules, autoload, ["-c", *map(str, arguments)], code, cwd, env, input, settings)


def _rank(rank, file, name, *arguments):
    runpy.run_path(file)[name](rank, *arguments)  # by its file: pytest's names of test modules cannot be imported


def run_ranks(function, arguments, processes):
    """``function(rank, *arguments)`` in so many processes that may form a group."""
    multiprocessing.set_forkserver_preload(
        ["timm", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]
    )
    arguments = (inspect.getfile(function), function.__name__, *arguments)
    torch.multiprocessing.start_processes(_rank, arguments, processes, start_method="forkserver")
