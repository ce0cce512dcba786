"""Measures the package against dense models and against its peers: ``python -m benchmarks``, see docs/benchmarks.md."""
