"""Upload of a checked model to the Hugging Face Hub, in one commit."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from torch import nn

from ..checkpoints.description import ENTRY
from ..checkpoints.model_folder import folder_of, load_folder, require_config
from ..checkpoints.model_spec import ModelSpec
from ..convert.expert_layers import moe_layers
from ..files import local_path, require_inside
from .card import card, foreign_facts, timm_facts
from .export import (
    Written,
    checked_format,
    opened,
    require_finite_weights,
    write_dense,
    write_moe,
)
from .formats import FILES, Format, drop_second_num_classes, load_checked, stated_labels
from .history import History, public, recorded_history
from .hub import asking_the_hub, commit, log_in
from .options import PushOptions
from .verify import inputs_for, source_outputs

_logger = logging.getLogger(__name__)

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
    api = log_in(settings)
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
            folder, which is published as by :func:`push_folder`.
        repo_id: as for :func:`push_dense`.
        private: as for :func:`push_dense`.
        **options: as for :func:`push_dense`, whose errors are raised too.
    """
    settings = PushOptions.of(push_moe, repo_id=repo_id, private=private, **options)
    api = log_in(settings)
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
    """Publish the folder of a model, dense or with experts.

    Its config.json, model.safetensors and README.md are uploaded, and no other file. The README.md
    is the model card; without one a card is written.

    Only config.json may change. It gets the licence, class names and problem type given here. A
    ``num_classes`` in its ``model_args`` is moved out of them, since transformers rejects the
    duplicate. An ``auto_map`` is removed, by which transformers would find code elsewhere, and so
    is the history of other weights.

    Args:
        folder: with config.json and model.safetensors, as a path or ``local-dir:`` name.
        repo_id: as for :func:`push_dense`.
        private: as for :func:`push_dense`.
        **options: as for :func:`push_dense`, whose errors are raised too; of the model only the
            class names and the problem type can be stated.
    """
    settings = PushOptions.of(push_folder, repo_id=repo_id, private=private, **options)
    api = log_in(settings)
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
    """Upload the copy of a folder, with the licence, class names and problem type that are stated.

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
    if settings.problem_type is not None:
        config["problem_type"] = settings.problem_type
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
        with asking_the_hub(settings):
            url, revision = commit(api, files, library, settings)
    repo_url = f"{HfApi().endpoint}/{settings.repo_id}"
    # The Hub names the revision of a pull request.
    model_name = replace(settings, revision=revision).model_name
    return Push(repo_url, model_name, sizes, text, url)
