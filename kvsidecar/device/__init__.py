"""GPUs, and the host as a device: imported memory, events, and streams that copy.

Imports `support`, `types` and `errors`. Begin with `base`, the protocols that both devices implement; `cuda` is the
only package that imports a CUDA binding, `host` is what runs without a GPU; `platforms` chooses.
"""
