"""The mode ``pegaflow``: a pegaflow-server with a pool of so many bytes, and its connector.

It needs a GPU and the package for its CUDA (13: pegaflow-llm-cu13, 12: pegaflow-llm), with which engine and server run.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.processes import Child, PeerFailedError, library_path, listens
from benchmarks.turns import free_port

START_SECONDS = 600.0
"""It pins its pool in one thread, some 0.8 s for each GiB, and serves nothing before."""


class Server(NamedTuple):
    """One that is ready."""

    socket: str
    """Address and port of its gRPC."""


def check(tiny: bool) -> None:
    """Raises SystemExit if it can certainly not run."""
    if tiny:
        raise SystemExit("--modes: pegaflow needs a GPU, so it cannot be with --tiny")
    if importlib.util.find_spec("pegaflow") is None:
        raise SystemExit(
            "--modes: pegaflow needs its package: pip install pegaflow-llm-cu13==0.25.1 (CUDA 12: pegaflow-llm)"
        )


@contextmanager
def server(directory: Path, pool_bytes: int, gpus: int = 1) -> Iterator[Server]:
    """A server that is ready, until the end of the block.

    Raises:
        SystemExit: it does not start. It says why in `directory`/pegaflow-N.log.
    """
    log = directory / f"pegaflow-{len(list(directory.glob('pegaflow-*.log')))}.log"
    port, http = free_port(), free_port()
    # Not its launcher: that is Python, and outlived by the server if it is killed.
    (package,) = importlib.util.find_spec("pegaflow").submodule_search_locations
    command = [os.path.join(package, "pegaflow-server-py"), "--addr", f"127.0.0.1:{port}"]
    command += ["--http-addr", f"127.0.0.1:{http}", "--pool-size", str(pool_bytes)]
    command += ["--devices", ",".join(map(str, range(gpus)))]
    # It writes a line for each lookup otherwise. With NUMA it refuses a GPU whose node nvidia-smi does not tell.
    command += ["--log-level", "warn", "--disable-numa-affinity"]
    # Python runs in it too, which shall find what is found here: its own modules, torch, and the package.
    environment = {
        "LD_LIBRARY_PATH": library_path(),
        "PYTHONHOME": os.pathsep.join((sys.base_prefix, sys.base_exec_prefix)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with Child("pegaflow-server", command, log, environment) as child:
        try:
            child.wait_until(lambda: listens(port), START_SECONDS)
        except PeerFailedError as error:
            raise SystemExit(f"--modes: pegaflow: {error}") from None
        yield Server(f"127.0.0.1:{port}")


def transfer_config(socket: str, extra: dict[str, Any]) -> dict[str, Any]:
    """vLLM's configuration of its connector.

    Args:
        socket: as `Server` has it.
        extra: further options, such as ``{"pegaflow.transfer_backend": "kernel"}``.
    """
    host, _, port = socket.rpartition(":")
    return {
        "kv_connector": "PegaKVConnector",
        "kv_connector_module_path": "pegaflow.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pegaflow.host": f"http://{host}", "pegaflow.port": int(port), **extra},
    }
