"""A network becomes experts, and back."""

from . import built_in_routers  # noqa: F401  (registers the routers of this package)
from .convert import convert_to_moe
from .dense import to_dense
from .expert_layers import expert_parameters, moe_layers
from .find import ffn_paths
from .registry import RouterSpec, register_router

__all__ = [
    "RouterSpec",
    "convert_to_moe",
    "expert_parameters",
    "ffn_paths",
    "moe_layers",
    "register_router",
    "to_dense",
]
