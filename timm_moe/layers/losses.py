"""Losses against routers that favour a few experts: pure functions, one value for each group.

Shape suffixes: G groups, S tokens of a group, E experts, K choices of a token.
"""

import torch
from torch import Tensor


def importance_loss(gate_GSE: Tensor) -> Tensor:
    """Inequality of the experts' summed gates (V-MoE, arXiv 2106.05974, appendix A.1; Shazeer et al. 2017, eq. 7).

    Args:
        gate_GSE: softmax of the router's logits, without noise.

    Returns:
        (G,) squared coefficient of variation of the sums, 0 if they are equal.
    """
    return _squared_variation(gate_GSE.sum(1))


def load_loss(logits_GSE: Tensor, noisy_logits_GSE: Tensor, last_choice_GS: Tensor, noise_std: float) -> Tensor:
    """Inequality of the experts' chances of being chosen under new noise (V-MoE, appendix A.2).

    Args:
        logits_GSE: logits without noise.
        noisy_logits_GSE: logits with the noise of this forward.
        last_choice_GS: index of each token's K-th expert. Its noisy logit is the threshold for an expert to be chosen.
        noise_std: standard deviation of the noise on the logits.

    Returns:
        (G,) squared coefficient of variation of the experts' mean chances.
    """
    threshold_GS1 = noisy_logits_GSE.gather(2, last_choice_GS.unsqueeze(2))
    chance_GSE = torch.special.ndtr((logits_GSE - threshold_GS1) / noise_std)
    return _squared_variation(chance_GSE.mean(1))


def balance_loss(gate_GSE: Tensor, choice_GSK: Tensor) -> Tensor:
    """E times the sum over the experts of (fraction of the choices) x (mean gate).

    It is 1 if both are uniform, and E if K = 1 and all rows prefer one expert. With the first choices only (K = 1) this
    is the loss of Switch Transformer (arXiv 2101.03961, eq. 4) and GShard; with all K it is WideNet's (arXiv
    2107.11817, eqs. 3-5; the authors' code divides by K).

    Args:
        gate_GSE: softmax of the logits by which the experts were chosen.
        choice_GSK: indices of each token's experts.

    Returns:
        (G,).
    """
    num_experts = gate_GSE.shape[2]
    choice_GN = choice_GSK.flatten(1)
    ones_GN = torch.ones_like(choice_GN, dtype=gate_GSE.dtype)
    chosen_GE = torch.zeros_like(gate_GSE[:, 0]).scatter_add_(1, choice_GN, ones_GN)
    return num_experts * (chosen_GE / choice_GN.shape[1] * gate_GSE.mean(1)).sum(1)


def _squared_variation(x_GE: Tensor) -> Tensor:
    """Squared coefficient of variation over the experts, by the population's variance, as in the reference."""
    return x_GE.var(1, correction=0) / x_GE.mean(1).square()
