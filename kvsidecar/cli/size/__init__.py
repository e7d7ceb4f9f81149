"""``kvsidecar size``: what pool, disk and limits a model and its users need. Begin with `plan`.

`kv` and `plan` are pure.
"""
