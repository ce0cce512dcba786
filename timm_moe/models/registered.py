"""Questions about registered names, and models without weights by name."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
from timm.models import model_entrypoint
from torch import nn

from ..console import did_you_mean, shown_name
from ..quick_init import quick_init


def registered_models(pattern: str = "", pretrained: bool = False) -> list[str]:
    """List this package's models, or their pretrained tags, that match a pattern with wildcards."""
    return [
        name
        for name in timm.list_models(pattern, pretrained=pretrained)
        if is_registered_here(name)
    ]


def registrar(name: str) -> str | None:
    """Return the name of the module that registers a model with timm.

    It is None for timm's own models and for names that nobody registered.
    """
    module = model_entrypoint(name).__module__ if timm.is_model(name) else "timm.models"
    return None if module.startswith("timm.") else module


def is_registered_here(name: str) -> bool:
    """Tell if a registered model belongs to this package."""
    return (registrar(name) or "").startswith("timm_moe.")


def check_registered(name: str) -> None:
    """Check that timm knows a model of that name.

    Raises:
        ValueError: if it knows none; the message names the nearest.
    """
    if timm.is_model(name) and re.fullmatch(r"[\w.-]+", name):  # is_model ignores the tag
        return
    nearest = did_you_mean(name.partition(".")[0], timm.list_models())
    raise ValueError(f"Unknown model ({shown_name(name)}){nearest}")


def is_named_after_stock(name: str) -> bool:
    """Tell if a model is the EWA form of a timm architecture, which its name begins with."""
    architecture = name.partition(".")[0]
    stock = architecture.removesuffix("_ewa_moe")
    return (
        stock != architecture
        and is_registered_here(name)
        and timm.is_model(stock)
        and not is_registered_here(stock)
    )


@contextmanager
def weightless() -> Iterator[None]:
    """Within the block, make models on the meta device, without memory for their weights."""
    with torch.device("meta"), quick_init():
        yield


def weightless_model(name: str, **kwargs: Any) -> nn.Module:
    """Create a model on the meta device, without memory for its weights."""
    with weightless():
        return timm.create_model(name, **kwargs)
