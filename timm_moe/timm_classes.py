"""Classes of timm's models by name: one that the installed timm lacks costs its own models alone."""

import sys


def timm_classes(*names: str) -> tuple[type, ...]:
    """Return the classes of these names, each ``"module.Class"`` of timm.models, without those that timm lacks."""
    split = (name.split(".") for name in names)
    found = (
        getattr(sys.modules.get(f"timm.models.{module}"), name, None) for module, name in split
    )
    return tuple(filter(None, found))


def is_from(thing: object, *modules: str) -> bool:
    """Tell if the class of an object, or one that it derives from, is of one of these modules of timm.models."""
    homes = {kind.__module__ for kind in type(thing).__mro__}
    return not homes.isdisjoint(f"timm.models.{module}" for module in modules)
