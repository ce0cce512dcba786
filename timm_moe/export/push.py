"""Upload of a checked model to the Hugging Face Hub, in one commit."""

import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from torch import nn

from ..checkpoints.model_folder import folder_of, require_config
from ..console import describe
from ..convert.expert_layers import moe_layers
from ..files import require_inside
from .card import card, foreign_facts, timm_facts
from .export import Written, opened, write_dense, write_moe
from .formats import Format
from .hub import asking_the_hub, commit, log_in
from .options import PushOptions

_logger = logging.getLogger(__name__)


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
        source: as for :func:`timm_moe.export_dense`; the README.md in the folder of a dense
            model is its card.
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
    api = log_in(settings)
    layout = _opened(source, settings, method)
    readme, own_card = _readme(source), None
    if readme is not None and not moe_layers(layout.model):
        own_card = _own_card(readme, settings)
    elif readme is not None:
        _logger.warning(
            f"The README.md of {readme.parent} is about its experts, so it is not uploaded with "
            "the dense model: --moe (push_moe) publishes the experts with it."
        )
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, "model")
        written = write_dense(layout, made, settings, method, svd_ratio)
        return _publish(made, written, own_card, settings, api)


def push_moe(
    source: nn.Module | str | Path, repo_id: str, private: bool = False, **options: Any
) -> Push:
    """Publish an expert model itself; loading it from the Hub needs this package.

    The uploaded files give the model back bit for bit: :func:`timm_moe.export.export_moe` checks it
    before.

    Args:
        source: a model of a registered name, a train.py checkpoint, a safetensors file, or a
            folder, whose README.md is its card.
        repo_id: as for :func:`push_dense`.
        private: as for :func:`push_dense`.
        **options: as for :func:`push_dense`, whose errors are raised too.
    """
    settings = PushOptions.of(push_moe, repo_id=repo_id, private=private, **options)
    api = log_in(settings)
    layout = _opened(source, settings)
    readme = _readme(source)
    own_card = None if readme is None else _own_card(readme, settings)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary, "model")
        written = write_moe(layout, made, settings)
        return _publish(made, written, own_card, settings, api)


def _opened(
    source: nn.Module | str | Path, settings: PushOptions, method: str | None = None
) -> Format:
    """Load and describe a source; of a folder nothing may lead out to the user's own files."""
    if (folder := folder_of(source)) is not None:
        require_config(folder)
        for file in sorted(folder.iterdir()):
            require_inside(file, folder)
    return opened(source, settings, method)


def _readme(source: nn.Module | str | Path) -> Path | None:
    """Return the README.md of a source; None if it is no folder, or has none."""
    folder = folder_of(source)
    if folder is None or not (folder / "README.md").exists():
        return None
    return folder / "README.md"


def _own_card(readme: Path, settings: PushOptions) -> str:
    """Read the README.md of a folder whose model is published as it is.

    Raises:
        ValueError: if what a card states is given beside it, or it is no text in UTF-8.
    """
    if settings.license or settings.dataset or settings.metrics:
        raise ValueError(
            f"{readme.parent.name} has a README.md of its own: state licence, data set and metrics "
            "there, or take the file away."
        )
    try:
        return readme.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{readme} is no text in UTF-8: {describe(error)}") from error


def _publish(
    made: Path, written: Written, own_card: str | None, settings: PushOptions, api: HfApi | None
) -> Push:
    """Upload a folder that was written for this, with a card of what its reader loaded."""
    if written.layout.library == "timm":
        facts = timm_facts(written.model, settings)
    else:
        facts = foreign_facts(written, made, settings)
    text = card(facts, written.layout.history, settings) if own_card is None else own_card
    files: dict[str, Path | bytes] = {file.name: file for file in sorted(made.iterdir())}
    files["README.md"] = text.encode()
    sizes = {
        name: len(file) if isinstance(file, bytes) else file.stat().st_size
        for name, file in files.items()
    }
    url, revision = None, settings.revision
    if api is not None:
        _logger.info("Uploading %.1f MB to %s ...", sum(sizes.values()) / 1e6, settings.repo_id)
        with asking_the_hub(settings):
            url, revision = commit(api, files, facts.library, settings)
    repo_url = f"{HfApi().endpoint}/{settings.repo_id}"
    # The Hub names the revision of a pull request.
    model_name = replace(settings, revision=revision).model_name
    return Push(repo_url, model_name, sizes, text, url)
