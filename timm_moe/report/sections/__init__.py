"""The sections of a report: what was measured, as sentences, charts, tables and images for the page."""

from .alike import alike_section
from .classifier import classifier_section
from .model import model_section, origin_of
from .part import Part, Section
from .routing import routing_section
from .run import run_section

__all__ = [
    "Part",
    "Section",
    "alike_section",
    "classifier_section",
    "model_section",
    "origin_of",
    "routing_section",
    "run_section",
]
