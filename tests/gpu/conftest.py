"""The device of a test: the CPU, in the form of a GPU, and under the mark gpu the GPU."""

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    import torch
    from devices import equal_slots

    if request.param == "cpu":
        with equal_slots():
            yield "cpu"
        return
    if not torch.cuda.is_available():
        pytest.skip("There is no GPU here: torch.cuda.is_available() is False.")
    # Convolutions would be rounded to ten bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield "cuda"
