"""From a sparse teacher to a dense student (OneS).

timm computes the paper's loss, with our models in it.
"""

import pytest
import timm
import torch
from common import SMALL_VIT
from timm.task import LogitDistillationTask
from torch import nn

import timm_moe


class Fixed(nn.Module):
    """Logits that depend on no image."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.num_classes, self.in_chans = logits.shape[1], 3
        self.pretrained_cfg = self.default_cfg = dict(mean=(0.5,) * 3, std=(0.5,) * 3)

    def forward(self, images):
        return self.logits


def test_timms_loss_is_the_golden_files(golden):
    """Return the KL of the student from the teacher (OneS, eq. 14).

    It is the mean over the batch, times the squared temperature.
    """
    case = golden("ones_kd")
    weights = dict(task_loss_weight=0.25, distill_loss_weight=0.75)  # alpha is that of the task
    task = LogitDistillationTask(
        Fixed(case["student"]),
        Fixed(case["teacher"]),
        nn.CrossEntropyLoss(),
        **weights,
        temperature=2.0,
        device=torch.device("cpu"),
        verbose=False,
    )
    result = task(torch.zeros(5, 3, 2, 2), case["labels"].long())
    kl = case["kd_forward_T2.0"].item()
    assert result["loss"].item() == pytest.approx(0.25 * case["ce"].item() + 0.75 * kl, rel=1e-6)


@pytest.mark.parametrize("method", ["average", "sum", "topk", "svd"])
def test_a_student_learns_from_its_widenet(images, method):
    size = {**SMALL_VIT, "mlp_ratio": 2, "official_compat": True}
    teacher = timm.create_model("widenet_b", **size)
    student = timm.create_model("ones_b", **size)
    student.load_state_dict(timm_moe.to_dense(teacher, method).state_dict())
    task = LogitDistillationTask(
        student,
        teacher.eval(),
        nn.CrossEntropyLoss(),
        task_loss_weight=0.25,
        distill_loss_weight=0.75,
        temperature=1.0,
        device=torch.device("cpu"),
        verbose=False,
    )
    student.train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        result = task(images, torch.tensor([0, 1, 2, 3, 4, 0]))
        assert "auxiliary_loss" not in result  # the teacher's routers are not trained
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
        losses.append(result["loss"].item())
    assert losses[-1] < losses[0]
    assert all(parameter.grad is None for parameter in teacher.parameters())
