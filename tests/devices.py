"""Tests for two devices.

One is a GPU. The other is the CPU in the form of a GPU, which tries the tests on machines without
one.
"""

import contextlib
import warnings

import pytest
import torch
from timm.layers import Mlp, SwiGLU
from torch import nn

from timm_moe import auxiliary_loss
from timm_moe.layers import queues

WIDTH = 8


class ByTwo(nn.Module):
    """A network of the user's, which runs expert by expert, and divides by a norm."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc(x / x.norm(dim=-1, keepdim=True))


NETWORKS = {
    "Mlp": lambda: Mlp(WIDTH, 12),
    "Mlp without bias": lambda: Mlp(WIDTH, 12, bias=False),
    "SwiGLU with a norm": lambda: SwiGLU(WIDTH, 12, norm_layer=nn.LayerNorm),
    "own": ByTwo,
}


@contextlib.contextmanager
def equal_slots(are_equal=True):
    """On the CPU, what other devices do; within such a block, what a CPU does again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queues, "has_equal_slots", lambda *_: are_equal)
        yield


def values_and_gradients(layer, x):
    """Return output and gradients of a layer by name, by a loss with those of its router."""
    torch.manual_seed(0)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    factor = torch.linspace(1, 2, y.numel()).view(y.shape).to(y)
    ((y * factor).sum() + auxiliary_loss(nn.Sequential(layer))).backward()
    return {"y": y, "x": x.grad} | {
        name: parameter.grad for name, parameter in layer.named_parameters()
    }


def move_to_fake_gpu(model):
    """Give a model weights on a GPU that have no values; within FakeTensorMode."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    tensors[name] = nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake
    return model


@contextlib.contextmanager
def waits(device, expected):
    """Fail unless the host waits for the GPU so many times.

    Where it must not wait, the error tells where it does.

    On the CPU nothing waits.
    """
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("warn" if expected else "error")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (
        sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)
        == expected
    )
