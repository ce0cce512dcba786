"""The papers that describe the models."""

from typing import NamedTuple


class Publication(NamedTuple):
    """A paper on arXiv.

    Attributes:
        arxiv: its number, which begins with two digits of the year and the month.
        author: the first author, ``"Surname, Name"``.
        title: its title.
    """

    arxiv: str
    author: str
    title: str

    def bibtex(self) -> str:
        """Return the paper's entry for BibTeX."""
        year = f"20{self.arxiv[:2]}"
        return (
            f"@article{{{self.author.split(',')[0].lower()}{year},\n  title={{{self.title}}},\n  "
            f"author={{{self.author} and others}},\n  journal={{arXiv:{self.arxiv}}},\n  "
            f"year={{{year}}},\n}}"
        )


#: The papers by the short names of their methods.
PUBLICATIONS = {
    "EWA": Publication(
        "2308.06093",
        "Huang, Yongqi",
        "Experts Weights Averaging: A New General Training Scheme for Vision Transformers",
    ),
    "V-MoE": Publication(
        "2106.05974", "Riquelme, Carlos", "Scaling Vision with Sparse Mixture of Experts"
    ),
    "ViMoE": Publication(
        "2410.15732",
        "Han, Xumeng",
        "ViMoE: An Empirical Study of Designing Vision Mixture-of-Experts",
    ),
    "WideNet": Publication("2107.11817", "Xue, Fuzhao", "Go Wider Instead of Deeper"),
    "OneS": Publication(
        "2201.10890", "Xue, Fuzhao", "One Student Knows All Experts Know: From Sparse to Dense"
    ),
    "Soft MoE": Publication(
        "2308.00951", "Puigcerver, Joan", "From Sparse to Soft Mixtures of Experts"
    ),
    "Swin-MoE": Publication(
        "2206.03382", "Hwang, Changho", "Tutel: Adaptive Mixture-of-Experts at Scale"
    ),
    "pBE": Publication(
        "2110.03360", "Allingham, James Urquhart", "Sparse MoEs meet Efficient Ensembles"
    ),
}

#: Papers of the families, by the beginning of their registered names; the first match counts.
_FAMILIES = {
    "vmoe_pbe": ["pBE", "V-MoE"],
    "vmoe": ["V-MoE"],
    "vimoe": ["ViMoE"],
    "widenet": ["WideNet"],
    "ones": ["OneS", "WideNet"],
    "soft_moe": ["Soft MoE"],
    "swin_moe": ["Swin-MoE"],
}


def papers_of(name: str) -> list[str]:
    """List the papers of the family that a registered name belongs to, by their short names."""
    return next((papers for prefix, papers in _FAMILIES.items() if name.startswith(prefix)), [])
