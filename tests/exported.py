"""Shared by the tests of exports: options of a small model, and changes of a config.json."""

import json

from common import SMALL_VIT

from timm_moe.checkpoints.source import ModelSpec

OPTIONS = {name: value for name, value in SMALL_VIT.items() if name != "num_classes"}
SPEC = ModelSpec("vit_tiny_ewa_moe", 5, OPTIONS)


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
