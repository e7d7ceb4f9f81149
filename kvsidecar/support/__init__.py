"""What every part may use, and none of which knows what a block is: the log, owned tasks, units, fail points, the
terminal, addresses, child processes, the memory that this process may lock, and how threads are kept awake.

Imports nothing of kvsidecar but `errors` and `types`. No story begins here; read a module when another one uses it.
"""
