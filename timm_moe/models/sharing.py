"""Modules that stand in several places of a model, once in its state dict."""

from typing import Any

from torch import Tensor, nn


def keep_once_in_state_dict(model: nn.Module) -> None:
    """Let the state dict of a model hold what it shares under the first of its names only.

    Files stay small, safetensors takes them (it refuses shared tensors), and a weight average that goes through state
    dicts (timm's ModelEmaV3) moves every tensor once. Loading gives the other places the same tensors again.
    """
    model.register_state_dict_post_hook(_drop_repeated)
    model.register_load_state_dict_pre_hook(_repeat)


def _first_names(module: nn.Module) -> dict[str, str]:
    """Of each parameter that has an earlier name: its name, and the earlier one."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    return {name: earlier for name, earlier in names.items() if name != earlier}


def _drop_repeated(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in _first_names(module):
        state_dict.pop(prefix + name, None)


def _repeat(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    for name, first in _first_names(module).items():
        if prefix + name in state_dict:
            raise ValueError(
                f"The checkpoint has weights of its own in {prefix}{name}, which this model shares with {first}."
            )
        if prefix + first in state_dict:
            state_dict[prefix + name] = state_dict[prefix + first]
