"""`kvsidecar doctor`: whether this machine, container and user can run the daemon, and what to change if not.

``gather`` reads facts and decides nothing; ``checks`` turns facts into findings and reads nothing; ``view`` shows them.
"""
