"""The command ``timm-moe``: its options. A module of its own, since the package imports torch, which takes seconds."""

import argparse
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    args = _parse(argv)
    from timm_moe.cli import run

    return run(args)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; the report's output may stand at the end, apart from the checkpoints."""
    commands = parser()
    args, others = commands.parse_known_args(argv)
    if args.command == "report" and len(others) == 1 and not others[0].startswith("-"):
        args.sources, args.output_dir = [*args.sources, args.output_dir], others[0]
    elif others:
        commands.error(f"unrecognized arguments: {' '.join(others)}")
    return args


class _Version(argparse.Action):
    """The version of the package beside this file, which is not imported for it."""

    def __call__(self, parser, namespace, values, option_string=None):
        version = runpy.run_path(str(Path(__file__).with_name("timm_moe") / "version.py"))["__version__"]
        print(f"timm_moe {version}")
        parser.exit()


class _KeyValues(argparse.Action):
    """A list of KEY=VALUE, with an error for anything else."""

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values:
            if "=" not in value:
                parser.error(
                    f"{option_string} takes KEY=VALUE pairs, which end its list at the next option: got {value!r}"
                )
        setattr(namespace, self.dest, values)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="timm-moe", description="Vision mixture-of-experts for timm.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="train a small dense ViT and its EWA counterpart on digits, export, compare"
    )
    demo.add_argument(
        "--output",
        default="timm-moe-demo",
        metavar="DIR",
        help="folder for results, replaced if there (default: %(default)s)",
    )
    demo.add_argument("--epochs", type=int, default=40, metavar="N", help="epochs to train (default: %(default)s)")
    demo.set_defaults(command="demo")

    export = commands.add_parser("export", help="write the dense model of a checkpoint for plain timm")
    export.add_argument(
        "source", metavar="CHECKPOINT", help="train.py checkpoint, safetensors file, folder or hf-hub: name"
    )
    export.add_argument("output_dir", metavar="DIR", help="folder to write model.safetensors and config.json to")
    export.add_argument("--moe", action="store_true", help="write the expert model itself, which needs this package")
    _add_method_options(export)
    export.add_argument("--use-ema", action="store_true", help="export the EMA weights of the checkpoint")
    _add_class_options(export)
    _add_spec_options(export)
    export.add_argument("--overwrite", action="store_true", help="replace the model in a folder that is not empty")
    export.add_argument("--allow-nonfinite", action="store_true", help="export weights that contain NaN or Inf")
    export.set_defaults(command="export")

    push = commands.add_parser("push", help="publish the dense model of a checkpoint, or the expert model, on the Hub")
    push.add_argument(
        "source", metavar="DIR_OR_CHECKPOINT", help="exported folder, published as it is, or whatever export takes"
    )
    push.add_argument("repo_id", metavar="USER/NAME", help="repository on the Hub, made if it is not there")
    push.add_argument("--moe", action="store_true", help="publish the expert model itself, which needs this package")
    push.add_argument("--private", action="store_true", help="make the repository a private one")
    push.add_argument("--revision", metavar="NAME", help="branch, made if it is not there (default: main)")
    push.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    push.add_argument(
        "--dry-run", action="store_true", help="do everything but upload: needs neither login nor network"
    )
    _add_method_options(push)
    push.add_argument("--use-ema", action="store_true", help="publish the EMA weights of the checkpoint")
    push.add_argument("--license", metavar="NAME", help="for the model card, as the Hub abbreviates it: apache-2.0")
    push.add_argument("--dataset", metavar="NAME", help="for the model card, what the model was trained on")
    push.add_argument(
        "--metrics",
        nargs="*",
        default=[],
        action=_KeyValues,
        metavar="NAME=VALUE",
        help="for the model card, results of the model that is published, as top1=77.1",
    )
    _add_class_options(push)
    _add_spec_options(push)
    push.set_defaults(command="push")

    listing = commands.add_parser("list", help="list the registered models by family")
    listing.add_argument("filter", nargs="?", default="", metavar="FILTER", help="name with wildcards, as '*small*'")
    listing.add_argument("--pretrained", action="store_true", help="list the pretrained tags that can be upcycled")
    listing.set_defaults(command="list")

    info = commands.add_parser("info", help="show the size, cost and expert layers of a model beside its paper's")
    info.add_argument("model", metavar="MODEL", help="registered name, or a checkpoint, folder or hf-hub: name")
    info.add_argument(
        "--model",
        dest="name",
        metavar="NAME",
        help="registered name of a checkpoint's model, for files that do not say it themselves",
    )
    _add_model_options(info)
    info.set_defaults(command="info")

    evaluate = commands.add_parser("evaluate", help="accuracy, calibration and diversity of a classifier or ensemble")
    evaluate.add_argument(
        "sources",
        nargs="+",
        metavar="CHECKPOINT",
        help="train.py checkpoint, safetensors file, folder or hf-hub: name; several are an ensemble",
    )
    _add_data_options(evaluate)
    evaluate.add_argument(
        "--ood-data-dir",
        metavar="DIR",
        help="folder of images of other classes, which its confidence should tell apart",
    )
    evaluate.add_argument("--ood-split", metavar="NAME", help="split of these (default: that of --split)")
    evaluate.add_argument(
        "--mc-dropout",
        type=int,
        metavar="M",
        help="take M samples with the dropout of the experts left on, each a member of an ensemble",
    )
    evaluate.add_argument("--json", metavar="FILE", help="write the numbers to this file too")
    evaluate.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    evaluate.set_defaults(command="evaluate")

    fewshot = commands.add_parser("fewshot", help="how few images of new classes a model's features need (pBE)")
    fewshot.add_argument(
        "sources",
        nargs="+",
        metavar="CHECKPOINT",
        help="train.py checkpoint, safetensors file, folder or hf-hub: name; several are an ensemble",
    )
    fewshot.add_argument(
        "--shots",
        type=int,
        nargs="+",
        default=[1, 5, 10, 25],
        metavar="N",
        help="images of each class (default: 1 5 10 25)",
    )
    fewshot.add_argument(
        "--draws", type=int, default=3, metavar="N", help="how often they are drawn (default: %(default)s)"
    )
    fewshot.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: %(default)s)")
    fewshot.add_argument(
        "--train-split", default="train", metavar="NAME", help="folder that they are drawn from (default: %(default)s)"
    )
    _add_data_options(fewshot, several=True)
    fewshot.add_argument("--json", metavar="FILE", help="write the numbers to this file too")
    fewshot.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    fewshot.set_defaults(command="fewshot")

    benefits = commands.add_parser("benefits", help="the share of what experts bring that a dense student keeps (OneS)")
    for role, text in (
        ("student", "the dense model made of the teacher"),
        ("teacher", "the model with experts"),
        ("dense", "a dense model trained by itself"),
    ):
        benefits.add_argument(
            f"--{role}", required=True, metavar="CHECKPOINT", help=f"{text}, or its top-1 accuracy in percent"
        )
    _add_data_options(benefits, required=False)
    benefits.set_defaults(command="benefits")

    routes = commands.add_parser("routes", help="which classes a routed model sends to which experts")
    routes.add_argument(
        "source", metavar="CHECKPOINT", help="train.py checkpoint, safetensors file, folder or hf-hub: name"
    )
    routes.add_argument("output_dir", metavar="OUTPUT_DIR", help="folder for routes.png, routes.csv and routes.json")
    _add_data_options(routes)
    routes.add_argument(
        "--segmentation",
        metavar="MASKS",
        help="folder of masks, named as the images in --data-dir, whose pixels are numbers of classes: the class of a "
        "patch is that of most of its pixels",
    )
    routes.add_argument(
        "--ignore-index", type=int, metavar="N", help="value of mask pixels without a class (default: 255)"
    )
    routes.add_argument(
        "--threshold",
        type=float,
        default=0.25,
        metavar="X",
        help="a layer is worth keeping if the mutual information of class and expert, divided by log E, exceeds that "
        "by chance by this (default: %(default)s)",
    )
    routes.add_argument("--overwrite", action="store_true", help="replace results in the folder")
    routes.set_defaults(command="routes")

    report = commands.add_parser("report", help="a page to look at: routes, experts, training run, calibration")
    report.add_argument(
        "sources",
        nargs="+",
        metavar="CHECKPOINT",
        help="train.py checkpoint, safetensors file, folder or hf-hub: name; several stand side by side",
    )
    report.add_argument("output_dir", metavar="OUT", help="folder for index.html; it may stand after the options, too")
    _add_data_options(report)
    report.add_argument(
        "--ood-data-dir",
        metavar="DIR",
        help="folder of images of other classes, which its confidence should tell apart",
    )
    report.add_argument("--ood-split", metavar="NAME", help="split of these (default: that of --split)")
    report.add_argument("--overwrite", action="store_true", help="replace the page if it exists")
    report.set_defaults(command="report")

    import_vmoe = commands.add_parser("import-vmoe", help="convert an official V-MoE checkpoint (JAX) for timm")
    import_vmoe.add_argument(
        "prefix", metavar="PREFIX", help="what the names of the checkpoint's .index and .data files have in common"
    )
    import_vmoe.add_argument("output", metavar="FILE", help="safetensors file to write")
    import_vmoe.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    import_vmoe.set_defaults(command="import_vmoe")
    return parser


