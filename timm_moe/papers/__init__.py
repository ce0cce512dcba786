"""The tables and figures of the papers, beside what is measured here; nothing else in the package imports it."""
