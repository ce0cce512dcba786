"""After training: a checked model on the Hugging Face Hub, in one commit."""

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # the base of all errors of the client's connection, whichever library it uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
    validate_repo_id,
)
from torch import nn

from ..checkpoints.source import ModelSpec, describe, load_source
from ..convert.blocks import moe_layers
from ..files import scratch_folder
from ..version import __version__
from .card import Card, StateDictCard, Statements, TimmCard, TransformersCard
from .export import Export, export_dense, export_moe, stated_labels
from .formats import load_exactly, state_classes_once
from .history import History, recorded_history

_logger = logging.getLogger(__name__)

#: Seconds until the Hub must have answered the first request.
TIMEOUT = 10
#: What a repository is made of; other files of a folder stay where they are.
_FILES = ("config.json", "model.safetensors", "README.md")


@dataclass(frozen=True)
class Destination:
    """Where a model goes.

    Attributes:
        repo_id: ``user/name``.
        private: make the repository a private one.
        revision: branch, made if it is not there; main by default.
        create_pr: open a pull request instead of committing to the branch.

    Raises:
        ValueError: if that is no name of a repository or branch.
    """

    repo_id: str
    private: bool = False
    revision: str | None = None
    create_pr: bool = False

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repo_id)
        except ValueError as error:
            raise ValueError(f"{self.repo_id!r} is no name of a repository: {describe(error)}") from error
        if self.repo_id.count("/") != 1:
            raise ValueError(f"A repository is named user/name, got {self.repo_id!r}.")
        if self.revision is not None and not re.fullmatch(r"\w[\w./-]*", self.revision):
            raise ValueError(f"revision must be the name of a branch, got {self.revision!r}.")


@dataclass(frozen=True)
class Push:
    """What a push uploaded, or would upload.

    Attributes:
        repo_url: where the repository is, or would be.
        repo_id: ``user/name``.
        files: size of each file in bytes.
        card: text of README.md.
        url: of the commit or pull request; None after a dry run, and where the Hub had these very files already.
        revision: to load it from, where that is not main.
    """

    repo_url: str
    repo_id: str
    files: dict[str, int]
    card: str
    url: str | None
    revision: str | None

    @property
    def model_name(self) -> str:
        """What ``timm.create_model`` takes, if the model is one of timm's."""
        return f"hf-hub:{self.repo_id}" + (f"@{self.revision}" if self.revision else "")


def push_dense(
    source: nn.Module | str | Path,
    repo_id: str,
    private: bool = False,
    *,
    method: str = "average",
    svd_ratio: float | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    spec: ModelSpec | None = None,
    model_args: dict[str, Any] | None = None,
    use_ema: bool = False,
    license: str | None = None,
    dataset: str | None = None,
    metrics: dict[str, float] | None = None,
    label_names: Sequence[str] | None = None,
    label_descriptions: Mapping[str, str] | None = None,
    example_inputs: Any = None,
) -> Push:
    """Publish the dense form of an expert model for ``timm.create_model("hf-hub:user/name", pretrained=True)``.

    Weights, config.json and a model card go up in one commit, after :func:`timm_moe.export_dense` has checked the
    model; until then nothing is sent but the question who is logged in. Models that timm did not make go up as that
    function writes them, and their card says what loads them. The login is that of huggingface_hub: ``hf auth
    login``, or ``HF_TOKEN`` in the environment.

    Args:
        source: as for :func:`timm_moe.export_dense`; the folder of a dense model is published as by
            :func:`push_folder`.
        repo_id: ``user/name``; the repository is created if it is not there.
        private: make the repository a private one.
        method: how the experts become one network, see :func:`timm_moe.to_dense`.
        svd_ratio: likewise.
        revision: branch to commit to, created if it is not there; main by default.
        create_pr: open a pull request instead.
        dry_run: do everything but upload; needs neither login nor network.
        spec: model to create for a file that does not name it.
        model_args: arguments of ``timm.create_model``, where the source does not tell them.
        use_ema: publish the EMA weights of a train.py checkpoint.
        license: for card and config.json, as the Hub abbreviates it; by default that of the pretrained weights training
            began from.
        dataset: for the card, the images it was trained on; by default what train.py was given by name.
        metrics: for the card, results of the published model, as ``{"top1": 77.1}``; by default what train.py measured
            on these weights, if they still are the same function.
        label_names: as for :func:`timm_moe.export_dense`.
        label_descriptions: likewise.
        example_inputs: likewise.

    Raises:
        ValueError: if an argument is wrong, the export fails, or the Hub finds the card faulty.
        PermissionError: if nobody is logged in, or the Hub refuses the token, the repository or more storage.
        ConnectionError: if the Hub cannot be reached, breaks off or fails.
        OSError: if something cannot be read or written.
    """
    destination, statements, api = _begin(repo_id, private, revision, create_pr, dry_run, license, dataset, metrics)
    labels = Labels(label_names, label_descriptions)
    folder = folder_of(source)
    if folder is not None and method == "average":
        refuse_options_of_files(folder, spec, use_ema)
        model = load_source(folder)
        if not moe_layers(model):
            return _publish_folder(folder, model, statements, labels, destination, api)
    with scratch_folder("push") as temporary:
        made = temporary / "model"
        options: dict[str, Any] = dict(spec=spec, model_args=model_args, use_ema=use_ema, license=license)
        options |= dict(svd_ratio=svd_ratio, example_inputs=example_inputs)
        export = export_dense(source, made, method, **options, **asdict(labels))
        if not export.exact:
            _logger.warning("The dense model is not the one that was trained: validate it.")
        card = _card(export, recorded_history(made), statements, destination)
        return _publish(made, card, destination, api, [file.name for file in made.iterdir()])


