"""Switch EMA against its definition."""

import pytest
import timm
import torch

from timm_moe.rivals import SwitchEma


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
    with pytest.raises(TypeError, match="so its steps cannot be followed"):
        SwitchEma(object(), decay=0.5, interval=1)
    for wrong in (dict(decay=1.0, interval=1), dict(decay=0.5, interval=0)):
        with pytest.raises(ValueError, match="must"):
            SwitchEma(optimizer, **wrong)
