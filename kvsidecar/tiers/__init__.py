"""Slower memory behind the pool, each in a process of its own: it may hang, fail or die, and costs its hits only.

Imports `pool`, `cache` and `support`. In a tier's process: `process` is the program, `backend` says what it asks of a
backend, and there is one module or package for each of them, such as `disk`. Between the processes: `messages`. In the
daemon: `tiers` supervises the processes, `link` speaks with one; what is written there and fetched is decided in
`kvsidecar.core`.
"""
