"""The servers of PegaFlow and LMCache, started and ready, for all benchmarks that need one."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.processes import Child, answers, library_path, listens
from benchmarks.turns import free_port

START_SECONDS = 600.0
"""Each pins its pool before it serves, PegaFlow in one thread and some 0.8 s for each GiB."""


@dataclass(frozen=True)
class Server:
    """One that is ready.

    Args:
        rpc: port of its RPCs, on 127.0.0.1.
        http: port of its HTTP, there too.
    """

    process: Child
    rpc: int
    http: int

    @property
    def socket(self) -> str:
        """Address and port of its RPCs."""
        return f"127.0.0.1:{self.rpc}"


@contextmanager
def pegaflow(pool_bytes: int, log: Path, gpus: int = 1) -> Iterator[Server]:
    """PegaFlow's, until the end of the block. Raises PeerFailedError: it does not start."""
    rpc, http = free_port(), free_port()
    spec = importlib.util.find_spec("pegaflow")
    assert spec is not None, "pegaflow is not installed"
    assert spec.submodule_search_locations is not None
    # Not its launcher: that is Python, and outlived by the server if it is killed.
    command = [os.path.join(spec.submodule_search_locations[0], "pegaflow-server-py")]
    command += ["--addr", f"127.0.0.1:{rpc}", "--http-addr", f"127.0.0.1:{http}"]
    command += ["--pool-size", str(pool_bytes), "--devices", ",".join(map(str, range(gpus)))]
    # It writes a line for each lookup otherwise. With NUMA it refuses a GPU whose node nvidia-smi does not tell.
    command += ["--log-level", "warn", "--disable-numa-affinity"]
    # Python runs in it too, which shall find what is found here: its own modules, torch, and the package.
    environment = {
        "LD_LIBRARY_PATH": library_path(),
        "PYTHONHOME": os.pathsep.join((sys.base_prefix, sys.base_exec_prefix)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with Child("the server", command, log, environment) as child:
        # Its HTTP port answers before its gRPC port listens, which it does when the pool is pinned.
        child.wait_until(lambda: listens(rpc), START_SECONDS)
        yield Server(child, rpc, http)


@contextmanager
def lmcache(pool_bytes: int, log: Path) -> Iterator[Server]:
    """LMCache's, until the end of the block. Raises PeerFailedError: it does not start."""
    rpc, http = free_port(), free_port()
    command = [sys.executable, "-m", "benchmarks.peers.lmcache_server", "server", "--host", "127.0.0.1"]
    command += ["--port", str(rpc), "--http-port", str(http), "--chunk-size", "256"]
    command += ["--l1-size-gb", f"{pool_bytes / 2**30:.3f}", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    command += ["--max-gpu-workers", "4", "--max-cpu-workers", "4"]
    with Child("the server", command, log, {"LMCACHE_TRACK_USAGE": "false"}) as child:
        child.wait_until(lambda: answers(f"http://127.0.0.1:{http}/healthcheck"), START_SECONDS)
        yield Server(child, rpc, http)
