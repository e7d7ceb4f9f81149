"""The modes ``pegaflow`` and ``lmcache``: another daemon with a pool of so many bytes, and its connector for vLLM.

They need a GPU. benchmarks/peers/README.md says what to install.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import servers
from benchmarks.peers.processes import PeerFailedError


@dataclass(frozen=True)
class Peer:
    """Another daemon.

    Args:
        install: what to tell someone who lacks its package, which is called as the mode is.
        start: its server: from bytes of its pool, the log, and the number of GPUs.
        connector: vLLM's configuration of its connector, without its options.
        options: of its connector, by the port of the server.
    """

    install: str
    start: Callable[[int, Path, int], AbstractContextManager[servers.Server]]
    connector: Mapping[str, str]
    options: Callable[[int], dict[str, Any]]


PEERS = {
    "pegaflow": Peer(
        install="pip install pegaflow-llm-cu13==0.25.1 (CUDA 12: pegaflow-llm)",
        start=servers.pegaflow,
        connector={"kv_connector": "PegaKVConnector", "kv_connector_module_path": "pegaflow.connector"},
        options=lambda port: {"pegaflow.host": "http://127.0.0.1", "pegaflow.port": port},
    ),
    "lmcache": Peer(
        install="pip install --no-deps -r benchmarks/peers/requirements-lmcache.txt",
        start=lambda pool_bytes, log, _gpus: servers.lmcache(pool_bytes, log),
        connector={
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "benchmarks.vllm.lmcache_connector",
        },
        # The next prompt has the answer to this one, which it does not store by itself.
        options=lambda port: {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.save_decode_cache": True,
        },
    ),
}


def check(mode: str, tiny: bool) -> None:
    """Raises SystemExit if it can certainly not run."""
    if tiny:
        raise SystemExit(f"--modes: {mode} needs a GPU, so it cannot be with --tiny")
    if importlib.util.find_spec(mode) is None:
        raise SystemExit(f"--modes: {mode} needs its package: {PEERS[mode].install}")


@contextmanager
def server(mode: str, directory: Path, pool_bytes: int, gpus: int = 1) -> Iterator[servers.Server]:
    """A server that is ready, until the end of the block.

    Raises:
        SystemExit: it does not start. It says why in `directory`/MODE-N.log.
    """
    log = directory / f"{mode}-{len(list(directory.glob(f'{mode}-*.log')))}.log"
    with ExitStack() as stack:
        try:
            found = stack.enter_context(PEERS[mode].start(pool_bytes, log, gpus))
        except PeerFailedError as error:
            raise SystemExit(f"--modes: {mode}: {error}") from None
        yield found


def transfer_config(mode: str, socket: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's configuration of a connector.

    Args:
        socket: as the server has it.
        extra: further options, such as ``{"pegaflow.transfer_backend": "kernel"}``.
    """
    peer = PEERS[mode]
    return {
        **peer.connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**peer.options(int(socket.rpartition(":")[2])), **extra},
    }


def versions() -> dict[str, str]:
    """Of those that this process has loaded."""
    return {name: sys.modules[name].__version__ for name in PEERS if name in sys.modules}
