"""The commands of ``timm-moe``; their options are in ``timm_moe_cli``."""

import argparse
import logging
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import disable_propagation
from timm.data import ImageDataset
from timm.models import create_model, is_model, model_entrypoint
from timm.utils import ParseKwargs
from torch import nn

from .analysis.benefits import benefits_kept
from .analysis.data import (
    Inference,
    class_names,
    image_folder,
    image_mode,
    load_classifiers,
    open_model,
)
from .analysis.fewshot import Folder, fewshot
from .analysis.fewshot import table as fewshot_table
from .analysis.info import activation_bytes, byte_text, measure, model_info
from .analysis.norms import norm_divergence
from .analysis.routes.mixtures import collect_mixtures, mixing_layers
from .analysis.routes.results import FILES as ROUTES_FILES
from .analysis.routes.results import class_shares, plot, plot_mixtures, write_routes
from .analysis.routes.results import table as routes_table
from .analysis.routes.segmentation import MaskedImages, read_names
from .analysis.routes.statistics import (
    Routes,
    collect_patch_routes,
    collect_routes,
    routed_layers,
    summarize_all,
)
from .checkpoints import swin_moe, vmoe
from .checkpoints.description import SOURCE_PREFIXES
from .checkpoints.model_spec import ModelSpec
from .checkpoints.source import load_source
from .console import PrintableFormatter, describe, show
from .convert.expert_layers import moe_layers, parameters
from .convert.gather import get_method
from .export.export import Export, check_target, export_dense, export_moe
from .export.push import push_dense, push_moe
from .files import check_apart, check_folder, check_writable, write_json, written_whole
from .model_config import get_pretrained_cfg, preprocessing
from .models.registered import (
    is_named_after_stock,
    registered_models,
    registrar,
)

_logger = logging.getLogger(__name__)

#: Widest cell of a table with a column for each model.
CELL = 38


def run(args: argparse.Namespace) -> int:
    """Run a command of :func:`timm_moe_cli.parser`; an error is printed in one sentence.

    Returns:
        The exit status: 0, or 1 after an error.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger(__package__).setLevel(logging.INFO)
    disable_propagation()  # of the Hub's client, which has a handler of its own
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        for name in ("model_kwargs", "metrics"):
            if hasattr(args, name):
                _parse_pairs(args, name)
        COMMANDS[args.command](args)
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        print(f"timm-moe: error: {describe(error)}", file=sys.stderr)
        return 1
    return 0


def _parse_pairs(args: argparse.Namespace, name: str) -> None:
    """Turn an option's list of KEY=VALUE into a dictionary, as timm's scripts do.

    The parser of the options leaves this for later, since it does without timm.
    """
    action = ParseKwargs(option_strings=["--"], dest=name)
    action(argparse.ArgumentParser(), args, getattr(args, name))


def _demo(args: argparse.Namespace) -> None:
    """Train, average and export a tiny model."""
    try:
        from .analysis.demo import run_demo
    except ModuleNotFoundError as error:
        raise ImportError(f"The demo needs {error.name}: pip install 'timm_moe[demo]'.") from error
    run_demo(args.output, args.epochs)


def _export(args: argparse.Namespace) -> None:
    """Write a dense model, or the expert model, to a folder and say how it was checked."""
    options = _model_options(args, "use_ema", "overwrite")
    if args.moe:
        path = export_moe(args.source, args.output_dir, **options)
        show(
            f"Wrote the expert model to {path}, and checked that timm with this package loads it "
            "bit for bit."
        )
    else:
        result = export_dense(
            args.source,
            args.output_dir,
            args.method or "average",
            svd_ratio=args.svd_ratio,
            **options,
        )
        path = result.path
        _show_export(result)
    show(f'Load it with timm.create_model("local-dir:{path.as_posix()}", pretrained=True).')


def _show_export(result: Export) -> None:
    """Print what was exported, and how its outputs compare with the source's."""
    show(f"Exported {result.architecture} with {result.parameters:,} parameters to {result.path}.")
    module = registrar(result.architecture)
    package = "this program" if module == "__main__" else (module or "").partition(".")[0]
    loader = f"timm with {package}" if package else "stock timm"
    difference = result.largest_difference
    compared = f"differ by at most {difference:.3g} from" if difference else "equal"
    source = "the source model's"
    if not result.exact:
        source = "the outputs of the dense network made of the experts"
    show(f"Checked: {loader} loads it, and its outputs on random images {compared} {source}.")
    if not result.exact:
        show(
            "It is not the model that was trained: validate it, or train it further, before you "
            "use it."
        )


