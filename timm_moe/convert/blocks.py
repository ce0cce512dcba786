"""The blocks that a placement rule selects, and the replacement of the networks in them."""

from collections.abc import Iterable

from torch import nn

from .split import SplitFfn


def select_blocks(moe_layers: str | int | Iterable[int], depth: int) -> list[int]:
    """Return the sorted block numbers that a placement rule selects.

    Args:
        moe_layers: the rule, or block numbers (see :func:`convert_to_moe`).
        depth: number of blocks of the model.

    Raises:
        ValueError: if the rule is unknown or asks for blocks that the model does not have.
    """
    given = moe_layers.split(",") if isinstance(moe_layers, str) else moe_layers
    parts = [str(part).strip() for part in (given if isinstance(given, Iterable) else [given])]

    rule, _, number = parts[0].rpartition("-") if parts else ("", "", "")
    if len(parts) == 1 and rule in ("every", "last", "tail") and number.isdecimal():
        return _blocks_of_rule(rule, int(number), depth)

    if not parts or not all(part.removeprefix("-").isdecimal() for part in parts):
        raise ValueError(
            "moe_layers must be 'every-n', 'last-n', 'tail-n' or block numbers such as '1,3,5', "
            f"got {moe_layers!r}."
        )
    blocks = {int(part) for part in parts}
    outside = [block for block in blocks if not 0 <= block < depth]
    if outside:
        raise ValueError(
            f"moe_layers names block {outside[0]}, but the model has blocks 0 to {depth - 1} with "
            "an Mlp; one with several counts as often."
        )
    return sorted(blocks)


def _blocks_of_rule(rule: str, number: int, depth: int) -> list[int]:
    """Return the block numbers that ``"every-n"``, ``"last-n"`` or ``"tail-n"`` selects."""
    allowed = range(1, depth, 2) if rule == "last" else range(depth)
    if not 1 <= number <= len(allowed):
        kind = "odd-numbered blocks" if rule == "last" else "blocks"
        raise ValueError(
            f"moe_layers='{rule}-{number}' does not fit: n must lie between 1 and "
            f"{len(allowed)}, the number of {kind} with an Mlp."
        )
    return list(allowed[number - 1 :: number] if rule == "every" else allowed[-number:])


def put(model: nn.Module, path: str, old: nn.Module, new: nn.Module) -> None:
    """Replace a network by an expert layer, or an expert layer by a network.

    Every block that shares the old module gets the new one.
    """
    block = model.get_submodule(path.rpartition(".")[0])
    if isinstance(old, SplitFfn):
        old.install(model, block, new)
    elif isinstance(new, SplitFfn):
        new.restore(model, block)
    else:
        everything = list(model.named_modules(remove_duplicate=False))
        for name in [name for name, module in everything if module is old]:
            model.set_submodule(name, new)
