"""Upload of a checked model to the Hugging Face Hub, in one commit."""

import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import get_session
from torch import nn

from ..checkpoints.description import ENTRY
from ..checkpoints.model_folder import folder_of, load_folder, require_config
from ..checkpoints.model_spec import ModelSpec
from ..console import describe
from ..convert.expert_layers import moe_layers
from ..files import local_path, require_inside
from ..version import __version__
from .card import card, foreign_facts, timm_facts
from .export import (
    Written,
    checked_format,
    files_of_others,
    opened,
    require_finite_weights,
    write_dense,
    write_moe,
)
from .formats import FILES, Format, drop_second_num_classes, load_checked, stated_labels
from .history import History, public, recorded_history
from .options import PushOptions
from .verify import inputs_for, source_outputs

_logger = logging.getLogger(__name__)

#: Seconds for which the Hub may be silent in any request; the client tries most of them six times.
PATIENCE = 30
#: Files of a repository; other files of a pushed folder are not uploaded.
_FILES = (*FILES, "README.md")


@dataclass(frozen=True)
class Push:
    """Result of a push or a dry run.

    Attributes:
        repo_url: address of the repository.
        model_name: name for ``timm.create_model``, if the model is one of timm's; with the revision
            where that is not main.
        files: size of each file in bytes.
        card: text of README.md.
        url: of the commit or pull request; None after a dry run, and where the Hub had the same
            files already.
    """

    repo_url: str
    model_name: str
    files: dict[str, int]
    card: str
    url: str | None


def push_dense(
    source: nn.Module | str | Path,
    repo_id: str,
    private: bool = False,
    *,
    method: str = "average",
    svd_ratio: float | None = None,
    **options: Any,
) -> Push:
    """Publish the dense form of an expert model.

    ``timm.create_model("hf-hub:user/name", pretrained=True)`` loads it.

    Weights, config.json and a model card go up in one commit, after :func:`timm_moe.export_dense`
    has checked the model. Before that, only the login is asked for. Models that timm did not make
    are uploaded as that function writes them, and their card shows how they are loaded. The login
    is that of huggingface_hub: ``hf auth login``, or ``HF_TOKEN`` in the environment.

    Args:
        source: as for :func:`timm_moe.export_dense`; the folder of a dense model is published as by
            :func:`push_folder`.
        repo_id: ``user/name``; the repository is created if it does not exist.
        private: make the repository a private one.
        method: how the experts become one network, see :func:`timm_moe.to_dense`.
        svd_ratio: for ``method="svd"``, see there.
        **options: others of :class:`timm_moe.export.PushOptions`. By default the data set and the
            results come from train.py, the results only if the published model computes the
            function that was measured.

    Raises:
        ValueError: if an option is wrong, the export fails, a link in a folder leads out of it, or
            the Hub rejects the card.
        TypeError: if there is no option of a name.
        PermissionError: if nobody is logged in, or the Hub refuses the token, the repository or
            more storage.
        ConnectionError: if the Hub cannot be reached, breaks off, fails, or is silent for half a
            minute.
        OSError: if something cannot be read or written.
    """
    settings = PushOptions.of(push_dense, repo_id=repo_id, private=private, **options)
    api = _log_in(settings)
    folder = folder_of(source)
    if folder is None or method != "average":
        if folder is not None:
            _require_own_files(folder)
        layout = opened(source, settings, method)
        return _publish_dense(layout, method, svd_ratio, settings, api)
    with _own_copy(folder, settings) as copy:
        layout = checked_format(_loaded(copy, folder), settings, method)
        if moe_layers(layout.model):
            return _publish_dense(layout, method, svd_ratio, settings, api)
        return _publish_copy(copy, layout.model, settings, api)


