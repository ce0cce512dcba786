"""The command ``timm-moe``."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from timm.models import is_model, model_entrypoint
from timm.utils import ParseKwargs

from .benefits import moe_benefits
from .callbacks.export import export_dense, export_moe
from .callbacks.hub import (
    Push,
    client_output,
    folder_of,
    push_dense,
    push_folder,
    push_moe,
    refuse_options_of_files,
)
from .callbacks.source import ModelSpec, describe, load_source
from .callbacks.stated import SOURCE_PREFIXES
from .checkpoints.vmoe import import_checkpoint
from .data import Inference, class_names, image_folder, load_classifiers
from .files import check_writable, write_json
from .gather import METHODS
from .info import ModelInfo, is_named_after_stock, is_registered_here, measure, model_info, registered_models
from .model_config import Preprocessing, get_pretrained_cfg
from .papers import comparisons
from .routes import check_output, collect_routes, summarize_all, write_routes
from .routes import table as routes_table
from .version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. An error that a user can mend is told in one sentence."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger(__package__).setLevel(logging.INFO)
    try:
        with client_output():
            args.command(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, head for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        print(f"timm-moe: error: {describe(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class _ModelKwargs(ParseKwargs):
    """timm's KEY=VALUE options, with an error for anything else."""

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values:
            if "=" not in value:
                parser.error(
                    f"{option_string} takes KEY=VALUE pairs, which end its list at the next option: got {value!r}"
                )
        super().__call__(parser, namespace, values, option_string)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="timm-moe", description="Vision mixture-of-experts for timm.")
    parser.add_argument("--version", action="version", version=f"timm_moe {__version__}")
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
    demo.set_defaults(command=_demo)

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
    export.set_defaults(command=_export)

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
        default={},
        action=_ModelKwargs,
        metavar="NAME=VALUE",
        help="for the model card, results of the model that is published, as top1=77.1",
    )
    _add_class_options(push)
    _add_spec_options(push)
    push.set_defaults(command=_push)

    listing = commands.add_parser("list", help="list the registered models by family")
    listing.add_argument("filter", nargs="?", default="", metavar="FILTER", help="name with wildcards, as '*small*'")
    listing.add_argument("--pretrained", action="store_true", help="list the pretrained tags that can be upcycled")
    listing.set_defaults(command=_list)

    info = commands.add_parser("info", help="show the size, cost and expert layers of a model beside its paper's")
    info.add_argument("model", metavar="MODEL", help="registered name, or a checkpoint, folder or hf-hub: name")
    info.add_argument(
        "--model",
        dest="name",
        metavar="NAME",
        help="registered name of a checkpoint's model, for files that do not say it themselves",
    )
    _add_model_options(info)
    info.set_defaults(command=_info)

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
    evaluate.add_argument("--json", metavar="FILE", help="write the numbers to this file too")
    evaluate.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    evaluate.set_defaults(command=_evaluate)

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
    benefits.set_defaults(command=_benefits)

    routes = commands.add_parser("routes", help="which classes a routed model sends to which experts")
    routes.add_argument(
        "source", metavar="CHECKPOINT", help="train.py checkpoint, safetensors file, folder or hf-hub: name"
    )
    routes.add_argument("output_dir", metavar="OUTPUT_DIR", help="folder for routes.png, routes.csv and routes.json")
    _add_data_options(routes)
    routes.add_argument(
        "--threshold",
        type=float,
        default=0.25,
        metavar="X",
        help="a layer is worth keeping if the mutual information of class and expert, divided by log E, exceeds that "
        "by chance by this (default: %(default)s)",
    )
    routes.add_argument("--overwrite", action="store_true", help="replace results in the folder")
    routes.set_defaults(command=_routes)

    import_vmoe = commands.add_parser("import-vmoe", help="convert an official V-MoE checkpoint (JAX) for timm")
    import_vmoe.add_argument(
        "prefix", metavar="PREFIX", help="what the names of the checkpoint's .index and .data files have in common"
    )
    import_vmoe.add_argument("output", metavar="FILE", help="safetensors file to write")
    import_vmoe.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    import_vmoe.set_defaults(command=_import_vmoe)
    return parser


def _add_method_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", choices=list(METHODS), help="how the experts become one network (default: average)")
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


def _add_data_options(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Images and how to run a checkpoint on them, named as in timm's validate.py."""
    parser.add_argument("--data-dir", required=required, metavar="DIR", help="folder of images")
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
        default={},
        action=_ModelKwargs,
        metavar="KEY=VALUE",
        help="options of the model, as in timm's scripts",
    )


def _demo(args: argparse.Namespace) -> None:
    try:
        from .demo import run_demo
    except ModuleNotFoundError as error:
        raise ImportError(f"The demo needs {error.name}: pip install 'timm_moe[demo]'.") from error
    run_demo(args.output, args.epochs)


