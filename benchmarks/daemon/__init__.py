"""Measurements of the daemon beyond those of `kvsidecar bench`, and what its results say.

``python -m benchmarks.daemon`` measures, ``python -m benchmarks.daemon.show`` shows results of both.
"""
