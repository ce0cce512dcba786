"""Experts that are spread over processes, of which each holds E / R.

Shape suffixes: N rows of this process, M rows that come to it, D width, E experts of the layer, R
processes, L experts of a process (E / R).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .functional import Mode, current_mode


class Dispatcher:
    """Runs the experts of this process on rows of this process: each trains on its own images (EWA).

    Args:
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` of one dimension, of which process r
            holds experts r L to (r + 1) L - 1.
        num_experts: E.
    """

    def __init__(self, mesh: Any, num_experts: int):
        self.mesh = mesh
        self.num_experts = num_experts

    # A copy of a layer is of the same processes.
    def __deepcopy__(self, memo: dict[int, Any]) -> "Dispatcher":
        return self

    def run(
        self, experts: Callable[..., Tensor], x_ND: Tensor, end: Tensor | None, capacity: int | None
    ) -> Tensor:
        """Apply experts to runs of rows, as :meth:`Experts.run`, whose part for one process ``experts`` is."""
        return experts(x_ND, end, capacity)

    def own(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's part (L, ...) of weights that are DTensors (E, ...).

        Gradients are divided by the number of processes, as the loss of one process is that part of
        the whole.

        Raises:
            RuntimeError: in a trace or export.
        """
        if current_mode() not in (Mode.EAGER, Mode.COMPILED):
            raise RuntimeError(
                "Experts in different processes cannot be exported: load the whole weights "
                "(get_model_state_dict) into a model of one process, and export that."
            )
        parts = {name: weight.to_local() for name, weight in weights.items()}  # type: ignore[attr-defined]
        return {name: _Joint.apply(part, 1 / self.mesh.size()) for name, part in parts.items()}

    @torch.compiler.disable  # torch 2.11 compiles what a collective writes in place to a constant
    def mean(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Average weights over the processes, which call it together, and its backward too."""
        group, processes = self.mesh.get_group(), self.mesh.size()
        wide = {
            name: weight.float() if weight.itemsize < 4 else weight
            for name, weight in weights.items()
        }
        return {
            name: (_Joint.apply(w, 1, group) / processes).to(weights[name].dtype)
            for name, w in wide.items()
        }


class AllToAllDispatcher(Dispatcher):
    """Sends rows to the processes that hold their experts, and outputs back.

    All processes call it together. The host waits once, for the numbers of rows that come.
    """

    @torch.compiler.disable
    def run(
        self, experts: Callable[..., Tensor], x_ND: Tensor, end: Tensor | None, capacity: int | None
    ) -> Tensor:
        group, processes = self.mesh.get_group(), self.mesh.size()
        if end is None:
            assert capacity is not None
            sent_E = torch.full((self.num_experts,), capacity, device=x_ND.device)
        else:
            sent_E = end.diff(prepend=end.new_zeros(1))
        came_E = torch.empty_like(sent_E)
        dist.all_to_all_single(came_E, sent_E, group=group)
        came_RL = came_E.view(processes, -1)
        sent, came = torch.stack([sent_E.view(processes, -1).sum(1), came_RL.sum(1)]).tolist()
        x_MD = _AllToAll.apply(x_ND[: sum(sent)], sent, came, group)
        # Rows come sorted by process, then by expert; the experts need runs.
        expert_M = torch.arange(came_RL.shape[1], device=x_ND.device).repeat(processes)
        order_M = expert_M.repeat_interleave(came_E, output_size=x_MD.shape[0]).argsort(stable=True)
        y_MH = experts(x_MD.index_select(0, order_M), came_RL.sum(0).cumsum(0))
        y_NH = _AllToAll.apply(y_MH.index_select(0, order_M.argsort()), came, sent, group)
        rest = x_ND.shape[0] - y_NH.shape[0]
        return torch.nn.functional.pad(y_NH, (0, 0, 0, rest)) if rest else y_NH


class _AllToAll(torch.autograd.Function):
    """Sends the first rows to the first process, and so on; its derivative sends gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (came, sent), group
        output = x.new_empty(sum(came), *x.shape[1:])
        dist.all_to_all_single(output, x.contiguous(), came, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, *ctx.sizes, ctx.group), None, None, None


class _Joint(torch.autograd.Function):
    """The identity, or the sum over a group's processes; gradients, each of one process's loss, likewise, scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, group: Any = None) -> Tensor:
        ctx.scale, ctx.group = scale, group
        if group is None:
            return x.view_as(x)
        dist.all_reduce(total := x.clone(memory_format=torch.contiguous_format), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (
            (grad if ctx.group is None else _Joint.apply(grad, 1, ctx.group)) * ctx.scale,
            None,
            None,
        )
