"""Switch EMA against its definition."""

import pytest
import timm
import torch

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
    narrow = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([narrow], lr=0.0)
    switch = SwitchEma(optimizer, decay=0.999, interval=10_000)
    narrow.data.fill_(1.25)
    for _ in range(2000):
        optimizer.step()
    assert switch._averages[narrow].item() == pytest.approx(1.25 - 0.25 * 0.999**2000, rel=1e-3)
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


@pytest.mark.parametrize("name", ["lookahead_sgd", "madgrad", "lamb"])
def test_an_optimizer_that_may_undo_the_switch_is_refused(name):
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = timm.optim.create_optimizer_v2([weight], opt=name, lr=0.1)
    with pytest.raises(TypeError, match="undo a switch"):
        SwitchEma(optimizer, decay=0.5, interval=1)
    SwitchEma(timm.optim.create_optimizer_v2([weight], opt="adamw", lr=0.1), 0.5, 1)
