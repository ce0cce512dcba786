"""The commands of docs/start.md run in order with timm's own scripts.

At the end plain timm classifies a digit.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from common import ROOT
from processes import run_new
from train_script import SCRIPTS, needs_scripts

pytestmark = [pytest.mark.ci]

#: The file name before a block of Python, the language and the block.
BLOCK = re.compile(r"(?:Save this as `([^`]+)`:\n\n)?```(bash|python)\n(.*?)```", re.DOTALL)


@needs_scripts
def test_the_ten_minutes(tmp_path):
    pytest.importorskip("sklearn")
    _, *steps = (ROOT / "docs/start.md").read_text(encoding="utf-8").split("\n## ")
    install, *steps = steps
    assert install.startswith("1. Install")  # done already, and the scripts are copied here
    for name in ("train.py", "validate.py"):
        shutil.copy(Path(SCRIPTS, name), tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = ""
    for file, language, block in BLOCK.findall("".join(steps)):
        if language == "python":
            (tmp_path / file).write_text(block)
            continue
        command = block.replace("--epochs 20 --warmup-epochs 2", "--epochs 3 --warmup-epochs 1")
        done = run_new(["bash", "-ec", command], cwd=tmp_path, env=env)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        said += done.stdout + done.stderr
    assert "EWA: averaging the 4 experts of 2 layers" in said
    assert "dense and ewa were trained with different model" in said
    assert said.count("  ewa - dense: ") == 3
    assert "by a <class 'timm.models.vision_transformer.VisionTransformer'>" in said
    assert "timm_moe was needed: False" in said
    assert [
        len(list((tmp_path / "digits").glob(f"{split}/*/*.png")))
        for split in ("train", "validation")
    ] == [
        1347,
        450,
    ]
    assert (tmp_path / "my-report/index.html").is_file()
