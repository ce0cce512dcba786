"""The real client of huggingface_hub in a process of its own, for tests against hub_server."""

import json
import os
import subprocess
import sys

import torch
import yaml
from common import ROOT

TOKEN = "hf_SecretOfTheTests"
READ_TOKEN = "hf_ReadOnlySecret"

#: Runs commands of timm-moe one after another: importing torch and timm for each of them takes
#: seconds.
WORKER = """
import gc, json, os, sys, time
gc.disable()  # until all is imported, since none of that is garbage
commands, replies = sys.stdin, os.fdopen(os.dup(1), "w")
sys.stdout.flush()
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), 1)
os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), 2)
import timm_moe.export.hub
from huggingface_hub import constants
from timm_moe_cli import main
gc.freeze()
gc.enable()
url = constants.ENDPOINT
for line in commands:
    command = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    if command["token"]:
        os.environ["HF_TOKEN"] = command["token"]
    constants.ENDPOINT = command["url"] or url
    timm_moe.export.hub.PATIENCE = command["patience"]
    pauses = []
    time.sleep = pauses.append
    status = main(command["arguments"])
    sys.stdout.flush()
    replies.write(json.dumps([status, sum(pauses)]) + "\\n")
    replies.flush()
os._exit(0)  # skips the interpreter's own end: to free torch and timm takes a second
"""


class Worker:
    """A process with the real client, whose Hub is the server.

    Attributes:
        paused: seconds that the client wanted to wait in the last command; such pauses are skipped.
    """

    def __init__(self, folder, env):
        self.folder = folder
        self.files = [folder / "out.txt", folder / "err.txt"]
        for file in self.files:
            file.touch()
        self.read = [0, 0]
        command = [sys.executable, "-c", WORKER, *map(str, self.files)]
        self.process = subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *arguments, token=TOKEN, url=None, patience=30):
        """Run a command, for another Hub if a url is given.

        Returns:
            Its exit status, standard output and standard error.
        """
        command = {
            "arguments": list(map(str, arguments)),
            "token": token,
            "url": url,
            "patience": patience,
        }
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        status, self.paused = json.loads(self.process.stdout.readline())
        texts = [file.read_text() for file in self.files]
        new = [text[start:] for text, start in zip(texts, self.read, strict=True)]
        self.read = [len(text) for text in texts]
        return status, *new

    def stop(self):
        self.process.stdin.close()
        self.process.wait(timeout=20)

    def push(self, *arguments, **options):
        """Output of a push that succeeds."""
        status, out, err = self.run("push", *arguments, **options)
        assert status == 0, err
        return out

    def refused(self, *arguments, **options):
        """The sentence of a push that fails."""
        status, out, err = self.run("push", *arguments, **options)
        assert (status, out) == (1, "")
        sentence = err.strip().splitlines()[-1]
        assert sentence.startswith("timm-moe: error: ")
        return sentence


def client_environment(folder, url):
    """Nothing of the user's login or caches, and a Hub."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))
    }
    places = {
        "HF_HOME": folder,
        "HF_HUB_CACHE": folder / "hub",
        "HF_TOKEN_PATH": folder / "token",
        "HOME": folder,
    }
    switches = {
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "*",
    }
    # Several would wait for each other, since the models are small.
    switches["OMP_NUM_THREADS"] = "1"
    search = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")]).strip(os.pathsep)
    }
    return {**kept, **search, **{name: str(place) for name, place in places.items()}, **switches}


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


def output_of(model):
    torch.manual_seed(0)
    return model.eval()(torch.randn(4, 3, 32, 32))