def push_moe(
    source: nn.Module | str | Path,
    repo_id: str,
    private: bool = False,
    *,
    revision: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    spec: ModelSpec | None = None,
    model_args: dict[str, Any] | None = None,
    use_ema: bool = False,
    license: str | None = None,
    dataset: str | None = None,
    metrics: dict[str, float] | None = None,
    label_names: Sequence[str] | None = None,
    label_descriptions: Mapping[str, str] | None = None,
) -> Push:
    """Publish an expert model itself; loading it from the Hub needs this package.

    What is uploaded gives the model back bit for bit: :func:`timm_moe.export.export_moe` checks it before.

    Args:
        source: a model of a registered name, a train.py checkpoint, a safetensors file, or a folder, which is uploaded
            as it is.

    The other arguments and the errors are those of :func:`push_dense`.
    """
    destination, statements, api = _begin(repo_id, private, revision, create_pr, dry_run, license, dataset, metrics)
    labels = Labels(label_names, label_descriptions)
    folder = folder_of(source)
    if folder is not None:
        refuse_options_of_files(folder, spec, use_ema)
        model = load_source(folder)
        if not moe_layers(model):
            raise ValueError(f"{source} holds no expert model; leave out --moe (push_dense) to publish it as it is.")
        return _publish_folder(folder, model, statements, labels, destination, api)
    with scratch_folder("push") as temporary:
        made = temporary / "model"
        options: dict[str, Any] = dict(spec=spec, use_ema=use_ema, license=license)
        export_moe(source, made, model_args, **options, **asdict(labels))
        return _publish(made, _timm_card(made, recorded_history(made), statements, destination), destination, api)


def push_folder(
    folder: str | Path,
    repo_id: str,
    private: bool = False,
    *,
    revision: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    license: str | None = None,
    dataset: str | None = None,
    metrics: dict[str, float] | None = None,
    label_names: Sequence[str] | None = None,
    label_descriptions: Mapping[str, str] | None = None,
) -> Push:
    """Publish the folder of a model as it is, dense or with experts, with its own README.md if it has one.

    Only config.json may change: it gets the licence and the classes that are stated here, and where its ``model_args``
    repeat the number of classes, as timm writes it, this goes from there, since transformers fails on it.

    Args:
        folder: with config.json and model.safetensors, as a path or ``local-dir:`` name.

    The other arguments and the errors are those of :func:`push_dense`.
    """
    destination, statements, api = _begin(repo_id, private, revision, create_pr, dry_run, license, dataset, metrics)
    labels = Labels(label_names, label_descriptions)
    model = load_source(folder)
    return _publish_folder(Path(str(folder).removeprefix("local-dir:")), model, statements, labels, destination, api)


def _begin(
    repo_id: str,
    private: bool,
    revision: str | None,
    create_pr: bool,
    dry_run: bool,
    license: str | None,
    dataset: str | None,
    metrics: dict[str, float] | None,
) -> tuple[Destination, Statements, HfApi | None]:
    """What every push is given, checked, and a client that is logged in, before any work is done."""
    destination = Destination(repo_id, private, revision, create_pr)
    statements = Statements(license, dataset, metrics or {})
    return destination, statements, None if dry_run else _log_in()