def push_moe(
    source: nn.Module | str | Path, repo_id: str, private: bool = False, **options: Any
) -> Push:
    """Publish an expert model itself; loading it from the Hub needs this package.

    The uploaded files give the model back bit for bit: :func:`timm_moe.export.export_moe` checks it
    before.

    Args:
        source: a model of a registered name, a train.py checkpoint, a safetensors file, or a
            folder, which is uploaded unchanged.
        repo_id: as for :func:`push_dense`.
        private: as for :func:`push_dense`.
        **options: as for :func:`push_dense`, whose errors are raised too.
    """
    settings = PushOptions.of(push_moe, repo_id=repo_id, private=private, **options)
    api = _log_in(settings)
    folder = folder_of(source)
    if folder is not None:
        with _own_copy(folder, settings) as copy:
            model = _loaded(copy, folder)
            if moe_layers(model):
                return _publish_copy(copy, model, settings, api)
        raise ValueError(
            f"{source} holds no expert model; leave out --moe (push_dense) to publish it as it is."
        )
    layout = opened(source, settings)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, "model")
        return _publish_written(made, write_moe(layout, made, settings), settings, api)


def push_folder(folder: str | Path, repo_id: str, private: bool = False, **options: Any) -> Push:
    """Publish the folder of a model unchanged, dense or with experts.

    If it has a README.md, that is the model card.

    Only config.json may change. It gets the licence and class names that are given here. A
    ``num_classes`` in its ``model_args`` is moved out of them, since transformers rejects the
    duplicate. An ``auto_map`` is removed, by which transformers would find code elsewhere.

    Args:
        folder: with config.json and model.safetensors, as a path or ``local-dir:`` name.
        repo_id: as for :func:`push_dense`.
        private: as for :func:`push_dense`.
        **options: as for :func:`push_dense`, whose errors are raised too; of the model only the
            class names can be stated.
    """
    settings = PushOptions.of(push_folder, repo_id=repo_id, private=private, **options)
    api = _log_in(settings)
    folder = local_path(folder)
    with _own_copy(folder, settings) as copy:
        return _publish_copy(copy, _loaded(copy, folder), settings, api)


# --- a folder and its card


def _require_own_files(folder: Path) -> None:
    """Raise ValueError if something in a folder leads out of it, where the user's own files are."""
    require_config(folder)
    for file in sorted(folder.iterdir()):
        require_inside(file, folder)


@contextmanager
def _own_copy(folder: Path, settings: PushOptions) -> Iterator[Path]:
    """Copy a folder's files, so that what is checked is what is uploaded.

    Raises:
        ValueError: if an option is given that only a file can follow.
    """
    _require_own_files(folder)
    if settings.use_ema or settings.spec not in (None, ModelSpec()):
        raise ValueError(
            f"{folder} states its model and has one kind of weights: export it with these options, "
            "and push that."
        )
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(f"The folder {folder} has no model.safetensors.")
    with tempfile.TemporaryDirectory() as temporary:
        # The copy has the name of the folder, which the model card states.
        copy = Path(temporary, os.path.basename(os.path.abspath(folder)) or "model")
        copy.mkdir()
        for file in folder.iterdir():
            if file.name in _FILES:
                shutil.copyfile(require_inside(file, folder), copy / file.name)
        yield copy


def _loaded(copy: Path, folder: Path) -> nn.Module:
    """Load the model of a folder's copy.

    Raises:
        ValueError: unless the model is whole and finite; it names the folder, not the copy.
    """
    try:
        model = load_folder(f"local-dir:{copy}", ModelSpec(), called=str(folder))
        require_finite_weights(model)
        source_outputs(model, inputs_for(model, None))
    except ValueError as error:
        raise ValueError(str(error).replace(str(copy), str(folder))) from error
    return model


def _publish_copy(copy: Path, model: nn.Module, settings: PushOptions, api: HfApi | None) -> Push:
    """Upload the copy of a folder, with the licence and class names that the user states.

    Raises:
        ValueError: if what a card states is given beside the folder's own card.
    """
    if (copy / "README.md").exists() and (settings.license or settings.dataset or settings.metrics):
        raise ValueError(
            f"{copy.name} has a README.md of its own: state licence, data set and metrics there, "
            "or take the file away."
        )
    file = copy / "config.json"
    has_labels = settings.label_names is not None or settings.label_descriptions is not None
    text = file.read_text(encoding="utf-8")
    config = {**json.loads(text), **(stated_labels(model, settings) if has_labels else {})}
    drop_second_num_classes(config)
    config.pop("auto_map", None)  # it would lead transformers to code
    history = recorded_history(model.origin)  # type: ignore[arg-type]
    if history is None:
        config.pop(ENTRY, None)  # it is the history of other weights
    if settings.license is not None:
        config.get("pretrained_cfg", config)["license"] = settings.license
    if config != json.loads(text):
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    facts = timm_facts(load_checked(copy, "timm"), settings)
    text = card(facts, history or History(public(copy)), settings)
    return _publish(copy, text, facts.library, settings, api)