def _add_method_options(parser: argparse.ArgumentParser) -> None:
    methods = ("average", "sum", "topk", "svd", "random")  # those of timm_moe.convert.gather
    parser.add_argument("--method", choices=methods, help="how the experts become one network (default: average)")
    parser.add_argument(
        "--svd-ratio",
        type=float,
        metavar="R",
        help="of --method svd: share of the singular values kept (default: 0.75)",
    )


def _add_class_options(parser: argparse.ArgumentParser) -> None:
    classes = parser.add_argument_group("classes", "their names, for config.json, from the images of the training")
    classes.add_argument("--data-dir", metavar="DIR", help="folder of the training images, a folder for each class")
    classes.add_argument("--split", default="train", metavar="NAME", help="folder in it (default: %(default)s)")
    classes.add_argument("--class-map", default="", metavar="FILE", help="file that numbers the classes")


def _add_spec_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group(
        "model", "only for files that do not say it themselves; train.py's checkpoints do"
    )
    model.add_argument(
        "--model",
        metavar="NAME",
        help="registered name, or what describes it: local-dir:FOLDER, hf-hub:USER/NAME",
    )
    _add_model_options(model)
    images = parser.add_argument_group("images", "how they are prepared for the model; goes before what files say")
    images.add_argument("--img-size", type=int, metavar="N", help="height and width in pixels")
    images.add_argument("--mean", type=float, nargs="+", metavar="MEAN", help="of the pixels of each channel")
    images.add_argument("--std", type=float, nargs="+", metavar="STD", help="of the pixels of each channel")
    images.add_argument("--crop-pct", type=float, metavar="X", help="share of the resized image's side that is cut out")
    images.add_argument("--crop-mode", metavar="NAME", help="squash, border or center")
    images.add_argument("--interpolation", default="", metavar="NAME", help="of resizing, as bilinear or bicubic")


