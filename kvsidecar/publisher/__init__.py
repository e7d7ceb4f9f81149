"""`kvsidecar publish`: tells routers what this node's daemon holds, in vLLM's wire format, on an endpoint of its own.

A process beside the daemon that watches it as an engine does. Engines come and go meanwhile: routers need no engine to
be told what can be loaded on the node.
"""
