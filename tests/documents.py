"""Read the code blocks of the documentation, and run them.

A section runs in a process of its own.
"""

import multiprocessing
import re
import runpy
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Without docs/generated, which programs write, and docs/start.md, which
#: tests/project/test_start.py runs as a whole.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs/start.md"}),
]
#: A block, which may contain blocks with fewer backticks, or a heading.
PARTS = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(.*)\n(?s:(.*?))^(?P=indent)(?P=fence) *$|^#+ (.*)$",
    re.MULTILINE,
)
LANGUAGES = ("python", "bash", "", "markdown")

#: bash prints the commands that it would run, so variables, quotes and continuations are resolved
#: by bash itself.
TELL = r"""
set -eu
PATH=none  # no command is found
PWD=. TIMM_SCRIPTS=.
tell() { printf '%s\0' "$@" >&3; printf '\n' >&3; }
command_not_found_handle() { tell "$@"; }
.ci/run() { tell .ci/run; }
cd() { :; }
mkdir() { :; }
cp() { :; }
source() { :; }
sed() { command -p sed "$@"; }
pip() { if [ "$1" = show ]; then echo "Version: 1"; else tell pip "$@"; fi; }
awk() { command -p awk "$@"; }
"""


@dataclass
class Block:
    """A block, with its page and heading, and the commands of a block of bash."""

    section: str
    language: str
    text: str
    commands: list[list[str]] = field(default_factory=list)


def blocks_of(page):
    """Return the blocks of a page in their order.

    A block without a language counts only by its lines with a prompt.
    """
    title, blocks = "", []
    for _, _, language, text, heading in PARTS.findall(page.read_text()):
        title = heading or title
        if text:
            text = textwrap.dedent(text)
            if language in ("", "console"):
                language, text = "bash", "\n".join(re.findall(r"^\$ (.*)", text, re.MULTILINE))
            blocks.append(Block(f"{page.relative_to(ROOT)}: {title}", language, text))
    tell_commands([block for block in blocks if block.language == "bash"])
    return blocks


def tell_commands(blocks):
    """Find the commands of all blocks of a page together, since they share variables."""
    script = "".join(f"{block.text}\ntell NEXT\n" for block in blocks)
    command = ["bash", "-c", f"exec 3>&1 >/dev/null\n{TELL}{script}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    told = iter(done.stdout.splitlines())
    for block in blocks:
        for line in iter(lambda: next(told), "NEXT\0"):
            words = line.split("\0")[:-1]
            block.commands.append([word for word in words if word != "…"])  # "…" means more options


def run_section(steps):
    """Run code in one namespace, and each command, a list of words, in a forked process."""
    namespace = {"__name__": "__main__"}
    for step in steps:
        if isinstance(step, str):
            exec(compile(step, "<block>", "exec"), namespace)
            continue
        process = multiprocessing.get_context("fork").Process(target=run_command, args=(step,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{' '.join(step)} ended with {process.exitcode}")


def run_command(words):
    program, *sys.argv = words
    if program == "timm-moe":
        from timm_moe_cli import main

        sys.exit(main(sys.argv))
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def before_spread_classifier(blocks):
    """Return what the program of experts over processes in Lightning needs.

    It is the program in one process, without its run.
    """
    (alone,) = (block.text for block in blocks if block.section == "docs/trainers.md: Lightning")
    return alone.partition("module = ")[0] + (
        "from lightning.pytorch.strategies import ModelParallelStrategy\n"
        "from torch.distributed.fsdp import FSDPModule, fully_shard\n"
    )
