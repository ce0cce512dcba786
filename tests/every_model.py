"""Check every ``<architecture>_ewa_moe``.

The command is ``python tests/every_model.py docs/generated/models_checked.md``.

For each name, with 2 experts in every other feed-forward network:

1. At full size, without memory for weights: ``to_dense`` gives the tensors and shapes of the stock
   model.
2. timm's ``create_model`` loads random weights of the stock model as pretrained ones: in eval mode
   the outputs equal the stock model's, in training mode they agree.
3. ``export_dense`` writes the model, loads it with stock timm and compares outputs. The tensors in
   the file are the weights of step 2, bit for bit.

Where the stock model can be made smaller, steps 2 and 3 use smaller images, and fewer blocks for
more than 30 million parameters. Each name becomes a row of the file. Names that the file has
already are skipped, so the run can be stopped, or divided by a pattern:
``python tests/every_model.py FILE 'swin*'``. All names take hours and 16 GB. A run over all names
ends with the architectures that ``timm_moe.models.ewa.FAMILIES`` lacks.
"""

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
from safetensors.torch import load_file
from timm.models import model_entrypoint, vision_transformer_hybrid
from torch import Tensor, nn

import timm_moe
from timm_moe.convert.expert_layers import parameters
from timm_moe.model_config import model_input_size
from timm_moe.models.ewa import architectures
from timm_moe.models.registered import weightless_model

HEADER = """\
# Every `_ewa_moe`, checked

What `python tests/every_model.py docs/generated/models_checked.md` found, which says what it
checks. *Checked as* are the arguments that made the model small enough; none: it was checked as it
is. A name without a row was not checked yet.

| model | checked as | result | seconds |
| --- | --- | --- | --- |
"""
LARGE = 30_000_000
#: Number of parameters that fit into memory several times.
LARGEST = 500_000_000
#: Arguments that make fewer blocks in some family, and keep each kind of block.
FEWER_BLOCKS: tuple[dict[str, Any], ...] = (
    dict(depth=4),
    dict(depth=4, num_kv_heads=4),  # Sapiens-2 states the heads of each block
    dict(depth=2),
    dict(depths=(2, 2, 2, 2)),
    dict(depths=(2, 2, 2, 2), embed_dim=128),  # Swin v2 of billions
    dict(depths=(1, 1, 2, 2)),
    dict(layers=(1, 1, 1, 1)),
    dict(stages=(1, 1, 2, 2)),
    dict(serial_depths=(1, 1, 1, 1)),
)
#: Sides that fit patches of up to 32, patches of 14, and windows. MViT fails with 112, but only on
#: real weights.
SMALLER_IMAGES = (128, 112, 192)


def smaller(architecture: str, stock: nn.Module) -> dict[str, Any]:
    """Find arguments that make a stock model small and that it accepts."""
    size = parameters(stock)
    kwargs: dict[str, Any] = {}
    if size > LARGE:
        kwargs = next(
            (fewer for fewer in FEWER_BLOCKS if _works(architecture, fewer, min(size, LARGEST))), {}
        )
    pixels = model_input_size(stock)[-1]
    for image, size_option in product(SMALLER_IMAGES, (True, False)):
        overlay = dict(input_size=(3, image, image))
        fewer = {
            **kwargs,
            **({"img_size": image} if size_option else {}),
            "pretrained_cfg_overlay": overlay,
        }
        if image < pixels and _works(architecture, fewer):
            return fewer
    return kwargs


def _works(architecture: str, kwargs: dict[str, Any], below: int | None = None) -> bool:
    try:
        model = weightless_model(architecture, **kwargs)
        with torch.no_grad():
            model.eval()(torch.empty(2, *model_input_size(model), device="meta"))
    except Exception:  # a constructor may raise anything for an argument that it does not take
        return False
    return below is None or parameters(model) < below


