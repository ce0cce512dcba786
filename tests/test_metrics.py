import pytest
import torch

from timm_moe import metrics


@pytest.fixture
def case(golden):
    arrays = golden("metrics")
    return arrays, arrays["logits_MNC"].transpose(0, 1), arrays["labels"]


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (metrics.NegativeLogLikelihood, "nll"),
        (metrics.ErrorRate, "error"),
        (metrics.BrierScore, "brier"),
        (lambda from_logits: metrics.CalibrationError(6, from_logits), "ece15"),
        (metrics.PairwiseKL, "kl_pairs_i_lt_j"),
        (metrics.CosineSimilarity, "cosine_similarity"),
        (metrics.Disagreement, "disagreement"),
        (metrics.NormalizedDisagreement, "normalized_disagreement"),
    ],
)
def test_values_of_the_golden_file_over_batches(case, make, key, from_logits):
    arrays, logits, labels = case
    metric = make(from_logits)
    outputs = logits if from_logits else logits.softmax(2)
    for part, target in zip(outputs.split(130), labels.split(130), strict=True):
        metric.update(part, target)
    torch.testing.assert_close(metric.compute().double(), arrays[key], rtol=1e-6, atol=1e-6)


def test_out_of_distribution(case):
    arrays = case[0]
    confidence = torch.cat([arrays["ood_conf_in"], arrays["ood_conf_out"]])
    is_in = torch.cat([torch.ones(300), torch.zeros(200)]).long()
    for metric, key in ((metrics.AUROC(), "auroc"), (metrics.FPRAt95(), "fpr95_in_positive")):
        for part, target in zip(confidence.split(99), is_in.split(99), strict=True):
            metric.update(part, target)
        torch.testing.assert_close(metric.compute().double(), arrays[key], rtol=1e-6, atol=1e-6)
