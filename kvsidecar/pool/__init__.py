"""The daemon's pinned host memory: mapped, faulted in, bound to a NUMA node and pinned chunk by chunk, with its
progress.

Imports `device` (which pins) and `support`. Begin with `host_pool`; `pinning` is what a start spends its time in.
"""
