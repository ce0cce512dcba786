"""Options of the command ``timm-moe``.

They are apart from the package, since that imports torch, which takes seconds.
"""

import argparse
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SOURCE = "train.py checkpoint, safetensors file, folder or hf-hub: name"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status, 130 if it is interrupted."""
    try:
        return _run(argv)
    except KeyboardInterrupt:  # Imports may be interrupted, too.
        return 130


def _run(argv: Sequence[str] | None) -> int:
    # Streams may be closed, in the order of their numbers. The next file would get the number.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Not every locale has a ±, or the letters of every name.
        sys.stdout.reconfigure(errors="backslashreplace")
    args = _parse(argv)
    from timm_moe.cli import run

    return run(args)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="timm-moe", description="Vision mixture-of-experts for timm."
    )
    # An import of the package would import torch.
    version_file = Path(__file__).with_name("timm_moe") / "version.py"
    version = runpy.run_path(str(version_file))["__version__"]
    parser.add_argument("--version", action="version", version=f"timm_moe {version}")
    parser.add_argument(
        "--debug", action="store_true", help="after an error, print where in the code it arose"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (text, add_options) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(command=name)
        add_options(command)
    return parser


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the arguments; the report's output may come last, apart from the checkpoints."""
    commands = parser()
    args, others = commands.parse_known_args(argv)
    if args.command == "report" and len(others) == 1 and not others[0].startswith("-"):
        args.sources = [*args.sources, args.output_dir]
        args.output_dir = os.path.expanduser(others[0])
    elif others:
        commands.error(f"unrecognized arguments: {' '.join(others)}")
    return args


class _KeyValues(argparse.Action):
    """Take a list of KEY=VALUE; anything else is an error."""

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values:
            if "=" not in value:
                parser.error(
                    f"{option_string} takes KEY=VALUE pairs, which end its list at the next "
                    f"option: got {value!r}"
                )
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *values])


# --- one function for each command


def _demo(parser: argparse.ArgumentParser) -> None:
    output = "folder for results, replaced if there (default: %(default)s)"
    parser.add_argument(
        "--output",
        default="timm-moe-demo",
        type=os.path.expanduser,
        metavar="DIR",
        help=output,
    )
    parser.add_argument(
        "--epochs", type=int, default=40, metavar="N", help="epochs to train (default: %(default)s)"
    )


def _export(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    parser.add_argument(
        "output_dir", metavar="DIR", help="folder to write model.safetensors and config.json to"
    )
    parser.add_argument(
        "--moe", action="store_true", help="write the expert model itself, which needs this package"
    )
    _add_method_options(parser)
    parser.add_argument(
        "--use-ema", action="store_true", help="export the EMA weights of the checkpoint"
    )
    _add_class_options(parser)
    _add_spec_options(parser)
    _add_overwrite(parser, "replace the model in a folder that is not empty")


def _push(parser: argparse.ArgumentParser) -> None:
    source = (
        "any source that export takes; the README.md of a folder is its card, of one with experts "
        "by --moe"
    )
    parser.add_argument("source", metavar="DIR_OR_CHECKPOINT", help=source)
    parser.add_argument(
        "repo_id", metavar="USER/NAME", help="repository on the Hub, made if it is not there"
    )
    parser.add_argument(
        "--moe",
        action="store_true",
        help="publish the expert model itself, which needs this package",
    )
    parser.add_argument("--private", action="store_true", help="make the repository a private one")
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, made if it is not there, but for --create-pr (default: main)",
    )
    parser.add_argument(
        "--create-pr", action="store_true", help="open a pull request instead of committing"
    )
    dry_run = "do everything but upload: needs neither login nor network"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    _add_method_options(parser)
    parser.add_argument(
        "--use-ema", action="store_true", help="publish the EMA weights of the checkpoint"
    )
    parser.add_argument(
        "--license",
        metavar="NAME",
        help="for the model card, as the Hub abbreviates it: apache-2.0",
    )
    parser.add_argument(
        "--dataset", metavar="NAME", help="for the model card, what the model was trained on"
    )
    metrics = "for the model card, results of the model that is published, as top1=77.1"
    _add_key_values(parser, "--metrics", "NAME=VALUE", metrics)
    _add_class_options(parser)
    _add_spec_options(parser)


def _list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "filter", nargs="?", default="", metavar="FILTER", help="name with wildcards, as '*small*'"
    )
    parser.add_argument(
        "--pretrained", action="store_true", help="list the pretrained tags that can be upcycled"
    )


def _info(parser: argparse.ArgumentParser) -> None:
    models = (
        "registered name, with experts or without, or a checkpoint, folder or hf-hub: name; "
        "several are shown side by side"
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help=models)
    batch = "measure on the CPU what a training step of N images keeps for its backward"
    parser.add_argument("--batch", type=int, metavar="N", help=batch)
    name = "registered name of a checkpoint's model, for files that do not say it themselves"
    parser.add_argument("--model", dest="name", metavar="NAME", help=name)
    parser.add_argument(
        "--use-ema", action="store_true", help="take the EMA weights of a checkpoint"
    )
    _add_model_options(parser)