@dataclass(frozen=True)
class Labels:
    """Names of the classes, as the publisher states them; see :func:`timm_moe.export_dense`."""

    label_names: Sequence[str] | None = None
    label_descriptions: Mapping[str, str] | None = None


@contextmanager
def client_output() -> Iterator[None]:
    """For the time of the block, what the Hub's client says comes once, and its bars on a terminal only."""
    logger = logging.getLogger("huggingface_hub")
    unstated = HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
    hide = unstated and not sys.stderr.isatty()
    propagate, logger.propagate = logger.propagate, False  # it has a handler of its own
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.propagate = propagate
        if hide:
            enable_progress_bars()


def folder_of(source: nn.Module | str | Path) -> Path | None:
    """The folder that a source is, as path or ``local-dir:`` name; None if it is something else."""
    if isinstance(source, nn.Module):
        return None
    path = Path(str(source).removeprefix("local-dir:"))
    return path if path.is_dir() else None


def refuse_options_of_files(folder: str | Path, spec: ModelSpec | None, use_ema: bool) -> None:
    """Raise ValueError if something is asked of a folder that only a file could give."""
    if use_ema or spec not in (None, ModelSpec()):
        raise ValueError(
            f"The folder {folder} states its model and has one kind of weights: to change something, its preprocessing "
            "for one, export it to another folder and push that."
        )


def _publish_folder(
    folder: Path,
    model: nn.Module,
    statements: Statements,
    labels: Labels,
    destination: Destination,
    api: HfApi | None,
) -> Push:
    """As it is, but for what is stated anew."""
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"The folder {folder} has no model.safetensors.")
    if (folder / "README.md").is_file() and statements != Statements():
        raise ValueError(
            f"{folder} has a README.md of its own, which is published as it is: state licence, data set and "
            "metrics there, or take the file away."
        )
    left_out = sorted(file.name for file in folder.iterdir() if file.name not in _FILES)
    if left_out:
        _logger.info("Not uploaded: %s.", ", ".join(left_out))
    stated = {} if labels == Labels() else stated_labels(model, labels.label_names, labels.label_descriptions)
    with scratch_folder("push") as temporary:
        made = _with_statements(folder, temporary / "model", statements.license, stated)
        return _publish(made, _timm_card(made, recorded_history(folder), statements, destination), destination, api)


def _with_statements(folder: Path, made: Path, license: str | None, labels: dict[str, Any]) -> Path:
    """The folder itself if its config.json states all this already, else one that differs in this alone."""
    text = (folder / "config.json").read_text(encoding="utf-8")
    config = {**json.loads(text), **labels}
    state_classes_once(config)
    if license is not None:
        config.get("pretrained_cfg", config)["license"] = license
    if config == json.loads(text):
        return folder
    made.mkdir()
    for name in _FILES:
        if (folder / name).is_file():
            (made / name).symlink_to((folder / name).absolute())
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return made


def _timm_card(folder: Path, history: History, statements: Statements, destination: Destination) -> Card:
    """Of what is in a folder, once timm has loaded it bit for bit."""
    model = load_exactly(folder, "timm")
    return TimmCard(destination.repo_id, history, statements, destination.revision, published=model)


def _card(export: Export, history: History, statements: Statements, destination: Destination) -> Card:
    """Of what was exported, and so is checked already unless timm is to load it from this very folder."""
    if export.library == "timm":
        return _timm_card(export.path, history, statements, destination)
    config = json.loads((export.path / "config.json").read_text(encoding="utf-8"))
    cards = {"transformers": TransformersCard, "pytorch": StateDictCard}
    return cards[export.library](
        destination.repo_id, history, statements, destination.revision, export=export, config=config
    )


