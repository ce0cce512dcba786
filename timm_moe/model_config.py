"""What timm keeps on a model about itself: where its weights came from, its input, its preprocessing."""

from typing import Any

import timm.models
from torch import nn


def get_pretrained_cfg(model: nn.Module) -> dict[str, Any]:
    """A copy of the model's pretrained config."""
    return dict(model.pretrained_cfg)  # type: ignore[arg-type]  # timm sets it on any module


def set_pretrained_cfg(model: nn.Module, cfg: dict[str, Any]) -> None:
    """Replace the pretrained config, under both of its names."""
    model.pretrained_cfg = model.default_cfg = cfg  # type: ignore[assignment]  # as above


def fixed_img_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) that the model is built for, or None if it takes any size or does not say."""
    if getattr(model, "dynamic_img_size", False):
        return None
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None:  # what an expert model, or the dense one made of it, was created with
        args: Any = getattr(model, "dense_args", None) or getattr(model, "_model_args", None) or {}
        size = args.get("img_size")
    return (size, size) if isinstance(size, int) else size


def model_input_size(model: nn.Module) -> tuple[int, ...]:
    """(channels, height, width) of the images that a timm model takes, whatever its pretrained config says."""
    cfg = get_pretrained_cfg(model)
    channels, *size = cfg["input_size"]
    if hasattr(timm.models, "get_model_input_config"):  # older versions of timm do not keep track of it
        current = timm.models.get_model_input_config(model)
        channels, *current_size = current["input_size"]
        return (channels, *(current_size if current["fixed_input_size"] else size))
    first_conv = cfg.get("first_conv")
    # shifted patches have no first convolution
    first = model.get_submodule(first_conv) if isinstance(first_conv, str) else getattr(model, "patch_embed", None)
    return (getattr(first, "in_channels", channels), *(fixed_img_size(model) or size))
