"""Connectors that run inside engines, on the public client: `vllm`. Beside it stand the engine-independent parts:
`weights` identifies weights by their content, `weights_version` separates blocks after weights change in place.

Imports `client`, `types` and `errors` only. Begin with ``vllm/connector.py``.
"""