def _evaluate(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser, "several are an ensemble")
    _add_data_options(parser)
    _add_ood_options(parser)
    _add_json_options(parser)


def _compare(parser: argparse.ArgumentParser) -> None:
    runs = (
        "experiment of train.py, by its folder or by its name in output/train, whose last.pth.tar "
        f"is taken; or {_SOURCE}. Runs that are called alike but for a number at the end, as "
        "dense-0 and dense-1, or for the time at the beginning are one method; all are compared "
        "with the first"
    )
    parser.add_argument("sources", nargs="+", metavar="RUN", help=runs)
    parser.add_argument(
        "--plot",
        type=os.path.expanduser,
        metavar="FILE",
        help="draw the runs and differences, as a.png",
    )
    _add_data_options(parser)
    _add_json_options(parser)


def _fewshot(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser, "several are an ensemble")
    shots = "images of each class (default: 1 5 10 25)"
    parser.add_argument(
        "--shots", type=int, nargs="+", default=[1, 5, 10, 25], metavar="N", help=shots
    )
    draws = "how often they are drawn (default: %(default)s)"
    parser.add_argument("--draws", type=int, default=3, metavar="N", help=draws)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the draws, of all folders in their order (default: %(default)s)",
    )
    split = "folder that they are drawn from (default: %(default)s)"
    parser.add_argument("--train-split", default="train", metavar="NAME", help=split)
    _add_data_options(parser, nargs="+", action="extend", help="folders of images")
    _add_json_options(parser)


def _benefits(parser: argparse.ArgumentParser) -> None:
    for role, text in (
        ("student", "the dense model made of the teacher"),
        ("teacher", "the model with experts"),
        ("dense", "a dense model trained by itself"),
    ):
        text = f"{text}, or its top-1 accuracy in percent"
        parser.add_argument(f"--{role}", required=True, metavar="CHECKPOINT", help=text)
    _add_data_options(parser, required=False)


