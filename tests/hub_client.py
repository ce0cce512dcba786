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

#: Runs commands of timm-moe one after another: importing torch and timm for each of them takes seconds.
WORKER = """
import json, os, sys, time
commands, replies = sys.stdin, os.fdopen(os.dup(1), "w")
sys.stdout.flush()
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), 1)
os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), 2)
from timm_moe_cli import main
sleep = time.sleep
for line in commands:
    command = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    if command["token"]:
        os.environ["HF_TOKEN"] = command["token"]
    time.sleep = sleep if command["patient"] else lambda seconds: None
    status = main(command["arguments"])
    sys.stdout.flush()
    replies.write(json.dumps(status) + "\\n")
    replies.flush()
"""


class Worker:
    """A process with the real client, whose Hub is the server."""

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

    def run(self, *arguments, token=TOKEN, patient=False):
        """Exit status, standard output and standard error of a command; the client's pauses are skipped."""
        command = {"arguments": list(map(str, arguments)), "token": token, "patient": patient}
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        status = json.loads(self.process.stdout.readline())
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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    places = {"HF_HOME": folder, "HF_HUB_CACHE": folder / "hub", "HF_TOKEN_PATH": folder / "token", "HOME": folder}
    switches = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    search = {"PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")]).strip(os.pathsep)}
    return {**kept, **search, **{name: str(place) for name, place in places.items()}, **switches}


def front_matter(card):
    return yaml.safe_load(card.split("---\n")[1])


def output_of(model):
    torch.manual_seed(0)
    return model.eval()(torch.randn(4, 3, 32, 32))