def _add_data_options(parser: argparse.ArgumentParser, required: bool = True, several: bool = False) -> None:
    """Images and how to run a checkpoint on them, named as in timm's validate.py."""
    number = dict(nargs="+", help="folders of images") if several else dict(help="folder of images")
    parser.add_argument("--data-dir", required=required, metavar="DIR", **number)
    parser.add_argument("--split", default="validation", metavar="NAME", help="folder in it (default: %(default)s)")
    parser.add_argument("--class-map", default="", metavar="FILE", help="file that numbers the classes")
    parser.add_argument("-b", "--batch-size", type=int, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "-j", "--workers", type=int, default=4, metavar="N", help="processes that load images (default: %(default)s)"
    )
    parser.add_argument("--device", metavar="NAME", help="as torch names it (default: cuda if there is one, else cpu)")
    parser.add_argument("--amp", action="store_true", help="run the model in mixed precision")
    parser.add_argument(
        "--amp-dtype", default="float16", choices=["float16", "bfloat16"], help="(default: %(default)s)"
    )
    parser.add_argument("--use-ema", action="store_true", help="take the EMA weights of the checkpoint")
    _add_spec_options(parser)


def _add_model_options(group: Any) -> None:
    group.add_argument("--num-classes", type=int, metavar="N", help="number of classes")
    group.add_argument(
        "--model-kwargs",
        nargs="*",
        default=[],
        action=_KeyValues,
        metavar="KEY=VALUE",
        help="options of the model, as in timm's scripts",
    )
