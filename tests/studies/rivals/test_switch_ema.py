"""Switch EMA against its definition."""

import pytest
import timm
import torch
from timm.optim.lookahead import Lookahead

from studies.rivals import SwitchEma


def test_switch_ema_is_its_definition():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    switch = SwitchEma(optimizer, decay=0.75, interval=2)
    average, expected = 1.0, 1.0
    for step in range(4):
        weight.grad = torch.tensor([1.0])
        optimizer.step()
        expected -= 1.0
        average = 0.75 * average + 0.25 * expected
        if step % 2:
            expected = average
        assert weight.item() == pytest.approx(expected)
    switch.remove()
    optimizer.step()
    assert weight.item() == pytest.approx(expected - 1)
    lookahead = timm.optim.create_optimizer_v2([weight], opt="lookahead_sgd", lr=0.0)
    followed = SwitchEma(lookahead, decay=0.5, interval=1)
    lookahead.step()
    assert followed.steps == 1
    followed.remove()
    narrow = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([narrow], lr=0.0)
    switch = SwitchEma(optimizer, decay=0.999, interval=10_000)
    narrow.data.fill_(1.25)
    for _ in range(2000):
        optimizer.step()
    assert switch._averages[narrow].item() == pytest.approx(1.25 - 0.25 * 0.999**2000, rel=1e-3)
    with pytest.raises(TypeError, match=r"object .*torch\.optim\.Optimizer"):
        SwitchEma(object(), decay=0.5, interval=1)
    for wrong in (dict(decay=1.0, interval=1), dict(decay=0.5, interval=0)):
        with pytest.raises(ValueError, match="must"):
            SwitchEma(optimizer, **wrong)


def test_a_step_that_the_scaler_skips_does_not_count():
    weight, scaler = (
        torch.nn.Parameter(torch.tensor([1.0])),
        torch.amp.GradScaler("cpu", init_scale=1.0),
    )
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    switch = SwitchEma(optimizer, decay=0.5, interval=2)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert switch.steps == 2
    assert weight.item() == pytest.approx(0.25 * 1.0 + 0.25 * 0.0 + 0.5 * -1.0)


def test_a_switch_holds_for_the_slow_weights_of_lookahead():
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = Lookahead(torch.optim.SGD([weight], lr=1.0), alpha=0.5, k=1)
    SwitchEma(optimizer, decay=0.5, interval=2)
    # Lookahead's first step keeps the weights, a later one takes half of the way; each second one
    # ends at the average.
    for expected in (4.0, 4.0, 4.5, 4.625, 5.125, 5.25):
        weight.grad = torch.tensor([-1.0])
        optimizer.step()
        assert weight.item() == pytest.approx(expected)


class WithCopies(torch.optim.SGD):
    """Keeps a float32 copy of each parameter and its gradient in its state, and steps the copy."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                copied = self.state[p].setdefault("copy", p.float())
                self.state[p]["momentum"] = p.grad.float()
                p.copy_(copied.sub_(self.state[p]["momentum"], alpha=group["lr"]))


def test_a_switch_holds_for_a_wider_copy():
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    optimizer = WithCopies([weight], lr=1.0)
    SwitchEma(optimizer, decay=0.5, interval=2)
    # After the second and the fourth step it is the average.
    for expected in (2.0, 2.25, 3.25, 3.5):
        weight.grad = torch.tensor([-1.0], dtype=torch.bfloat16)
        optimizer.step()
        assert weight.item() == pytest.approx(expected, rel=1e-2), expected


def test_an_optimizer_that_would_undo_the_switch_is_refused():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = timm.optim.create_optimizer_v2([weight], opt="madgrad", lr=0.1)
    SwitchEma(optimizer, decay=0.5, interval=1)
    weight.grad = torch.tensor([1.0])
    with pytest.raises(ValueError, match="weights of its own"):
        optimizer.step()
