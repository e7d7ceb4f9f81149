"""The daemon's decisions, without a socket: jobs, sessions, lookups, checks of layouts, access, quotas, readiness,
metrics.

Imports `copier`, `tiers`, `pool`, `device`, `cache`, `protocol` and `support`; no gRPC. Begin with `jobs`: a store and
a load, from the request to the answer. `sessions` has the attached ranks and their memory, `watches` the watchers of
what the pool holds.
"""