def _publish_dense(
    layout: Format, method: str, svd_ratio: float | None, settings: PushOptions, api: HfApi | None
) -> Push:
    """Make a described model dense, write it, and upload that."""
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, "model")
        written = write_dense(layout, made, settings, method, svd_ratio)
        return _publish_written(made, written, settings, api)


def _publish_written(
    made: Path, written: Written, settings: PushOptions, api: HfApi | None
) -> Push:
    """Upload a folder that was written for this, with a card of what its reader loaded."""
    if written.layout.library == "timm":
        facts = timm_facts(written.model, settings)
    else:
        facts = foreign_facts(written, made, settings)
    text = card(facts, written.layout.history, settings)
    return _publish(made, text, facts.library, settings, api)


# --- the Hub


def _publish(
    folder: Path, card: str, library: str, settings: PushOptions, api: HfApi | None
) -> Push:
    """Upload the files of a folder, and the card unless there is a README.md among them."""
    files: dict[str, Path | bytes] = {file.name: file for file in sorted(folder.iterdir())}
    own = files.pop("README.md", None)
    text = own.read_text(encoding="utf-8") if isinstance(own, Path) else card
    files["README.md"] = text.encode()
    sizes = {
        name: len(file) if isinstance(file, bytes) else file.stat().st_size
        for name, file in files.items()
    }
    url, revision = None, settings.revision
    if api is not None:
        _logger.info("Uploading %.1f MB to %s ...", sum(sizes.values()) / 1e6, settings.repo_id)
        with _asking_the_hub(settings):
            url, revision = _commit(api, files, library, settings)
    repo_url = f"{HfApi().endpoint}/{settings.repo_id}"
    # The Hub names the revision of a pull request.
    model_name = replace(settings, revision=revision).model_name
    return Push(repo_url, model_name, sizes, text, url)


def _log_in(settings: PushOptions) -> HfApi | None:
    """Return a client of the Hub, after the Hub has accepted the token; None for a dry run."""
    if settings.dry_run:
        return None
    with _asking_the_hub():
        token = get_token()
        if token is None:
            raise PermissionError(
                "You are not logged in to the Hub: run hf auth login, or set HF_TOKEN."
            )
        if not re.fullmatch(r"[!-~]+", token):  # errors of the connection would print it
            raise PermissionError(
                "Your token for the Hub holds characters that no token has: run hf auth login "
                "again."
            )
        api = HfApi(token=True, library_name="timm_moe", library_version=__version__)
        if api.whoami().get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise PermissionError(
                "Your token for the Hub may only read: make one with the role write."
            )
    return api


def _commit(
    api: HfApi, files: dict[str, Path | bytes], library: str, settings: PushOptions
) -> tuple[str | None, str | None]:
    """Make one commit.

    Args:
        api: client of the Hub.
        files: by their names in the repository.
        library: library that loads the model.
        settings: of the push.

    Returns:
        The commit's URL, or None where the files are there already; and the revision to load.
    """
    repo_id, revision = settings.repo_id, settings.revision
    card = files["README.md"]
    assert isinstance(card, bytes)
    _require_valid(card.decode())
    try:
        is_private = api.model_info(repo_id, timeout=PATIENCE).private
    except RepositoryNotFoundError:
        # None leaves the choice to the organisation's default.
        api.create_repo(repo_id, private=settings.private or None)
    else:
        if settings.private and not is_private:
            raise PermissionError(
                f"{repo_id} is there already and public: push without --private, or to a new name."
            )
    if revision is not None and not settings.create_pr and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    last = api.model_info(repo_id, revision=revision, timeout=PATIENCE)
    there = {file.rfilename for file in last.siblings or ()}
    stale = sorted(there.intersection(files_of_others(library)) - files.keys())
    if stale:
        _logger.info(
            "Deleting %s, by which transformers would change the new model ...", " and ".join(stale)
        )
    # create_commit makes exactly one commit; upload_folder may make several.
    commit = api.create_commit(
        repo_id,
        [
            *(CommitOperationAdd(name, file) for name, file in files.items()),
            *map(CommitOperationDelete, stale),
        ],
        commit_message="Add model",
        revision=revision,
        create_pr=settings.create_pr,
    )
    if commit.oid == last.sha:
        return None, revision
    if commit.pr_url:
        return commit.pr_url, commit.pr_revision
    return commit.commit_url, revision


