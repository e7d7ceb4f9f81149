"""What the daemon decides, without a socket: jobs, sessions, lookups, copy plans, layouts, access, quotas, readiness,
metrics.

Imports `copier`, `pool`, `device`, `cache`, `protocol` and `support`; no gRPC. Begin with `jobs`: a store and a load,
from the request to the answer. `sessions` has who is attached and with which memory, `copy_plan` what is copied
where.
"""
