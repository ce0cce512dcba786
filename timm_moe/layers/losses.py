"""Losses against routers that favour a few experts: functions of one value for each group.

Shape suffixes: G groups, S tokens of a group, E experts, K choices of a token. Gates add up to 1.
"""

import math

import torch
from torch import Tensor


def importance_loss(gate_GSE: Tensor) -> Tensor:
    """Inequality of the experts' summed gates (V-MoE, arXiv 2106.05974, appendix A).

    It is the squared coefficient of variation, (G,), of the sums of the softmax without noise. The
    loss is from Shazeer et al. 2017 (arXiv 1701.06538, eq. 7).
    """
    _, rows, experts = gate_GSE.shape  # S and E: the mean of the sums is S / E
    return gate_GSE.sum(1).var(1, correction=0) * (experts / rows) ** 2


def load_loss(
    logits_GSE: Tensor, noisy_logits_GSE: Tensor, last_choice_GS: Tensor, noise_std: float
) -> Tensor:
    """Inequality of the experts' chances of being chosen under new noise (V-MoE, appendix A).

    It is the squared coefficient of variation, (G,), of the experts' mean chances.

    Args:
        logits_GSE: logits without noise.
        noisy_logits_GSE: logits with noise, by which experts were chosen.
        last_choice_GS: index of each token's K-th expert, whose noisy logit is the threshold.
        noise_std: standard deviation of the noise on the logits.
    """
    threshold_GS1 = noisy_logits_GSE.gather(2, last_choice_GS.unsqueeze(2))
    # A chance is (1 + erf) / 2, and factors of all chances do not change the variation.
    erf_GSE = ((logits_GSE - threshold_GS1) * (0.5**0.5 / noise_std)).erf()
    return _squared_variation(erf_GSE.sum(1) + logits_GSE.shape[1])


def balance_loss(gate_GSE: Tensor, load_GE: Tensor, choices: int) -> Tensor:
    """E times the sum over the experts of (fraction of the choices) x (mean gate).

    It is 1 if both are uniform, and E if K = 1 and all rows prefer one expert. With the first
    choices only (K = 1) this is the loss of Switch Transformer (arXiv 2101.03961, eq. 4) and
    GShard; with all K it is WideNet's (arXiv 2107.11817, eqs. 3-5; the authors' code divides by K).

    Args:
        gate_GSE: softmax of the logits by which experts were chosen.
        load_GE: number of choices of each expert.
        choices: K.
    """
    _, rows, experts = gate_GSE.shape
    return (gate_GSE.sum(1) * load_GE).sum(1) * (experts / (choices * rows * rows))


def local_entropy_loss(gate_GSE: Tensor) -> Tensor:
    """Mean entropy, (G,), of each token's gates (LIMoE, arXiv 2206.02770, section 2.1).

    Where it is small, tokens are sure of their experts.
    """
    return _entropy(gate_GSE).mean(1)


def global_entropy_loss(gate_GSE: Tensor) -> Tensor:
    """Log E minus the entropy, (G,), of the mean gates (LIMoE, section 2.1).

    The paper has a threshold in the place of log E.
    """
    return math.log(gate_GSE.shape[2]) - _entropy(gate_GSE.mean(1))


def z_loss(logits_GSE: Tensor) -> Tensor:
    """Mean square, (G,), of the logits' logsumexp (ST-MoE, arXiv 2202.08906, eq. 5).

    It is a loss against large logits.
    """
    return logits_GSE.logsumexp(2).square().mean(1)


def _entropy(gate: Tensor) -> Tensor:
    """Entropy (...) of gates (..., E), some of which may be rounded to zero."""
    return -(gate * gate.clamp(min=1e-20).log()).sum(-1)


def _squared_variation(x_GE: Tensor) -> Tensor:
    """Squared coefficient of variation, (G,), of numbers (G, E) over the experts.

    As in the reference, the variance is the population's.
    """
    variance_G, mean_G = torch.var_mean(x_GE, 1, correction=0)
    return variance_G / mean_G.square()
