"""LMCache's connector, with its compiled extension also on torch 2.11, in whichever process vLLM makes one."""

# isort: off
from benchmarks.peers import lazy_symbols  # noqa: F401 - before anything imports lmcache
# isort: on

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]
