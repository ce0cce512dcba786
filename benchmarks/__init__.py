"""Benchmarks against dense models and other packages: ``python -m benchmarks``, docs/generated/benchmarks.md."""
