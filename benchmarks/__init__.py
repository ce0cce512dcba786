"""Measures the package against dense models and its peers: ``python -m benchmarks``, docs/generated/benchmarks.md."""
