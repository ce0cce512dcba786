"""The Hugging Face Hub: login, one commit, and its errors in one sentence each."""

import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import get_session

from ..console import describe
from ..version import __version__
from .export import files_of_others
from .options import PushOptions

_logger = logging.getLogger(__name__)

#: Seconds for which the Hub may be silent in any request; the client tries most of them six times.
PATIENCE = 30


def log_in(settings: PushOptions) -> HfApi | None:
    """Return a client of the Hub, after the Hub has accepted the token; None for a dry run.

    Raises:
        PermissionError: if nobody is logged in, or the token is refused or may only read.
        ConnectionError: as :func:`asking_the_hub`.
    """
    if settings.dry_run:
        return None
    with asking_the_hub():
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


def commit(
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

    Raises:
        ValueError: if the Hub rejects the card.
        PermissionError: if the repository is to be private, and is there already and public.
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
def asking_the_hub(settings: PushOptions | None = None) -> Iterator[None]:
    """Limit how long the Hub may keep its client waiting, and explain its errors.

    Without a limit the client waits for ever. Each error becomes one sentence.

    Args:
        settings: of the push; None before there is a repository.

    Raises:
        PermissionError: if the Hub refuses the token, or the repository to it.
        FileExistsError: if the name is that of another kind of repository.
        ConnectionError: if the Hub cannot be reached, fails, or does not answer.
        ValueError: if the Hub does not take what is sent.
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

    if isinstance(error, OfflineModeIsEnabled):
        return ConnectionError("HF_HUB_OFFLINE is set, so nothing is uploaded: unset it.")
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