def _require_valid(text: str) -> None:
    """Ask the Hub about a card, before a repository is made for it.

    Raises:
        ValueError: if it rejects the card.
    """
    try:
        card = ModelCard(text, ignore_metadata_errors=True)
    except Exception as error:  # of the parser of YAML
        raise ValueError(f"README.md: {describe(error)}") from error
    try:
        card.validate()
    except ValueError as error:
        answer = str(error)
        with suppress(LookupError, TypeError, ValueError):
            answer = "; ".join(each["message"] for each in json.loads(answer)["errors"])
        raise ValueError(f"README.md: {answer}") from error


@contextmanager
def _asking_the_hub(settings: PushOptions | None = None) -> Iterator[None]:
    """Limit how long the Hub may keep its client waiting, and explain its errors.

    Without a limit the client waits for ever. Each error becomes one sentence.
    """
    client: Any = get_session()
    before, client.timeout = getattr(client, "timeout", None), PATIENCE
    begin = time.monotonic()
    try:
        yield
    except Exception as error:
        # The upload of a file wraps its error in a RuntimeError.
        cause = error.__cause__ if isinstance(error, RuntimeError) else None
        cause = cause if isinstance(cause, Exception) else error
        explained = _explained(cause, settings, time.monotonic() - begin)
        if explained is None:
            raise
        raise explained from error
    finally:
        client.timeout = before


def _explained(error: Exception, settings: PushOptions | None, waited: float) -> Exception | None:
    """Return the error to raise in place of one of the Hub's client; None to leave it as it is.

    Args:
        error: that the client raised.
        settings: of the push; None before there is a repository.
        waited: seconds since the client was asked.
    """
    if isinstance(error, HfHubHTTPError):
        return _explained_answer(error, "this" if settings is None else settings.repo_id)

    hub = f"The Hub at {HfApi().endpoint}"
    # The client's own library is httpx or its successor, by its version.
    is_of_http = "HTTPError" in (kind.__name__ for kind in type(error).__mro__)
    if is_of_http and "Timeout" in type(error).__name__:
        return ConnectionError(
            f"{hub} does not answer: it was given {PATIENCE} seconds for each request, and "
            f"{waited:.0f} in all. A push is made whole or not at all, so try again later."
        )
    # The others come from other libraries, such as hf_xet.
    if is_of_http or isinstance(error, (ConnectionError, json.JSONDecodeError)):
        return ConnectionError(
            f"{hub} cannot be reached or broke off ({type(error).__name__}); a push is made "
            "whole or not at all, so try again once the network is there."
        )
    # The client raises these on an answer of another form than it expects.
    if isinstance(error, (AttributeError, LookupError, TypeError)):
        return ConnectionError(
            f"{hub} gave an answer that its client cannot read ({describe(error)})."
        )
    if isinstance(error, ValueError):
        return ValueError(f"The Hub did not take it: {describe(error)}")
    return None


def _explained_answer(error: HfHubHTTPError, where: str) -> Exception:
    """Return the error to raise for an answer of the Hub about a repository."""
    status = error.response.status_code
    says = " ".join((error.server_message or "no reason given").split())[:300].rstrip(".")
    if status == 401:
        return PermissionError(
            "The Hub does not know your token: run hf auth login again, or correct HF_TOKEN."
        )
    if status in (402, 403):
        return PermissionError(f"The Hub does not let you write to {where}: {says}.")
    if status == 409:
        return FileExistsError(
            f"The name {where} is taken, perhaps by another kind of repository: {says}."
        )
    if status == 429 or status >= 500:
        return ConnectionError(
            f"The Hub failed ({status}: {says}); a push is made whole or not at all: try again."
        )
    return ValueError(f"The Hub refused {where} ({status}): {says}.")
