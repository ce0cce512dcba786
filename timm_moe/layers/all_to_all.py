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
    """Dispatcher to the experts of this process alone: each trains on its own images (EWA).

    Args:
        mesh: a ``torch.distributed.device_mesh.DeviceMesh`` of one dimension. Its process r holds
            experts r L to (r + 1) L - 1.
        num_experts: E.
    """

    def __init__(self, mesh: Any, num_experts: int):
        self.mesh = mesh
        self.num_experts = num_experts

    # A copy of a layer belongs to the same processes.
    def __deepcopy__(self, memo: dict[int, Any]) -> "Dispatcher":
        return self

    def run(
        self,
        experts: Callable[..., Tensor],
        x_ND: Tensor,
        end: Tensor | None,
        slots_per_expert: int | None,
    ) -> Tensor:
        """Apply experts to runs of rows, as :meth:`Experts.run` does.

        Args:
            experts: the part of :meth:`Experts.run` for one process.
            x_ND: rows, sorted by expert.
            end: end of each expert's run, (L,) here and (E,) in :class:`AllToAllDispatcher`; None
                if all have ``slots_per_expert`` rows.
            slots_per_expert: number of rows of each expert, or None.
        """
        return experts(x_ND, end, slots_per_expert)

    def own(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's part (L, ...) of weights that are DTensors (E, ...).

        Gradients are divided by the number of processes, since the loss of a process is that part
        of the whole loss.

        Raises:
            RuntimeError: if the call is traced or exported.
        """
        if current_mode() not in (Mode.EAGER, Mode.COMPILED):
            raise RuntimeError(
                "Experts in different processes cannot be exported: load the whole weights "
                "(get_model_state_dict) into a model of one process, and export that."
            )
        scale = 1 / self.mesh.size()
        parts: dict[str, Any] = dict(weights)
        return {name: _Joint.apply(part.to_local(), scale) for name, part in parts.items()}

    # torch 2.11 compiles what a collective writes in place to a constant.
    @torch.compiler.disable
    def mean(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Average weights over the processes, in float32 at least.

        All processes call this together, and its backward too.
        """
        means = {}
        for name, weight in weights.items():
            wide = weight.float() if weight.itemsize < 4 else weight
            total = _Joint.apply(wide, 1, self.mesh.get_group())
            means[name] = (total / self.mesh.size()).to(weight.dtype)
        return means


class AllToAllDispatcher(Dispatcher):
    """Dispatcher that sends rows to the processes of their experts, and outputs back.

    All processes call it together. The host waits for the numbers of rows that come, and once more
    where :func:`runs_of` waits.
    """

    @torch.compiler.disable
    def run(
        self,
        experts: Callable[..., Tensor],
        x_ND: Tensor,
        end: Tensor | None,
        slots_per_expert: int | None,
    ) -> Tensor:
        """Apply the experts of all processes to runs of rows; see :meth:`Dispatcher.run`."""
        group = self.mesh.get_group()
        processes = self.mesh.size()
        if end is None:
            assert slots_per_expert is not None
            sent_E = torch.full((self.num_experts,), slots_per_expert, device=x_ND.device)
        else:
            sent_E = end.diff(prepend=end.new_zeros(1))

        came_E = torch.empty_like(sent_E)
        dist.all_to_all_single(came_E, sent_E, group=group)
        came_RL = came_E.view(processes, -1)
        sent, came = torch.stack([sent_E.view(processes, -1).sum(1), came_RL.sum(1)]).tolist()
        x_MD = _AllToAll.apply(x_ND[: sum(sent)], sent, came, group)

        # Rows come sorted by process, then by expert, but the experts need runs.
        expert_M = torch.arange(came_RL.shape[1], device=x_ND.device).repeat(processes)
        order_M = expert_M.repeat_interleave(came_E, output_size=x_MD.shape[0]).argsort(stable=True)
        y_MH = experts(x_MD.index_select(0, order_M), came_RL.sum(0).cumsum(0))
        y_NH = _AllToAll.apply(y_MH.index_select(0, order_M.argsort()), came, sent, group)

        rest = x_ND.shape[0] - y_NH.shape[0]
        return torch.nn.functional.pad(y_NH, (0, 0, 0, rest)) if rest else y_NH


class _AllToAll(torch.autograd.Function):
    """Exchange of rows: the first go to the first process, and so on. Gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], came: list[int], group: Any) -> Tensor:
        ctx.sizes = (came, sent)
        ctx.group = group
        output = x.new_empty(sum(came), *x.shape[1:])
        dist.all_to_all_single(output, x.contiguous(), came, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, *ctx.sizes, ctx.group), None, None, None


class _Joint(torch.autograd.Function):
    """The identity, or with a group the sum over its processes.

    Backward does the same to the gradient, which is of the loss of one process, and multiplies it
    by ``scale``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, group: Any = None) -> Tensor:
        ctx.scale = scale
        ctx.group = group
        if group is None:
            return x.view_as(x)
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.group is not None:
            grad = _Joint.apply(grad, 1, ctx.group)
        return grad * ctx.scale, None, None
