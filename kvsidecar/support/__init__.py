"""Helpers for all packages; none of them knows what a block is: logging, owned tasks, units, failpoints, the terminal,
addresses, child processes, host memory and its limits, and wake-up latency.

Imports only `errors` and `types` of kvsidecar. There is no entry point: read a module when another one uses it.
"""
