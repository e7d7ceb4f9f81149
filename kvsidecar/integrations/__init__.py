"""Connectors that run inside engines, on the public client: `vllm`. What connectors share stands beside them: weights
are identified by content (`weights`), a changed model moves to a new generation (`generations`).

Imports `client`, `types` and `errors` only. Begin with ``vllm/connector.py``.
"""