def _push(args: argparse.Namespace) -> None:
    """Push a model to the Hub, or print what a push would upload."""
    names = (
        "private",
        "revision",
        "create_pr",
        "dry_run",
        "license",
        "dataset",
        "metrics",
        "use_ema",
    )
    options = _model_options(args, *names)
    if args.moe:
        pushed = push_moe(args.source, args.repo_id, **options)
    else:
        method = args.method or "average"
        pushed = push_dense(
            args.source, args.repo_id, method=method, svd_ratio=args.svd_ratio, **options
        )
    show("Checked: timm loads the model, bit for bit.")
    files = [f"  {name:<20} {size:>15,} bytes" for name, size in pushed.files.items()]
    if args.dry_run:
        show(f"Dry run; a push would upload to {pushed.repo_url}:", *files)
        show("", *pushed.card.splitlines())
    elif pushed.url is None:
        show(
            f"Nothing changed: {pushed.repo_url} has these very files already, so nothing was "
            "uploaded."
        )
    else:
        show(f"Uploaded to {pushed.repo_url} in one commit:", *files, pushed.url)
    if not args.dry_run:
        show(f'Load it with timm.create_model("{pushed.model_name}", pretrained=True).')


def _model_options(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return options by name, with the model to read and the names of its classes.

    Raises:
        ValueError: if options do not go together.
    """
    if args.moe and (args.method is not None or args.svd_ratio is not None):
        raise ValueError(
            "--moe takes the expert model itself, so --method and --svd-ratio have no place beside "
            "it."
        )
    if args.method is not None:
        get_method(args.method, args.svd_ratio)
    if args.class_map and args.data_dir is None:
        raise ValueError("--class-map numbers the folders of --data-dir: name that too.")
    options = {name: getattr(args, name) for name in names}
    options["spec"] = _spec(args)
    options["label_names"] = None
    if args.data_dir is not None:
        images = image_folder(args.data_dir, args.split, args.class_map)
        options["label_names"] = class_names(images)
        if not args.class_map:
            _warn_of_missing_classes(args.data_dir, options["label_names"])
    return options


def _warn_of_missing_classes(data_dir: str, names: list[str]) -> None:
    """Warn if a class has another number in the images that train.py measures.

    train.py numbers the classes of each split by themselves.
    """
    try:
        images = image_folder(data_dir, "validation")
    except (FileNotFoundError, ValueError):
        return
    measured = class_names(images)
    if measured != names[: len(measured)]:
        _logger.warning(
            f"{images.reader.root} has other classes than the training, and train.py numbers them "
            "without regard to those: an accuracy that it logged is of other labels. Measure it "
            "by timm-moe evaluate with --class-map, and state it to timm-moe push by --metrics."
        )


def _spec(args: argparse.Namespace) -> ModelSpec:
    """Return what the command line states of the model and its preprocessing."""
    images = {}
    for name in ("img_size", "mean", "std", "crop_pct", "crop_mode", "interpolation"):
        value = getattr(args, name)
        if value not in (None, ""):
            images[name] = tuple(value) if isinstance(value, list) else value
    return ModelSpec(args.model, args.num_classes, args.model_kwargs, images)


def _loading(args: argparse.Namespace) -> dict[str, Any]:
    """Return how checkpoints are read and run."""
    amp_dtype = getattr(torch, args.amp_dtype) if args.amp else None
    inference = Inference(args.batch_size, args.workers, args.device, amp_dtype)
    return {"spec": _spec(args), "use_ema": args.use_ema, "inference": inference}


def _evaluate(args: argparse.Namespace) -> None:
    """Print metrics of one model, or of an ensemble of several, on images."""
    from .analysis.evaluation import evaluate, table  # It needs torchmetrics.

    _check_file(args, "json", args.sources)
    images, ood_images = _images(args)
    _check_outside([args.json], images, ood_images)
    result = evaluate(args.sources, images, ood_images, **_loading(args))
    show(*args.sources, *table(result))
    _write_result(args, metrics=result)


def _compare(args: argparse.Namespace) -> None:
    """Print the differences between runs on images, paired by their seeds."""
    from .analysis import comparison  # It needs torchmetrics and scipy.

    runs = comparison.find_runs(args.sources)
    read = [run.source for run in runs]
    _check_file(args, "json", read)
    _check_file(args, "plot", read)
    outputs = [Path(file).resolve() for file in (args.json, args.plot) if file is not None]
    if len({*outputs}) < len(outputs):
        raise ValueError(f"--json and --plot are one file, {args.plot}: name two.")
    if args.plot is not None:
        comparison.check_drawable(args.plot)
    images = image_folder(args.data_dir, args.split, args.class_map)
    _check_outside([args.json, args.plot], images)
    measured = comparison.measure_runs(runs, images, **_loading(args))
    comparisons = comparison.compare(measured)
    show(*comparison.table(measured, comparisons))
    each = [{**asdict(run.run), "seed": run.seed, **run.figures} for run in measured]
    _write_result(args, runs=each, comparisons=[asdict(found) for found in comparisons])
    if args.plot is not None:
        with written_whole(args.plot, args.overwrite) as file:
            comparison.plot(measured, comparisons, file)


def _fewshot(args: argparse.Namespace) -> None:
    """Print accuracies of linear classifiers on a model's features of few images a class."""
    _check_file(args, "json", args.sources)
    folders = []
    for folder in args.data_dir:
        training = image_folder(folder, args.train_split, args.class_map, "--train-split")
        test = image_folder(folder, args.split, args.class_map)
        if Path(training.reader.root).resolve() == Path(test.reader.root).resolve():
            raise ValueError(
                f"--split and --train-split are one folder, {test.reader.root}: images that are "
                "learned from must not be tested on."
            )
        folders.append(Folder(folder, training, test))
    _check_outside(
        [args.json], *(images for folder in folders for images in (folder.train, folder.test))
    )
    results = fewshot(args.sources, folders, args.shots, args.draws, args.seed, **_loading(args))
    show(*args.sources, *fewshot_table(results))
    _write_result(args, results=[asdict(result) for result in results])


def _benefits(args: argparse.Namespace) -> None:
    """Print the share of a sparse teacher's gain over a dense model that its student keeps."""
    accuracies = {
        role: _accuracy(role, getattr(args, role), args) for role in ("student", "teacher", "dense")
    }
    kept = benefits_kept(**accuracies)
    for role, accuracy in accuracies.items():
        show(f"  {role:<8} top-1 {accuracy:7.2%}")
    show(f"MoE benefits kept by the student: {kept:.1%}")


def _accuracy(role: str, source: str, args: argparse.Namespace) -> float:
    """Return the top-1 accuracy of one of OneS's models as a share; in files it is measured."""
    try:
        accuracy = float(source)
    except ValueError:
        from .analysis.evaluation import measure  # It needs torchmetrics.

        if args.data_dir is None:
            raise ValueError(
                f"To measure {source} on images, name their folder with --data-dir."
            ) from None
        images, loading = image_folder(args.data_dir, args.split, args.class_map), _loading(args)
        models, images = load_classifiers([source], images, **loading)
        layers = moe_layers(models[0]).values()
        if role != "teacher" and not all(layer.deploys_dense for layer in layers):
            raise ValueError(f"{source} has routed experts: --{role} is a dense model.") from None
        return measure(models, [source], images, None, loading["inference"]).result()["accuracy"]
    if not 1 <= accuracy <= 100:
        raise ValueError(f"An accuracy in percent lies between 1 and 100, got {source}.")
    return accuracy / 100


def _routes(args: argparse.Namespace) -> None:
    """Write which experts the tokens of images go to, or of what experts' slots are mixed."""
    check_folder(args.output_dir, ROUTES_FILES, args.overwrite)
    if not -1 <= args.threshold <= 1:
        raise ValueError(f"--threshold is a share from -1 to 1, got {args.threshold}.")
    loading = _loading(args)
    settings = _settings(args)
    if args.segmentation is not None:
        all_routes = _routes_of_patches(args, **loading)
    else:
        if args.ignore_index is not None:
            raise ValueError(
                "--ignore-index is a label of pixels: name the folder of the masks with "
                "--segmentation."
            )
        images = image_folder(args.data_dir, args.split, args.class_map)
        _check_outside([args.output_dir], images)
        (model,), images = load_classifiers([args.source], images, **loading)
        if mixing := mixing_layers(model):
            if others := routed_layers(model):
                _logger.warning(
                    f"Of {args.source} the layers {', '.join(mixing)} are shown, whose tokens do "
                    f"not choose by themselves; timm-moe report shows {', '.join(others)} too."
                )
            mixtures, image = collect_mixtures(model, images, loading["inference"])
            settings["images"] = len(images)
            settings["layers"] = [mixture.summary() for mixture in mixtures]
            settings["image"] = images.reader.samples[0][0]
            draw = partial(plot_mixtures, mixtures, image)
            write_routes(settings, None, draw, args.output_dir, args.overwrite)
            show(args.source, *map(str, mixtures), f"images {len(images):,}")
            return
        all_routes = collect_routes(model, images, loading["inference"])

    summary = summarize_all(all_routes, args.threshold)
    settings["split"] = args.split if args.segmentation is None else None
    write_routes(
        {**settings, **summary},
        class_shares(all_routes),
        partial(plot, all_routes),
        args.output_dir,
        args.overwrite,
    )
    show(args.source, *routes_table(summary))


def _routes_of_patches(
    args: argparse.Namespace, spec: ModelSpec, use_ema: bool, inference: Inference
) -> list[Routes]:
    """Collect the routes of patches whose classes are known from masks."""
    unused = {
        "--split": None if args.split == "validation" else args.split,  # the option's default
        "--crop-pct": args.crop_pct,
        "--crop-mode": args.crop_mode,
    }
    for option, value in unused.items():
        if value is not None:
            raise ValueError(
                f"With --segmentation whole images of --data-dir itself are taken, so {option} has "
                "no place."
            )
    check_apart(args.output_dir, (), [args.data_dir, args.segmentation])
    classes = read_names(args.class_map) if args.class_map else None
    model = open_model(args.source, spec, use_ema, inference)
    ignore = {} if args.ignore_index is None else {"ignore_index": args.ignore_index}
    images = MaskedImages(
        args.data_dir,
        args.segmentation,
        preprocessing(model),
        classes,
        **ignore,
        mode=image_mode(model),
    )
    return collect_patch_routes(model, images, inference)


def _report(args: argparse.Namespace) -> None:
    """Write a page about models and their experts."""
    try:
        from .analysis.report import FILE, write_report
    except ModuleNotFoundError as error:
        raise ImportError(
            f"The report needs {error.name}: pip install 'timm_moe[report]'."
        ) from error
    check_folder(args.output_dir, (FILE,), args.overwrite)
    images, ood_images = _images(args)
    _check_outside([args.output_dir], images, ood_images)
    page = write_report(
        args.sources,
        images,
        args.output_dir,
        ood_images,
        **_loading(args),
        overwrite=args.overwrite,
    )
    show(f"Wrote {page}, {page.stat().st_size / 2**20:.1f} MiB; open it in a browser.")


def _images(args: argparse.Namespace) -> tuple[ImageDataset, ImageDataset | None]:
    """Return the images to run on, and images of other classes or None."""
    if args.ood_split is not None and not args.ood_data_dir:
        raise ValueError("--ood-split is a split of --ood-data-dir: name that too.")
    ood_split = args.split if args.ood_split is None else args.ood_split
    ood_images = None
    if args.ood_data_dir:
        ood_images = image_folder(args.ood_data_dir, ood_split, option="--ood-split")
    return image_folder(args.data_dir, args.split, args.class_map), ood_images


def _check_file(args: argparse.Namespace, option: str, read: Sequence[str]) -> None:
    """Check that the file of an option, if it is stated, can be written and replaces nothing read.

    Raises:
        OSError: if the file cannot be written.
        ValueError: if it would replace what is read.
    """
    file = getattr(args, option)
    if file is None:
        return
    if file in ("", "-"):
        raise ValueError(f"--{option} takes the name of a file, got {file!r}.")
    check_writable(file, args.overwrite)
    check_apart(file, [*read, args.class_map])


def _check_outside(outputs: Iterable[str | None], *images: ImageDataset | None) -> None:
    """Raise ValueError if an output is in a folder of images that are read."""
    roots = [each.reader.root for each in images if each is not None]
    for output in filter(None, outputs):
        check_apart(output, (), roots)


def _write_result(args: argparse.Namespace, **result: Any) -> None:
    """Write a result with its settings, unless there is a file by now that must not be replaced."""
    if args.json:
        write_json(args.json, {**_settings(args), **result}, args.overwrite)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a result depends on."""
    others = [
        "command",
        "debug",
        "output_dir",
        "json",
        "plot",
        "overwrite",
        "workers",
        "device",
    ]
    if not args.amp:
        others.append("amp_dtype")
    return {name: value for name, value in vars(args).items() if name not in others}


def _list(args: argparse.Namespace) -> None:
    """Print the registered names by family."""
    names = registered_models(args.filter, args.pretrained)
    if not names:
        raise ValueError(
            f"No model of timm_moe {'with pretrained tags ' if args.pretrained else ''}matches "
            f"{args.filter!r}; a filter may hold wildcards, as '*small*'."
        )

    def group(name: str) -> str:
        family = model_entrypoint(name).__module__.rpartition(".")[2]
        return f"timm's {family}" if is_named_after_stock(name) else family

    for title, of_group in groupby(sorted(names, key=group), key=group):
        show(f"{title}:", *(f"  {name}" for name in of_group))


def _info(args: argparse.Namespace) -> None:
    """Print sizes and costs of models: registered ones, or those that are read."""
    if args.batch is not None and args.batch < 1:
        raise ValueError(f"--batch must be at least 1, got {args.batch}.")
    if args.name is not None and all(map(_is_registered, args.models)):
        raise ValueError("--model is for files that do not name their model: leave it out.")
    if args.use_ema and all(map(_is_registered, args.models)):
        raise ValueError("--use-ema is for train.py's checkpoints: leave it out.")
    spec = ModelSpec(args.name, args.num_classes, args.model_kwargs)
    found = [_sizes(model, spec, args.use_ema, args.batch) for model in args.models]
    if len({name for name, _ in found}) < len(found):
        found = [(source, rows) for source, (_, rows) in zip(args.models, found, strict=True)]
    if len(found) == 1:
        ((name, rows),) = found
        show(name, *(f"  {label:<22} {value}" for label, value in rows.items()))
    else:
        show(*_side_by_side(found))


def _side_by_side(found: Sequence[tuple[str, dict[str, str]]]) -> Iterator[str]:
    """Yield the lines of a table with a column for each model, whose long cells are wrapped."""
    labels: list[str] = []
    for _, rows in found:
        place = 0
        for label in rows:
            if label not in labels:
                labels.insert(place, label)
            place = labels.index(label) + 1
    lines = [("", [name for name, _ in found])]
    lines += [(label, [rows.get(label, "-") for _, rows in found]) for label in labels]
    wrapped = [(label, [textwrap.wrap(cell, CELL) for cell in cells]) for label, cells in lines]
    widths = [
        max(len(part) for _, cells in wrapped for part in cells[n]) for n in range(len(found))
    ]
    for label, cells in wrapped:
        for number, parts in enumerate(zip_longest(*cells, fillvalue="")):
            padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
            yield f"  {'' if number else label:<22} {'  '.join(padded)}".rstrip()


def _is_registered(source: str) -> bool:
    """Tell if a source is the name of a model, and no path.

    A file may be called as a model, with an ending that timm would take for a tag.
    """
    if os.path.isfile(source):
        return False
    is_path = os.path.exists(source) or os.sep in source or source.startswith(SOURCE_PREFIXES)
    return is_model(source) or not is_path


def _sizes(
    source: str, spec: ModelSpec, use_ema: bool, batch: int | None
) -> tuple[str, dict[str, str]]:
    """Return the name of a model and its sizes, by labels to show."""
    model, norms = None, ""
    if _is_registered(source):
        if os.path.exists(source):
            _logger.warning(f"{source} is the registered model here; the folder is ./{source}.")
        info = model_info(source, **spec.args())
    else:
        model = load_source(source, spec, use_ema)
        with suppress(ValueError):  # norms that cannot be compared
            norms = ", ".join(
                f"{name} {value.mean():.4g}" for name, value in norm_divergence(model).items()
            )
    kept = None
    if batch is not None:
        kept = activation_bytes(
            create_model(source, **spec.args()) if model is None else model, batch
        )
    if model is not None:
        info = measure(model.to("meta"), get_pretrained_cfg(model)["architecture"])
    rows = {**info.rows(), **info.memory_rows()}
    if kept is not None:
        rows["activations"] = f"{byte_text(kept)} for {batch:,} images, float32, measured on a CPU"
    if norms:
        rows["LayerNorm divergence"] = f"{norms} (WideNet, eq. 9)"
    return info.name, rows


def _import(import_checkpoint: Callable[[str], nn.Module], args: argparse.Namespace) -> None:
    """Write an official checkpoint as a folder of timm."""
    folder = check_target(args.output_dir, args.overwrite)
    model = import_checkpoint(args.prefix)
    layers = moe_layers(model)
    export = export_moe if layers else export_dense  # without experts it is timm's own
    export(model, folder, overwrite=args.overwrite)
    cfg = get_pretrained_cfg(model)
    show(f"Wrote {parameters(model):,} parameters of a {cfg['architecture']} to {folder}.")
    show(f'Load it with timm.create_model("local-dir:{folder.as_posix()}", pretrained=True).')
    if layers:
        top_k = next(iter(layers.values())).router.top_k
        show(
            f"The checkpoint does not say how many experts a token takes: top_k is {top_k} unless "
            "you state it."
        )
    if "crop_pct" not in cfg:
        show(
            "It does not say how its images were cropped either: config.json has timm's crop_pct, "
            f"{preprocessing(model)['crop_pct']}."
        )


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "demo": _demo,
    "export": _export,
    "push": _push,
    "list": _list,
    "info": _info,
    "evaluate": _evaluate,
    "compare": _compare,
    "fewshot": _fewshot,
    "benefits": _benefits,
    "routes": _routes,
    "report": _report,
    "import-vmoe": partial(_import, vmoe.import_checkpoint),
    "import-swin-moe": partial(_import, swin_moe.import_checkpoint),
}
