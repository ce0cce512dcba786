"""The command ``python -m studies [NAME ...]``.

It runs what is missing, then writes the results and both pages.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import page, results
from .catalogue import STUDIES
from .runs import Place, Run
from .scheduler import work_off
from .study import Size, Study, Training, with_used

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies",
        description=__doc__,
        epilog="TIMM_SCRIPTS names the folder with timm's train.py and validate.py.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(STUDIES)}; by default all"
    )
    parser.add_argument(
        "--size", choices=("small", "paper"), default="small", help="for two cores, or the paper's"
    )
    parser.add_argument(
        "--seeds", type=_at_least_one, metavar="N", help="instead of each study's own number"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TRAINING",
        help="names of trainings; by default all of each study",
    )
    parser.add_argument(
        "--jobs",
        type=_at_least_one,
        metavar="N",
        help="runs at a time (default: cores / threads, on a GPU 1)",
    )
    parser.add_argument(
        "--threads",
        type=_at_least_one,
        default=1,
        metavar="N",
        help="threads of each run on a CPU (default: 1)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile all trainings on a CPU; the pages tell which were",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="images: train/<class>/ and test/<class>/"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE / "runs",
        metavar="DIR",
        help="folder of the runs (default: studies/runs)",
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help=(
            "leave out runs whose figures are in studies/results, no matter which machine measured "
            "them"
        ),
    )
    parser.add_argument(
        "--report", action="store_true", help="run nothing, write the pages of earlier results"
    )
    args = parser.parse_args()
    if args.report and (args.names or args.seeds):
        parser.error("--report writes the pages of all results: it takes no study and no --seeds")
    if args.device != "cpu" and (args.compile or args.threads > 1):
        parser.error("--threads and --compile are for --device cpu")
    unknown = set(args.names) - set(STUDIES)
    if unknown:
        parser.error(
            f"there is no study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}"
        )
    names = args.names or [name for name, study in STUDIES.items() if args.size in study.sizes]
    without = [name for name in names if args.size not in STUDIES[name].sizes]
    if without:
        parser.error(f"{', '.join(without)} cannot be run with --size {args.size}")
    try:
        failed = [] if args.report else _run_all([STUDIES[name] for name in names], args, parser)
        _report_stale(page.write(HERE / "results"))
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
    if failed:
        sys.exit("\n".join(["Not done:", *failed]))


def _run_all(
    studies: Sequence[Study], args: argparse.Namespace, parser: argparse.ArgumentParser
) -> list[str]:
    """Run what each study lacks. Mistakes that can be found before the first run are.

    Returns:
        A line for each run that failed.
    """
    if args.data_dir is None:
        parser.error("give the folder of the images by --data-dir")
    runs: list[Run] = []
    for study in studies:
        try:
            size = study.sizes[args.size]
            place = Place.of(
                size, args.output, args.data_dir, args.device, args.threads, args.compile
            )
            runs += _runs(study, place, args)
        except (FileNotFoundError, FileExistsError, ValueError) as error:
            parser.error(f"{study.name}: {error}")
    cores = os.cpu_count() or 1
    jobs = args.jobs or (max(cores // args.threads, 1) if args.device == "cpu" else 1)
    return work_off(runs, jobs, lambda run: _keep([run], args))


def _report_stale(lines: Sequence[str]) -> None:
    if lines:
        print(
            "\n".join(["Findings in studies/catalogue that disagree with the results:", *lines]),
            file=sys.stderr,
        )


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _runs(study: Study, place: Place, args: argparse.Namespace) -> list[Run]:
    """List the runs of a study.

    With ``--missing`` these are only the runs that its results lack. What is known already is
    stored.

    Raises:
        FileExistsError: if the results are of other options, images or deployments.
        ValueError: if they are damaged.
    """
    size = study.sizes[args.size]
    seeds = range(size.seeds.start, size.seeds.start + (args.seeds or len(size.seeds)))
    trainings = _selected(size, args.only)
    runs = [
        Run(study, size, training, seed, place)
        for seed in seeds
        for training in trainings
        if args.seeds or seed in size.seeds_of(training)
    ]
    print(f"{study.name}: {study.question}", file=sys.stderr, flush=True)
    _keep(runs, args)
    path = _results(study, args)
    if args.missing:
        return results.missing(path, runs)
    if others := results.from_elsewhere(path, runs):
        print(
            f"{others} figures in {path} were measured elsewhere; runs here replace them, except "
            "with --missing.",
            file=sys.stderr,
        )
    return runs


def _selected(size: Size, names: Sequence[str] | None) -> list[Training]:
    """Select the trainings of these names, and those that they use; all without names.

    Raises:
        ValueError: if there is no training of a name.
    """
    trainings = size.trainings()
    if names is None:
        return trainings
    if unknown := set(names) - {training.name for training in trainings}:
        raise ValueError(
            f"there is no training {', '.join(sorted(unknown))}; there are "
            f"{', '.join(training.name for training in trainings)}"
        )
    needed = {
        used.name
        for training in trainings
        if training.name in names
        for used in with_used(training)
    }
    return [training for training in trainings if training.name in needed]


def _keep(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Write the results of runs of one study."""
    results.write(_results(runs[0].study, args), runs, keep=args.missing)


def _results(study: Study, args: argparse.Namespace) -> Path:
    return HERE / "results" / f"{study.name}-{args.size}.json"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by ^C, and its runs with it
    main()