def _publish(
    folder: Path, card: Card, destination: Destination, api: HfApi | None, names: Sequence[str] = _FILES
) -> Push:
    """The files of these names that the folder holds, with a card where it has none."""
    files: dict[str, Path | bytes] = {name: folder / name for name in names if (folder / name).is_file()}
    text = (folder / "README.md").read_text(encoding="utf-8") if "README.md" in files else str(card)
    files["README.md"] = text.encode()
    sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in files.items()}
    url, revision = None, destination.revision
    if api is not None:
        _logger.info("Uploading %.1f MB to %s ...", sum(sizes.values()) / 1e6, destination.repo_id)
        with _errors_in_a_sentence(destination):
            url, revision = _commit(api, files, destination)
    repo_url = f"{HfApi().endpoint}/{destination.repo_id}"
    return Push(repo_url, destination.repo_id, sizes, text, url, revision)


def _log_in() -> HfApi:
    """A client of the Hub, once it has said that it knows the token; asked before any work is done."""
    with _errors_in_a_sentence():
        token = get_token()
        if token is None:
            raise PermissionError("You are not logged in to the Hub: run hf auth login, or set HF_TOKEN.")
        if not re.fullmatch(r"[!-~]+", token):  # errors of the connection would print it
            raise PermissionError("Your token for the Hub holds characters that no token has: run hf auth login again.")
        api = HfApi(token=True, library_name="timm_moe", library_version=__version__)
        response = get_session().get(
            f"{api.endpoint}/api/whoami-v2", headers=build_hf_headers(token=True), timeout=TIMEOUT
        )
        hf_raise_for_status(response)
        if response.json().get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise PermissionError("Your token for the Hub may only read: make one with the role write.")
    return api


def _commit(api: HfApi, files: dict[str, Path | bytes], destination: Destination) -> tuple[str | None, str | None]:
    """Make what is missing of repository and branch, then one commit; its URL and the revision to load.

    There is no URL where the revision had these files: then the client sends nothing.
    """
    repo_id, revision = destination.repo_id, destination.revision
    try:
        is_private = api.model_info(repo_id, timeout=TIMEOUT).private
    except RepositoryNotFoundError:
        api.create_repo(repo_id, private=destination.private or None)  # else as the organisation has it
    else:
        if destination.private and not is_private:
            raise PermissionError(f"{repo_id} is there already and public: push without --private, or to a new name.")
    if revision is not None and not destination.create_pr and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    last = api.model_info(repo_id, revision=revision, timeout=TIMEOUT).sha
    # upload_folder may spread its files over several commits
    commit = api.create_commit(
        repo_id,
        [CommitOperationAdd(name, file) for name, file in files.items()],
        commit_message="Add model",
        revision=revision,
        create_pr=destination.create_pr,
    )
    if commit.oid == last:
        return None, revision
    if commit.pr_url:
        return commit.pr_url, commit.pr_revision
    return commit.commit_url, revision


@contextmanager
def _errors_in_a_sentence(destination: Destination | None = None) -> Iterator[None]:
    """Turn the client's errors into built-in ones of one sentence."""
    try:
        yield
    except Exception as error:
        explained = _explain(error, destination)
        if explained is error:
            raise
        raise explained from error


def _explain(error: Exception, destination: Destination | None) -> Exception:
    if isinstance(error, HfHubHTTPError):
        return _refusal(error, destination)
    if isinstance(error, (HTTPError, json.JSONDecodeError)):
        return ConnectionError(
            f"The Hub at {HfApi().endpoint} cannot be reached or broke off ({type(error).__name__}); a push is made "
            "whole or not at all, so try again once the network is there."
        )
    if isinstance(error, ValueError):
        return ValueError(f"The Hub did not take it: {describe(error)}")
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):  # in the upload of a file
        return _explain(error.__cause__, destination)
    return error


def _refusal(error: HfHubHTTPError, destination: Destination | None) -> Exception:
    status = error.response.status_code
    where = "this" if destination is None else destination.repo_id
    says = " ".join((error.server_message or "no reason given").split())[:300].rstrip(".")
    if isinstance(error, RevisionNotFoundError):
        return ValueError(f"{where} has no revision {destination and destination.revision}.")
    if status == 401:
        return PermissionError("The Hub does not know your token: run hf auth login again, or correct HF_TOKEN.")
    if status in (402, 403):
        return PermissionError(f"The Hub does not let you write to {where}: {says}.")
    if status == 409:
        return FileExistsError(f"The name {where} is taken, perhaps by another kind of repository: {says}.")
    if status == 429 or status >= 500:
        return ConnectionError(
            f"The Hub failed ({status}: {says}); a push is made whole or not at all, so try again later."
        )
    return ValueError(f"The Hub refused {where} ({status}): {says}.")
