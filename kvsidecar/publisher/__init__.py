"""`kvsidecar publish`: tells routers what this node's daemon holds, in vLLM's wire format, on an endpoint of its own.

A process beside the daemon that watches it as an engine does. Engines may come and go: routers learn what can be
loaded on the node without them.
"""
