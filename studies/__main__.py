"""The command: ``python -m studies [NAME ...]`` runs what is missing and writes results and page."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from . import images, page, results
from .catalogue import STUDIES
from .runs import Place, Run
from .scheduler import work_off
from .study import Size, Study

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STUDIES)}; by default all")
    parser.add_argument("--size", choices=("small", "paper"), default="small", help="for two cores, or the paper's")
    parser.add_argument("--seeds", type=_at_least_one, metavar="N", help="instead of each study's own number")
    parser.add_argument(
        "--jobs", type=_at_least_one, metavar="N", help="runs at a time, one thread each (default: cores, on a GPU 1)"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="images: train/<class>/ and test/<class>/")
    parser.add_argument(
        "--scripts",
        type=Path,
        default=os.environ.get("TIMM_SCRIPTS"),
        metavar="DIR",
        help="with timm's train.py and validate.py; by default $TIMM_SCRIPTS",
    )
    parser.add_argument(
        "--output", type=Path, default=HERE / "runs", metavar="DIR", help="of the runs (default: studies/runs)"
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="leave out runs whose figures stand in studies/results, by whichever machine",
    )
    parser.add_argument("--report", action="store_true", help="run nothing, write the page of earlier results")
    args = parser.parse_args()
    if args.report and (args.names or args.seeds):
        parser.error("--report writes the page of all results: it takes no study and no --seeds")
    unknown = set(args.names) - set(STUDIES)
    if unknown:
        parser.error(f"there is no study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    names = args.names or [name for name, study in STUDIES.items() if args.size in study.sizes]
    without = [name for name in names if args.size not in STUDIES[name].sizes]
    if without:
        parser.error(f"{', '.join(without)} cannot be run with --size {args.size}")
    try:
        failed = [] if args.report else _run_all([STUDIES[name] for name in names], args, parser)
        _tell_of_claims(page.write(HERE / "results"))
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit("Interrupted. The same command goes on from here.")
    if failed:
        sys.exit("\n".join(["Not done:", *failed]))


def _run_all(studies: Sequence[Study], args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Do what is missing of each study; lines about what failed. Whatever can be is refused before the first run."""
    if args.data_dir is None:
        parser.error("give the folder of the images by --data-dir")
    scripts = [Path(args.scripts or "", name) for name in ("train.py", "validate.py")]
    if args.scripts is None or not all(script.exists() for script in scripts):
        parser.error("give the folder that holds timm's train.py and validate.py by --scripts or TIMM_SCRIPTS")
    runs: list[Run] = []
    for study in studies:
        try:
            runs += _runs(study, _place(study.sizes[args.size], args), args)
        except (FileNotFoundError, FileExistsError, ValueError) as error:
            parser.error(f"{study.name}: {error}")
    jobs = args.jobs or (os.cpu_count() or 1 if args.device == "cpu" else 1)
    return work_off(runs, jobs, lambda run: _keep([run], args))


def _tell_of_claims(not_borne_out: int) -> None:
    if not_borne_out:
        print(
            f"Claims of {page.PAGE} that the results do not bear out: {not_borne_out}. Each says so in its place; they "
            "stand in studies/catalogue and studies/results.md.",
            file=sys.stderr,
        )


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _place(size: Size, args: argparse.Namespace) -> Place:
    """With its images."""
    root = args.output / size.setting
    root.mkdir(parents=True, exist_ok=True)
    parts = {name: images.link(part, args.data_dir, root / name) for name, part in size.images.items()}
    return Place(Path(args.scripts).resolve(), root.resolve(), parts, args.device)


def _runs(study: Study, place: Place, args: argparse.Namespace) -> list[Run]:
    """All that belongs to a study, or what its results lack; what is known already is kept first.

    Raises:
        FileExistsError: if the results are of other options, images or deployments.
        ValueError: if they are damaged.
    """
    size = study.sizes[args.size]
    seeds = range(size.seeds.start, size.seeds.start + (args.seeds or len(size.seeds)))
    runs = [Run(study, size, training, seed, place) for seed in seeds for training in size.trainings()]
    print(f"{study.name}: {study.question}", file=sys.stderr, flush=True)
    _keep(runs, args)
    path = _results(study, args)
    if args.missing:
        return results.missing(path, runs)
    if others := results.from_elsewhere(path, runs):
        print(
            f"{others} figures in {path} were measured elsewhere; runs here take their place without --missing.",
            file=sys.stderr,
        )
    return runs


def _keep(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Write what is known of runs of one study."""
    results.write(_results(runs[0].study, args), runs, keep=args.missing)


def _results(study: Study, args: argparse.Namespace) -> Path:
    return HERE / "results" / f"{study.name}-{args.size}.json"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by ^C, and its runs with it
    main()
