"""Benchmarks against dense models and other packages.

``python -m benchmarks`` writes docs/generated/benchmarks.md.
"""
