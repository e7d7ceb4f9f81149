"""The daemon's decisions, without a socket: jobs, sessions, lookups, copy plans, layouts, access, quotas, readiness,
metrics.

Imports `copier`, `pool`, `device`, `cache`, `protocol` and `support`; no gRPC. Begin with `jobs`: a store and a load,
from the request to the answer. `sessions` has the attached ranks and their memory, `copy_plan` the copies
of a job.
"""
