"""The papers that describe the models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Publication:
    """A paper on arXiv: its number, first author, title and year."""

    arxiv: str
    author: str
    title: str
    year: int

    def bibtex(self) -> str:
        key = f"{self.author.split(',')[0].lower()}{self.year}"
        return (
            f"@article{{{key},\n  title={{{self.title}}},\n  author={{{self.author} and others}},\n"
            f"  journal={{arXiv:{self.arxiv}}},\n  year={{{self.year}}},\n}}"
        )


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

#: Papers of the families, by the beginning of their registered names; the first match counts.
_FAMILIES = {
    "vmoe_pbe": ["pBE", "V-MoE"],
    "vmoe": ["V-MoE"],
    "vimoe": ["ViMoE"],
    "widenet": ["WideNet"],
    "ones": ["OneS", "WideNet"],
}


def papers_of(name: str) -> list[str]:
    """List the papers of the family that a registered name belongs to, by their short names."""
    return next((papers for prefix, papers in _FAMILIES.items() if name.startswith(prefix)), [])
