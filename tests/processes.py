"""New processes in no time: forked from one that has imported torch and timm, which takes seconds.

A test that is interrupted, by its time limit for example, kills the processes that it started.
"""

import atexit
import inspect
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

#: The process from which others are forked. It only imports, so that no test sees anything of
#: another. For what a request needs besides, it forks a process like itself that imports one module
#: more, and hands the request over.
_ZYGOTE = """
import atexit, gc, importlib, json, os, runpy, sys, traceback

def begin(request):
    for number, (file, flags) in enumerate(request["streams"]):
        os.dup2(os.open(file, flags, 0o600), number)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    folder = os.path.dirname(os.path.abspath(sys.argv[0])) if request["code"] is None else ""
    sys.path[0:1] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]

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

def status_of(request):
    pid = os.fork()
    if pid == 0:
        status = run(request)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skips the interpreter's own end: to free torch and timm takes a second
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def forked(module):
    (requests, send), (receive, answers) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(send)
        serve([module], os.fdopen(requests), os.fdopen(answers, "w"))
        os._exit(0)
    os.close(requests)
    os.close(answers)
    answers = os.fdopen(receive)
    answers.readline()
    return os.fdopen(send, "w"), answers

def serve(modules, requests, answers):
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # no process has to look through what is imported
    gc.enable()
    print("ready", file=answers, flush=True)
    others = {}
    for line in requests:
        request = json.loads(line)
        if request["modules"]:
            name, *request["modules"] = request["modules"]
            if name not in others:
                others[name] = forked(name)
            print(json.dumps(request), file=others[name][0], flush=True)
            status = others[name][1].readline().strip()
        else:
            status = status_of(request)
        print(status, file=answers, flush=True)

serve(sys.argv[1:], sys.stdin, sys.stdout)
"""


#: The Hub's cache of these processes, which have no network. A test may put what is "downloaded"
#: there.
HUB_CACHE = Path(tempfile.mkdtemp(prefix="hub-cache-"))
atexit.register(shutil.rmtree, HUB_CACHE, ignore_errors=True)
#: Seconds in which an interrupted command may end its own processes.
GRACE = 10
#: Imported by the process for most tests: timm, and what else train.py and validate.py need, which
#: takes a second.
SCRIPTS_NEED = ("timm", "functorch.compile", "sklearn.metrics")


@cache
def _zygote(modules, autoload, settings):
    own = {
        "TIMM_MOE_AUTOLOAD": autoload,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(HUB_CACHE),
    }
    env = {**os.environ, **own, **dict(settings)}
    command = [sys.executable, "-c", _ZYGOTE, *modules]
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(process.stdin.close)
    assert process.stdout.readline() == "ready\n"
    return process


def run_new(command, **options):
    """Run a command and capture its output.

    If the test is interrupted, all processes end that the command started.

    The output goes to files: children that outlive the command would hold pipes open, and the test
    would wait for them.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, start_new_session=True, **options
        )
        try:
            process.wait()
        except BaseException:
            # Torchrun then ends its processes, each of which leads a group of its own.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            _kill(process)
            raise
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(
            command, process.returncode, output.read(), errors.read()
        )


def _kill(leader):
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()


def _run(modules, autoload, argv, code, cwd, env, input, settings=()):
    # torch hands over to the package when it is imported itself; where timm is there already, the
    # package comes last.
    has_timm = "timm" in modules
    first = SCRIPTS_NEED if has_timm else modules
    further = [name for name in modules if name not in first] + ["timm_moe"] * (
        has_timm and autoload != "0"
    )
    zygote = _zygote(first, "0" if has_timm else autoload, settings)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        files[0].write_text(input)
        flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
        streams = [(str(file), flag) for file, flag in zip(files, flags, strict=True)]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TIMM_MOE_AUTOLOAD": autoload,
            **dict(settings),
            **env,
        }
        request = dict(
            argv=argv,
            code=code,
            cwd=str(cwd or Path.cwd()),
            env=env,
            streams=streams,
            modules=further,
        )
        try:
            zygote.stdin.write(json.dumps(request) + "\n")
            zygote.stdin.flush()
            status = int(zygote.stdout.readline())
        except BaseException:
            _zygote.cache_clear()  # the next request must not get this one's answer
            _kill(zygote)
            raise
        return subprocess.CompletedProcess(argv, status, files[1].read_text(), files[2].read_text())


def run_script(path, *arguments, cwd=None, autoload="1", input="", **env):
    """Run ``python PATH ARGUMENTS`` in a process that has imported timm.

    Unless autoload is "0", it has also imported this package.
    """
    return _run(SCRIPTS_NEED, autoload, [str(path), *map(str, arguments)], None, cwd, env, input)


def run_code(
    code, *arguments, cwd=None, autoload="1", modules=SCRIPTS_NEED, input="", settings=(), **env
):
    """Run ``python -c CODE ARGUMENTS`` in such a process.

    Args:
        modules: modules that the process has imported.
        settings: names and values of environment variables that these modules read when they are
            imported.
    """
    return _run(modules, autoload, ["-c", *map(str, arguments)], code, cwd, env, input, settings)


_RANKS = """
import json, runpy, sys, torch.multiprocessing
file, name, processes, *arguments = json.loads(sys.argv[1])
# The file is run, as pytest's names of test modules cannot be imported.
function = runpy.run_path(file)[name]
torch.multiprocessing.start_processes(function, arguments, processes, start_method="fork")
"""


def run_ranks(function, arguments, processes):
    """Call ``function(rank, *arguments)`` in so many processes.

    These may form a group. The arguments are sent as JSON.
    """
    call = json.dumps([inspect.getfile(function), function.__name__, processes, *arguments])
    done = run_code(_RANKS, call, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr


def join_group(rank, folder, processes=2):
    """Form a gloo group of processes of one thread each, which meet in a folder."""
    import torch  # not needed by the processes that this module starts

    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=processes
    )


def parallelized(model, processes=2):
    """Spread a model over the processes of a group, in the order that the documentation gives."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from timm_moe import expert_parameters, parallelize_experts

    mesh = init_device_mesh("cpu", (processes,))
    parallelize_experts(model, mesh)
    return fully_shard(model, mesh=mesh, ignored_params=set(expert_parameters(model).values()))


def messages_of_the_package(level=logging.WARNING):
    """Return a list to which the package's messages in this process are added from now on."""
    messages = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("timm_moe")
    logger.addHandler(handler)
    logger.setLevel(level)
    return messages


def torchrun(processes):
    """Return the arguments of Python that start a script, which follows, in several processes."""
    module = "torch.distributed.run"
    return ["-m", module, "--standalone", "--nproc-per-node", str(processes)]


def free_port():
    """Return the number of a port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