def check(architecture: str, kwargs: dict[str, Any]) -> None:
    """Run steps 2 and 3 for a stock model with these arguments.

    An exception is raised if a check fails.
    """
    torch.manual_seed(0)
    dense = _with_random_weights(timm.create_model(architecture, **kwargs)).eval()
    weights = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    pretrained = {
        **kwargs.get("pretrained_cfg_overlay", {}),
        "state_dict": weights,
        "num_classes": dense.num_classes,
    }
    model = timm.create_model(
        f"{architecture}_ewa_moe",
        pretrained=True,
        num_experts=2,
        **{**kwargs, "pretrained_cfg_overlay": pretrained},
    ).eval()
    model.pretrained_cfg.pop("state_dict")
    assert timm_moe.moe_layers(model)
    assert model.pretrained_cfg["architecture"] == f"{architecture}_ewa_moe"
    images = torch.randn(2, *model_input_size(model))
    with torch.no_grad():
        for expected, actual in zip(_tensors(dense(images)), _tensors(model(images)), strict=True):
            assert torch.isfinite(expected).all(), "the stock model gives NaN"
            # The weights are the same; where they lie in memory may decide which products BLAS
            # takes.
            torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    with tempfile.TemporaryDirectory() as folder:
        timm_moe.export_dense(model, f"{folder}/dense")
        exported = load_file(f"{folder}/dense/model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(
        torch.equal(tensor, weights[tensor_name]) for tensor_name, tensor in exported.items()
    )
    with torch.no_grad():
        results = [list(_tensors(_trained(module, images))) for module in (dense, model)]
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def _trained(model: nn.Module, images: Tensor) -> Any:
    """Return the outputs in training mode without dropout.

    The random numbers of dropout would differ between two models.
    """
    torch.manual_seed(0)  # for RoPE, which draws first
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    return model(images)


def check_shapes(architecture: str, stock: nn.Module) -> None:
    """Run step 1."""
    experts = weightless_model(f"{architecture}_ewa_moe", num_experts=2)
    dense = timm_moe.to_dense(experts)
    assert type(dense) is type(stock)
    assert _shapes(dense) == _shapes(stock)
    # named_parameters has shared weights once, so this also compares which ones are shared
    assert [name for name, _ in experts.named_parameters()] == [
        name for name, _ in stock.named_parameters()
    ]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@torch.no_grad()
def _with_random_weights(model: nn.Module) -> nn.Module:
    """Move all weights away from their initial values.

    Some initial values, zeros and small scales, hide what follows.
    """
    for parameter in model.parameters():
        parameter.add_(torch.empty_like(parameter).uniform_(-0.03, 0.03))
    return model


def _tensors(output: Any) -> Iterator[Tensor]:
    for part in output if isinstance(output, (tuple, list)) else [output]:
        if isinstance(part, Tensor):
            yield part
        else:
            yield from _tensors(part)


@contextmanager
def without_downloads() -> Iterator[None]:
    """Keep timm from fetching weights for the ResNet in some hybrids.

    The hybrids' own weights replace those.
    """
    with ExitStack() as stack:
        for name in ("resnet26d", "resnet50d"):
            untrained = partial(_untrained, getattr(vision_transformer_hybrid, name))
            stack.enter_context(mock.patch.object(vision_transformer_hybrid, name, untrained))
        yield


def _untrained(resnet: Callable[..., nn.Module], pretrained: bool, **kwargs: Any) -> nn.Module:
    return resnet(pretrained=False, **kwargs)


def missing() -> list[str]:
    """List the architectures of timm that have feed-forward networks but no ``_ewa_moe``."""
    stock = [
        name
        for name in timm.list_models()
        if model_entrypoint(name).__module__.startswith("timm.models.")
    ]
    others = sorted(set(stock) - set(architectures()))
    return [name for name in others if len(timm_moe.convert.ffn_paths(weightless_model(name))) > 1]


def main(file: str, pattern: str = "*") -> int:
    path, failed = Path(file), 0
    done = path.read_text() if path.is_file() else ""
    if not done:
        path.write_text(HEADER)
    names = [
        name
        for name in architectures()
        if fnmatch(name, pattern) and f"`{name}_ewa_moe`" not in done
    ]
    for number, name in enumerate(names, 1):
        start, kwargs, result = time.monotonic(), {}, "passed"
        try:
            stock = weightless_model(name)
            check_shapes(name, stock)
            kwargs = smaller(name, stock)
            with without_downloads():
                check(name, kwargs)
        except Exception as error:
            failed += 1
            result = " ".join(f"{type(error).__name__}: {error}".split())[:300].replace("|", "/")
        overlay = kwargs.pop("pretrained_cfg_overlay", {})
        arguments = ", ".join(f"{key}={value}" for key, value in {**kwargs, **overlay}.items())
        row = f"| `{name}_ewa_moe` | {arguments} | {result} | {time.monotonic() - start:.0f} |"
        print(f"{number}/{len(names)} {row}", flush=True)
        with path.open("a") as output:
            output.write(f"{row}\n")
        gc.collect()
    print(f"{len(names) - failed} of {len(names)} passed.")
    forgotten = missing() if pattern == "*" else []
    if forgotten:
        print(f"Missing in FAMILIES: {', '.join(forgotten)}")
    return int(failed > 0 or bool(forgotten))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
