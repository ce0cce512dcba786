"""Metrics of a model or an ensemble.

The command is ``python -m studies.evaluation MODEL ... --json FILE OPTIONS``.

They are those of ``timm-moe evaluate``. Models of :mod:`studies.rivals` are known, and MC dropout
makes members.
"""

import argparse
import json
from pathlib import Path

from timm.data import ImageDataset

from timm_moe.analysis.data import Inference, image_folder
from timm_moe.analysis.evaluation import evaluate
from timm_moe.checkpoints.source import load_source

from .rivals import with_samples


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for images and device, named as in timm's validate.py."""
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-j", "--workers", type=int, default=0)


def read_data_options(args: argparse.Namespace) -> tuple[ImageDataset, Inference]:
    """Return the images, and how models run on them."""
    return image_folder(args.data_dir, args.split), Inference(
        workers=args.workers, device=args.device
    )


def main() -> None:
    """Evaluate the models and write a JSON file."""
    parser = argparse.ArgumentParser(prog="python -m studies.evaluation", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="checkpoint or exported folder")
    parser.add_argument(
        "--json", required=True, type=Path, metavar="FILE", help="written, even if it is there"
    )
    samples = (
        "leave the dropout of the experts on, and take M samples as members of an ensemble (pBE, "
        "table 9)"
    )
    parser.add_argument("--mc-dropout", type=int, metavar="M", help=samples)
    add_data_options(parser)
    args = parser.parse_args()
    images, inference = read_data_options(args)
    models = args.models
    if args.mc_dropout is not None:
        models = [with_samples(load_source(model), args.mc_dropout) for model in models]
    args.json.write_text(
        json.dumps({"metrics": evaluate(models, images, inference=inference)}, indent=1)
    )


if __name__ == "__main__":
    main()
