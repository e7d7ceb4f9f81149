"""kvsidecar: a per-node daemon that keeps LLM engines' KV cache in pinned host memory."""

__version__ = "0.1.0"