def _routes(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    output = "folder for routes.png, routes.csv and routes.json"
    parser.add_argument("output_dir", type=os.path.expanduser, metavar="OUTPUT_DIR", help=output)
    _add_data_options(parser)
    masks = (
        "folder of masks, named as the images in --data-dir, whose pixels are numbers of classes: "
        "the class of a patch is that of most of its pixels"
    )
    parser.add_argument("--segmentation", metavar="MASKS", help=masks)
    ignored = "value of mask pixels without a class (default: 255)"
    parser.add_argument("--ignore-index", type=int, metavar="N", help=ignored)
    threshold = (
        "a layer is worth keeping if the mutual information of class and expert, divided by the "
        "entropy of the expert, exceeds that by chance by this (default: %(default)s)"
    )
    parser.add_argument("--threshold", type=float, default=0.25, metavar="X", help=threshold)
    _add_overwrite(parser, "replace results in the folder")


def _report(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser, "several are shown side by side")
    parser.add_argument(
        "output_dir",
        type=os.path.expanduser,
        metavar="OUT",
        help="folder for index.html; it may come after the options, too",
    )
    _add_data_options(parser)
    _add_ood_options(parser)
    _add_overwrite(parser, "replace the page if it exists")


def _import_vmoe(parser: argparse.ArgumentParser) -> None:
    _add_import(parser, "what the names of the checkpoint's .index and .data files have in common")


def _import_swin_moe(parser: argparse.ArgumentParser) -> None:
    _add_import(parser, "what comes before .pth in the names of the checkpoint's files")


_COMMANDS = {
    "demo": ("train a small dense ViT and its EWA counterpart on digits, export, compare", _demo),
    "export": ("write the dense model of a checkpoint for plain timm", _export),
    "push": ("publish the dense model of a checkpoint, or the expert model, on the Hub", _push),
    "list": ("list the registered models by family", _list),
    "info": ("show the size, cost and expert layers of a model", _info),
    "evaluate": ("accuracy, calibration and diversity of a classifier or ensemble", _evaluate),
    "compare": ("is one method better than another, over runs paired by seed?", _compare),
    "fewshot": ("accuracy on new classes, learned from few images of each (pBE)", _fewshot),
    "benefits": ("the share of what experts bring that a dense student keeps (OneS)", _benefits),
    "routes": ("which classes a routed model sends to which experts", _routes),
    "report": ("a page to look at: routes, experts, training run, calibration", _report),
    "import-vmoe": ("convert an official V-MoE checkpoint (JAX) for timm", _import_vmoe),
    "import-swin-moe": ("convert a published Swin-MoE checkpoint for timm", _import_swin_moe),
}


# --- options that several commands have


def _add_sources(parser: argparse.ArgumentParser, several: str = "") -> None:
    if several:
        parser.add_argument(
            "sources", nargs="+", metavar="CHECKPOINT", help=f"{_SOURCE}; {several}"
        )
    else:
        parser.add_argument("source", metavar="CHECKPOINT", help=_SOURCE)


def _add_import(parser: argparse.ArgumentParser, prefix: str) -> None:
    parser.add_argument("prefix", metavar="PREFIX", help=prefix)
    parser.add_argument(
        "output_dir", type=os.path.expanduser, metavar="OUT", help="folder to write"
    )
    _add_overwrite(parser, "replace the model in a folder that holds something")


def _add_overwrite(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--overwrite", action="store_true", help=text)


def _add_json_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=os.path.expanduser,
        metavar="FILE",
        help="write the numbers to this file too",
    )
    _add_overwrite(parser, "replace the file if it exists")


def _add_key_values(group: Any, name: str, metavar: str, text: str) -> None:
    group.add_argument(name, nargs="*", default=[], action=_KeyValues, metavar=metavar, help=text)


def _add_method_options(parser: argparse.ArgumentParser) -> None:
    text = "how the experts become one network: average (default), sum, topk, svd or random"
    parser.add_argument("--method", help=text)
    ratio = "of --method svd: share of the singular values kept (default: 0.75)"
    parser.add_argument("--svd-ratio", type=float, metavar="R", help=ratio)


def _add_class_options(parser: argparse.ArgumentParser) -> None:
    classes = parser.add_argument_group(
        "classes", "their names, for config.json, from the images of the training"
    )
    classes.add_argument(
        "--data-dir", metavar="DIR", help="folder of the training images, a folder for each class"
    )
    _add_split_options(classes, "train")


def _add_split_options(group: Any, default: str) -> None:
    group.add_argument(
        "--split", default=default, metavar="NAME", help="folder in it (default: %(default)s)"
    )
    names = (
        "text file of the names of the classes, one a line, in the order of their numbers "
        "(default: as timm sorts)"
    )
    group.add_argument("--class-map", default="", metavar="FILE", help=names)


def _add_ood_options(parser: argparse.ArgumentParser) -> None:
    images = "folder of images of other classes, which its confidence should tell apart"
    parser.add_argument("--ood-data-dir", metavar="DIR", help=images)
    parser.add_argument(
        "--ood-split", metavar="NAME", help="split of these (default: that of --split)"
    )


def _add_data_options(parser: argparse.ArgumentParser, **data_dir: Any) -> None:
    """Add the options for images, and for running a checkpoint on them.

    Their names are those of timm's validate.py.
    """
    parser.add_argument(
        "--data-dir", metavar="DIR", **{"required": True, "help": "folder of images", **data_dir}
    )
    _add_split_options(parser, "validation")
    parser.add_argument(
        "-b", "--batch-size", type=int, default=256, metavar="N", help="(default: %(default)s)"
    )
    workers = "processes that load images (default: %(default)s)"
    parser.add_argument("-j", "--workers", type=int, default=4, metavar="N", help=workers)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="as torch names it (default: cuda if there is one, else cpu)",
    )
    parser.add_argument("--amp", action="store_true", help="run the model in mixed precision")
    dtypes = ["float16", "bfloat16"]
    parser.add_argument(
        "--amp-dtype", default="float16", choices=dtypes, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--use-ema", action="store_true", help="take the EMA weights of the checkpoint"
    )
    _add_spec_options(parser)


def _add_spec_options(parser: argparse.ArgumentParser) -> None:
    absent = "goes before what files say; needed where they say nothing, as files of weights"
    model = parser.add_argument_group("model", absent)
    name = "registered name, or what describes it: local-dir:FOLDER, hf-hub:USER/NAME"
    model.add_argument("--model", metavar="NAME", help=name)
    _add_model_options(model)
    images = parser.add_argument_group("images", "preprocessing; goes before what files say")
    images.add_argument("--img-size", type=int, metavar="N", help="height and width in pixels")
    pixels = "of the pixels of each channel, which are from 0 to 1"
    images.add_argument("--mean", type=float, nargs="+", metavar="MEAN", help=pixels)
    images.add_argument("--std", type=float, nargs="+", metavar="STD", help=pixels)
    images.add_argument(
        "--crop-pct",
        type=float,
        metavar="X",
        help="share of the resized image's side that is cut out",
    )
    images.add_argument("--crop-mode", metavar="NAME", help="squash, border or center")
    images.add_argument(
        "--interpolation", default="", metavar="NAME", help="of resizing, as bilinear or bicubic"
    )


def _add_model_options(group: Any) -> None:
    group.add_argument("--num-classes", type=int, metavar="N", help="number of classes")
    _add_key_values(
        group, "--model-kwargs", "KEY=VALUE", "options of the model, as in timm's scripts"
    )
