"""The papers that describe the models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Publication:
    """A paper: its arXiv number, first author, title and year."""

    arxiv: str
    author: str
    title: str
    year: int


#: By the short name of the method.
PUBLICATIONS = {
    "EWA": Publication(
        *("2308.06093", "Huang, Yongqi"),
        *("Experts Weights Averaging: A New General Training Scheme for Vision Transformers", 2023),
    ),
    "V-MoE": Publication("2106.05974", "Riquelme, Carlos", "Scaling Vision with Sparse Mixture of Experts", 2021),
    "ViMoE": Publication(
        *("2410.15732", "Han, Xumeng"),
        *("ViMoE: An Empirical Study of Designing Vision Mixture-of-Experts", 2024),
    ),
    "WideNet": Publication("2107.11817", "Xue, Fuzhao", "Go Wider Instead of Deeper", 2021),
    "OneS": Publication(
        *("2201.10890", "Xue, Fuzhao", "One Student Knows All Experts Know: From Sparse to Dense", 2022),
    ),
    "pBE": Publication(
        *("2110.03360", "Allingham, James Urquhart", "Sparse MoEs meet Efficient Ensembles", 2021),
    ),
}