def _export(args: argparse.Namespace) -> None:
    if args.moe:
        _export_moe(args)
        return
    result = export_dense(
        args.source,
        args.output_dir,
        args.method or "average",
        svd_ratio=args.svd_ratio,
        spec=_spec(args),
        use_ema=args.use_ema,
        overwrite=args.overwrite,
        allow_nonfinite=args.allow_nonfinite,
        label_names=_label_names(args),
    )
    print(f"Exported {result.architecture} with {result.parameters:,} parameters to {result.path}.")
    difference = result.largest_difference
    compared = f"differ by at most {difference:.3g} from" if difference else "equal"
    source = "the source model's" if result.exact else "those of the network made of the experts"
    loader = "timm with this package" if is_registered_here(result.architecture) else "stock timm"
    print(f"Checked: {loader} loads it, and its outputs on random images {compared} {source}.")
    if not result.exact:
        print("It is not the model that was trained: validate it, or train it further, before you use it.")
    print(f'Load it with timm.create_model("local-dir:{result.path}", pretrained=True).')


def _push(args: argparse.Namespace) -> None:
    names = ("private", "revision", "create_pr", "dry_run", "license", "dataset", "metrics")
    options = {**{name: getattr(args, name) for name in names}, "label_names": _label_names(args)}
    of_files = {"spec": _spec(args), "use_ema": args.use_ema}
    if args.moe:
        _refuse_method(args, "--moe publishes the expert model itself")
        pushed = push_moe(args.source, args.repo_id, **of_files, **options)
    elif args.method is None and args.svd_ratio is None and folder_of(args.source) is not None:
        refuse_options_of_files(args.source, **of_files)
        pushed = push_folder(args.source, args.repo_id, **options)
    else:
        gathering = {"method": args.method or "average", "svd_ratio": args.svd_ratio}
        pushed = push_dense(args.source, args.repo_id, **gathering, **of_files, **options)
    print("Checked: timm loads the model, bit for bit.")
    print(_uploaded(pushed, args.dry_run))
    print(f'Load it with timm.create_model("{pushed.model_name}", pretrained=True).')


def _uploaded(pushed: Push, dry_run: bool) -> str:
    files = [f"  {name:<20} {size:>15,} bytes" for name, size in pushed.files.items()]
    if pushed.url is None and not dry_run:
        return f"Nothing changed: {pushed.repo_url} has these very files already, so nothing was uploaded."
    if pushed.url is None:
        return "\n".join([f"Dry run; a push would upload to {pushed.repo_url}:", *files, "", pushed.card])
    return "\n".join([f"Uploaded to {pushed.repo_url} in one commit:", *files, pushed.url])


def _export_moe(args: argparse.Namespace) -> None:
    _refuse_method(args, "--moe writes the expert model itself")
    path = export_moe(
        args.source,
        args.output_dir,
        spec=_spec(args),
        use_ema=args.use_ema,
        overwrite=args.overwrite,
        allow_nonfinite=args.allow_nonfinite,
        label_names=_label_names(args),
    )
    print(f"Wrote the expert model to {path}, and checked that timm with this package loads it bit for bit.")
    print(f'Load it with timm.create_model("local-dir:{path}", pretrained=True).')


def _refuse_method(args: argparse.Namespace, reason: str) -> None:
    if args.method is not None or args.svd_ratio is not None:
        raise ValueError(f"{reason}, so --method and --svd-ratio have no place beside it.")


def _label_names(args: argparse.Namespace) -> list[str] | None:
    if args.data_dir is not None:
        return class_names(image_folder(args.data_dir, args.split, args.class_map))
    if args.class_map:
        raise ValueError("--class-map numbers the folders of --data-dir: name that too.")
    return None


def _spec(args: argparse.Namespace) -> ModelSpec:
    mean, std = (None if value is None else tuple(value) for value in (args.mean, args.std))
    images = Preprocessing(args.img_size, mean, std, args.crop_pct, args.crop_mode, args.interpolation or None)
    return ModelSpec(args.model, args.num_classes, args.model_kwargs, images)


def _inference(args: argparse.Namespace) -> Inference:
    amp_dtype = getattr(torch, args.amp_dtype) if args.amp else None
    return Inference(args.batch_size, args.workers, args.device, amp_dtype)


def _evaluate(args: argparse.Namespace) -> None:
    from .evaluation import evaluate, table  # needs torchmetrics

    if args.json:
        check_writable(args.json, args.overwrite)
    images = image_folder(args.data_dir, args.split, args.class_map)
    ood_split = args.split if args.ood_split is None else args.ood_split
    ood_images = image_folder(args.ood_data_dir, ood_split) if args.ood_data_dir else None
    result = evaluate(
        args.sources, images, ood_images, spec=_spec(args), use_ema=args.use_ema, inference=_inference(args)
    )
    print("\n".join([*args.sources, table(result)]))
    if args.json:
        write_json(args.json, {**_settings(args, "sources", "ood_data_dir", "ood_split"), "metrics": result})


def _benefits(args: argparse.Namespace) -> None:
    accuracies = {role: _accuracy(getattr(args, role), args) for role in ("student", "teacher", "dense")}
    benefit = moe_benefits(**accuracies)
    for role, accuracy in accuracies.items():
        print(f"  {role:<8} top-1 {accuracy:7.2%}")
    print(f"MoE benefits kept by the student: {benefit:.1%}")


