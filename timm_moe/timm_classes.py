"""Classes of timm's models by name.

A class that the installed timm lacks is left out, so that only models of that class are missing.
"""

import sys


def timm_classes(*names: str) -> tuple[type, ...]:
    """Return classes of timm's models, without those that the installed timm lacks.

    Args:
        names: names of the classes, each ``"module.Class"`` within timm.models.
    """
    classes = []
    for name in names:
        module, _, class_name = name.partition(".")
        found = getattr(sys.modules.get(f"timm.models.{module}"), class_name, None)
        if found is not None:
            classes.append(found)
    return tuple(classes)


def is_from(thing: object, *modules: str) -> bool:
    """Tell if the class of an object, or one of its bases, is of certain modules of timm.models.

    Args:
        thing: the object.
        modules: names of the modules within timm.models.
    """
    homes = {kind.__module__ for kind in type(thing).__mro__}
    return not homes.isdisjoint(f"timm.models.{module}" for module in modules)
