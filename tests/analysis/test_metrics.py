from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from timm_moe.analysis import metrics


@pytest.fixture
def case(golden):
    arrays = golden("metrics")
    return arrays, arrays["logits_MNC"].transpose(0, 1), arrays["labels"]


@pytest.mark.parametrize("are_logits", [True, False])
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (metrics.NegativeLogLikelihood, "nll"),
        (metrics.ErrorRate, "error"),
        (metrics.BrierScore, "brier"),
        (lambda: metrics.CalibrationError(6), "ece15"),
        (metrics.PairwiseKL, "kl_pairs_i_lt_j"),
        (metrics.CosineSimilarity, "cosine_similarity"),
        (metrics.Disagreement, "disagreement"),
        (metrics.NormalizedDisagreement, "normalized_disagreement"),
    ],
)
@pytest.mark.first_case
def test_values_of_the_golden_file_over_batches(case, make, key, are_logits):
    arrays, logits, labels = case
    metric = make()
    outputs = logits if are_logits else logits.softmax(2).log()
    for part, target in zip(outputs.split(130), labels.split(130), strict=True):
        metric.update(part, target)
    torch.testing.assert_close(metric.compute().double(), arrays[key], rtol=1e-6, atol=1e-6)


def test_probabilities_that_rounding_brings_above_one(monkeypatch):
    """torchmetrics takes a batch with any value above 1 for logits."""
    labels = torch.zeros(4, dtype=torch.long)
    calibration = metrics.CalibrationError(2)
    outputs = torch.tensor([[0.9, 0.1], [1.0000001, 0.0], [0.9, 0.1], [1.0, 0.0]]).log()
    calibration.update(outputs, labels)
    assert calibration.compute() == pytest.approx(0.05, abs=1e-6)
    # On some CPUs the mean of several members' probabilities is above 1.
    mean_of = metrics.ensemble_log_probabilities
    monkeypatch.setattr(
        metrics, "ensemble_log_probabilities", lambda log_p_BMC: mean_of(log_p_BMC) + 2e-7
    )
    sure = torch.tensor([30.0, 0, 0]).expand(4, 7, 3)
    assert metrics.ensemble_log_probabilities(sure.log_softmax(2)).exp().max() > 1
    calibration = metrics.CalibrationError(3)
    calibration.update(sure, labels)
    assert calibration.compute() == 0
    monkeypatch.undo()
    # Equal as logits.
    close_scores = torch.tensor([1.0000001, 0.9999999]), torch.tensor([0.9999998, 0.2])
    assert metrics.separation(*close_scores) == {"auroc": 1, "fpr_at_95": 0}


def slow_calibration_error(confidence, correct, bins=15):
    """One bin after the other, each with its lower bound, the last with 1."""
    bounds = np.linspace(0, 1, bins + 1, dtype=np.float32)
    total = 0.0
    for index, (low, high) in enumerate(pairwise(bounds)):
        chosen = (confidence >= low) & ((confidence < high) | (index == bins - 1))
        if chosen.any():
            total += chosen.sum() * abs(
                correct[chosen].mean(dtype=float) - confidence[chosen].mean(dtype=float)
            )
    return total / len(confidence)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0.5, 1, width=32) | st.just(1.0), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_calibration_error_has_fifteen_bins_of_which_the_last_holds_one(cases):
    confidence = torch.tensor([confidence for confidence, _ in cases])
    correct = torch.tensor([correct for _, correct in cases])
    outputs = torch.stack([confidence, 1 - confidence], 1).log()
    metric = metrics.CalibrationError(2)
    for part in (slice(0, 7), slice(7, None)):
        if len(confidence[part]):
            metric.update(outputs[part], (~correct).long()[part])
    # A logarithm and back.
    seen, predicted = metrics.log_probabilities(outputs)[:, 0].exp().clamp(max=1).max(1)
    seen, right = seen.numpy(), (predicted == (~correct).long()).numpy()
    assert metric.compute().item() == pytest.approx(slow_calibration_error(seen, right), abs=1e-9)
    np.testing.assert_allclose(seen, confidence.numpy(), atol=1e-6)


def test_a_confidence_of_one_shares_its_bin():
    metric = metrics.CalibrationError(2)
    metric.update(torch.tensor([[1.0, 0.0], [0.95, 0.05]]).log(), torch.tensor([1, 0]))
    # With a bin of its own, (1 + 0.05) / 2.
    assert metric.compute() == pytest.approx((1.95 - 1) / 2)
    # A bin holds its lower bound.
    metric = metrics.CalibrationError(2, n_bins=10)
    metric.update(torch.tensor([[0.5, 0.5], [0.55, 0.45]]).log(), torch.tensor([1, 0]))
    assert metric.compute() == pytest.approx((1.05 - 1) / 2)


def test_members_that_disagree_though_together_they_make_no_error():
    metric = metrics.NormalizedDisagreement()
    metric.update(torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]), torch.tensor([0]))
    assert metric.compute() == float("inf")
    metric.reset()
    metric.update(torch.tensor([[[3.0, 0.0], [3.0, 1.0]]]), torch.tensor([0]))
    assert metric.compute() == 0


def test_out_of_distribution(case):
    arrays = case[0]
    found = metrics.separation(arrays["ood_conf_in"], arrays["ood_conf_out"])
    for name, key in (("auroc", "auroc"), ("fpr_at_95", "fpr95_in_positive")):
        assert found[name] == pytest.approx(arrays[key].item(), rel=1e-6)


@given(scores=st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=60))
def test_out_of_distribution_by_pairs(scores):
    """Compare each image with each of the other data; equal scores count half."""
    scores_in, scores_out = (
        [1, *(s for s, is_in in scores if is_in)],
        [7, *(s for s, is_in in scores if not is_in)],
    )
    found = metrics.separation(torch.tensor(scores_in) / 8, torch.tensor(scores_out) / 8)
    pairs = [1.0 if high > low else 0.5 * (high == low) for high in scores_in for low in scores_out]
    assert found["auroc"] == pytest.approx(np.mean(pairs), abs=1e-6)
    reached = sorted(scores_in)[len(scores_in) // 20]  # by 95 % of them
    assert found["fpr_at_95"] == pytest.approx(
        np.mean([score >= reached for score in scores_out]), abs=1e-6
    )