def _accuracy(source: str, args: argparse.Namespace) -> float:
    """Top-1 accuracy as a share: given in percent, or measured."""
    try:
        accuracy = float(source)
    except ValueError:
        return _measured_accuracy(source, args)
    if not 0 <= accuracy <= 100:
        raise ValueError(f"An accuracy in percent lies between 0 and 100, got {source}.")
    return accuracy / 100


def _measured_accuracy(source: str, args: argparse.Namespace) -> float:
    from .evaluation import evaluate  # needs torchmetrics

    if args.data_dir is None:
        raise ValueError(f"To measure {source} on images, name their folder with --data-dir.")
    images = image_folder(args.data_dir, args.split, args.class_map)
    return 1 - evaluate([source], images, spec=_spec(args), use_ema=args.use_ema, inference=_inference(args))["error"]


def _routes(args: argparse.Namespace) -> None:
    check_output(args.output_dir, args.overwrite)
    images = image_folder(args.data_dir, args.split, args.class_map)
    inference = _inference(args)
    (model,) = load_classifiers([args.source], images, _spec(args), args.use_ema, inference)
    all_routes = collect_routes(model, images, inference)
    summary = summarize_all(all_routes, args.threshold)
    write_routes(all_routes, {**_settings(args, "source", "threshold"), **summary}, args.output_dir)
    print("\n".join([args.source, routes_table(summary)]))


def _settings(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options by name, and those of all commands that run a checkpoint on images."""
    common = (
        *("data_dir", "split", "class_map", "batch_size", "amp", "use_ema", "model", "num_classes", "model_kwargs"),
        *("img_size", "mean", "std", "crop_pct", "crop_mode", "interpolation"),
    )
    return {name: getattr(args, name) for name in (*names, *common)}


def _list(args: argparse.Namespace) -> None:
    names = registered_models(args.filter, args.pretrained)
    if not names:
        raise ValueError(f"No model of timm_moe matches {args.filter!r}; a filter may hold wildcards, as '*small*'.")
    for title, of_group in groupby(sorted(names, key=_group), key=_group):
        print("\n".join([f"{title}:", *(f"  {name}" for name in of_group)]))


def _group(name: str) -> str:
    family = model_entrypoint(name).__module__.rpartition(".")[2]
    return f"timm's {family}" if is_named_after_stock(name) else family


def _info(args: argparse.Namespace) -> None:
    info = _measured(args)
    evaluated = "exported" if info.exported is not None else "evaluation"
    rows = {
        "input": "x".join(str(size) for size in info.input_size),
        "experts": _experts(info),
        **({"expert layers": ", ".join(info.moe_layers)} if info.moe_layers else {}),
        "parameters, training": f"{info.total:,}",
        "parameters, activated": f"{info.activated:,} per token",
        **({} if info.exported is None else {"parameters, exported": f"{info.exported:,}"}),
        f"GFLOPs, {evaluated}": f"{info.gflops:.3f} per image ({info.gflops / 2:.3f} GMACs)",
    }
    print(info.name)
    for label, value in rows.items():
        print(f"  {label:<22} {value}")
    for label, text in comparisons(info.name):
        print(f"  {label:<22} {text}")


def _measured(args: argparse.Namespace) -> ModelInfo:
    """Of a registered name, or of the model that a file or folder holds."""
    spec = ModelSpec(args.name, args.num_classes, args.model_kwargs)
    is_path = os.path.exists(args.model) or os.sep in args.model or args.model.startswith(SOURCE_PREFIXES)
    if is_model(args.model) or not is_path:
        return model_info(args.model, **spec.args())
    model = load_source(args.model, spec)
    return measure(model.to("meta"), get_pretrained_cfg(model)["architecture"])


def _experts(info: ModelInfo) -> str:
    if not info.moe_layers:
        return "none"
    layers = f"in each of {len(info.moe_layers)} layers" if len(info.moe_layers) > 1 else "in one layer"
    told = f"{info.num_experts} {layers}, the model has {info.blocks} blocks"
    if info.exported is not None:  # each token goes to some expert, no matter to which
        return told
    if info.members > 1:
        return f"{told}; {info.members} members, a token of each takes {info.top_k}"
    return f"{told}, {'an image' if info.routing_unit == 'image' else 'a token'} takes {info.top_k}"


def _import_vmoe(args: argparse.Namespace) -> None:
    imported = import_checkpoint(args.prefix, args.output, args.overwrite)
    kwargs = ", ".join(f"{name}={value!r}" for name, value in imported.kwargs.items())
    print(f"Wrote {imported.parameters:,} parameters of a {imported.name} to {args.output}. It is loaded by")
    print(f'  timm.create_model("{imported.name}", {kwargs}, checkpoint_path="{args.output}")')
    top_k = model_info(imported.name, **imported.kwargs).top_k
    print(f"The checkpoint does not say how many experts a token takes: top_k is {top_k} unless you state it.")
