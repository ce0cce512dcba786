"""Losses against routers that favour a few experts: pure functions, one value for each group.

Shape suffixes: G groups, S tokens of a group, E experts, K choices of a token. Gates add up to 1.
"""

import math

import torch
from torch import Tensor


def importance_loss(gate_GSE: Tensor) -> Tensor:
    """Inequality of the experts' summed gates (V-MoE, arXiv 2106.05974, appendix A.1; Shazeer et al. 2017, eq. 7).

    It is the squared coefficient of variation, (G,), of the sums of the softmax without noise.
    """
    return _squared_variation(gate_GSE.sum(1))


def load_loss(logits_GSE: Tensor, noisy_logits_GSE: Tensor, last_choice_GS: Tensor, noise_std: float) -> Tensor:
    """Inequality of the experts' chances of being chosen under new noise (V-MoE, appendix A.2).

    It is the squared coefficient of variation, (G,), of the experts' mean chances. ``last_choice_GS`` is the index of
    each token's K-th expert, whose noisy logit is the threshold; ``noise_std`` is that of the noise on the logits.
    """
    threshold_GS1 = noisy_logits_GSE.gather(2, last_choice_GS.unsqueeze(2))
    chance_GSE = torch.special.ndtr((logits_GSE - threshold_GS1) / noise_std)
    return _squared_variation(chance_GSE.mean(1))


def balance_loss(gate_GSE: Tensor, choice_GSK: Tensor) -> Tensor:
    """E times the sum over the experts of (fraction of the choices) x (mean gate).

    It is 1 if both are uniform, and E if K = 1 and all rows prefer one expert. With the first choices only (K = 1) this
    is the loss of Switch Transformer (arXiv 2101.03961, eq. 4) and GShard; with all K it is WideNet's (arXiv
    2107.11817, eqs. 3-5; the authors' code divides by K).
    ``gate_GSE`` is the softmax of the logits by which the experts ``choice_GSK`` were chosen.
    """
    num_experts = gate_GSE.shape[2]
    choice_GN = choice_GSK.flatten(1)
    ones_GN = torch.ones_like(choice_GN, dtype=gate_GSE.dtype)
    chosen_GE = torch.zeros_like(gate_GSE[:, 0]).scatter_add_(1, choice_GN, ones_GN)
    return num_experts * (chosen_GE / choice_GN.shape[1] * gate_GSE.mean(1)).sum(1)


def local_entropy_loss(gate_GSE: Tensor) -> Tensor:
    """Mean entropy, (G,), of each token's gates, so that tokens decide (LIMoE, arXiv 2206.02770, section 2.1)."""
    return _entropy(gate_GSE).mean(1)


def global_entropy_loss(gate_GSE: Tensor) -> Tensor:
    """Log E minus the entropy, (G,), of the mean gates (LIMoE, section 2.1, with the threshold log E)."""
    return math.log(gate_GSE.shape[2]) - _entropy(gate_GSE.mean(1))


def z_loss(logits_GSE: Tensor) -> Tensor:
    """Mean square, (G,), of logits' logsumexp, against large logits (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return logits_GSE.logsumexp(2).square().mean(1)


def _entropy(gate: Tensor) -> Tensor:
    return -(gate * gate.clamp(min=1e-20).log()).sum(-1)  # a gate may be rounded to zero


def _squared_variation(x_GE: Tensor) -> Tensor:
    """Squared coefficient of variation over the experts, by the population's variance, as in the reference."""
    return x_GE.var(1, correction=0) / x_GE.mean(1).square()
