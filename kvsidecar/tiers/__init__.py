"""Slower memory behind the pool, each in a process of its own: it may hang, fail or die, and costs its hits only.

Imports `pool`, `cache` and `support`. In a tier's process: `process` is the program, `backend` defines and lists the
backends, and each has a package: `disk`, `cluster`, `shared_directory`. Between the processes: `messages`. In the
daemon: `tier` supervises a process, `link` speaks with it; `kvsidecar.core` decides what is written there and fetched,
and `kvsidecar.daemon.tier_plans` makes the tiers of the settings.
"""
