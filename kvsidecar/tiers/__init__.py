"""Slower memory behind the pool, each in a process of its own: it may hang, fail or die, and costs its hits only.

Imports `pool`, `cache` and `support`. In a tier's process: `process` is the program, `backend` says what it asks of a
backend and lists them, and each has a package: `disk`, `cluster`, `shared_directory`. Between the processes:
`messages`. In the daemon: `tier` supervises a process, `link` speaks with it; what is written there and fetched is
decided in `kvsidecar.core`, and `kvsidecar.daemon.tier_plans` makes the tiers of the settings.
"""
