"""The command: ``python -m studies [NAME ...]`` runs what is missing and writes results and page."""

import argparse
import os
import sys
from pathlib import Path

from . import images, page, results
from .catalogue import STUDIES
from .runs import Place, Run
from .scheduler import work_off
from .study import Study

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(STUDIES)}; by default all")
    parser.add_argument("--size", choices=("small", "paper"), default="small", help="for two cores, or the paper's")
    parser.add_argument("--seeds", type=int, metavar="N", help="instead of each study's own number")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at a time, one thread each"
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
    parser.add_argument("--report", action="store_true", help="run nothing, write the page of earlier results")
    args = parser.parse_args()
    unknown = set(args.names) - set(STUDIES)
    if unknown:
        parser.error(f"there is no study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    if args.report:
        page.write(HERE / "results")
        return
    if args.data_dir is None:
        parser.error("give the folder of the images by --data-dir")
    if args.scripts is None or not (Path(args.scripts) / "train.py").exists():
        parser.error("give the folder that holds timm's train.py and validate.py by --scripts or TIMM_SCRIPTS")
    try:
        failed = [line for name in args.names or STUDIES for line in _run(STUDIES[name], args)]
    except FileNotFoundError as error:
        parser.error(str(error))
    page.write(HERE / "results")
    if failed:
        sys.exit("\n".join(["Not done:", *failed]))


def _run(study: Study, args: argparse.Namespace) -> list[str]:
    """Do what is missing of a study; lines about what failed."""
    size = study.sizes[args.size]
    root = args.output / f"{study.name}-{args.size}"
    folder = root / "images"
    root.mkdir(parents=True, exist_ok=True)
    classes = images.link(size.images, args.data_dir, folder)
    place = Place(Path(args.scripts).resolve(), folder.resolve(), root.resolve(), classes, args.device)
    seeds = range(args.seeds or size.seeds)
    runs = [Run(study, size, training, seed, place) for seed in seeds for training in study.trainings()]
    print(f"{study.name}: {study.question}", file=sys.stderr, flush=True)
    path = HERE / "results" / f"{study.name}-{args.size}.json"
    return work_off(runs, args.jobs, lambda: results.write(path, runs))


if __name__ == "__main__":
    main()
