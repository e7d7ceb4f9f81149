"""Helpers for every package, none of which knows what a block is: the log, owned tasks, units, failpoints, the
terminal, addresses, child processes, host memory and its limits, and how threads are kept awake.

Imports nothing of kvsidecar but `errors` and `types`. Nothing begins here; read a module when another one uses it.
"""
