"""kvsidecar: a per-node daemon that keeps LLM engines' KV cache in pinned host memory."""

__all__ = ["__version__"]

try:
    from kvsidecar._version import __version__  # written by the build, from the tag
except ImportError:
    __version__ = "0+unknown"  # a checkout that was never installed
