"""What runs inside engines, on the public client: `vllm` and `sglang`. Beside them stand the engine-independent parts:
`options` reads an integration's options, `checkpoint` and `weights` identify weights by their content,
`weights_version` separates blocks after weights change in place, `stored_filter` remembers which blocks are stored.

Imports `client`, `types` and `errors` only. Begin with ``vllm/connector.py`` or ``sglang/linker.py``.
"""
