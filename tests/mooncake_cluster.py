"""Mooncake Store on loopback: a master, and nodes that give memory, each a process that a test may stop or kill."""

from __future__ import annotations

import ctypes
import importlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsidecar.tiers.engine import ReadEnd, ShardSpace, WriteEnd
from kvsidecar.tiers.mooncake import ClusterOptions, MooncakeEngine

START_SECONDS = 120.0
LEASE_SECONDS = 0.5
CLIENT_SECONDS = 3
"""After which the master gives up a node that does not report."""
_NODE = """
import signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(code, flush=True)
signal.pause()
"""


def missing() -> str:
    """Why there is no Mooncake Store here; empty if there is."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"needs kvsidecar[mooncake], libibverbs1, libnuma1 and libcurl4: {error}"
    return "" if _master_command() else "mooncake_master is not on the path"


def _master_command() -> str | None:
    beside = Path(sys.executable).parent / "mooncake_master"
    return str(beside) if beside.is_file() else shutil.which("mooncake_master")


class Cluster:
    """Args: node_bytes: of memory that each node gives."""

    def __init__(self, folder: Path, *, nodes: int = 1, node_bytes: int = 64 << 20) -> None:
        self._folder, self._node_bytes = folder, node_bytes
        self.port, self._metrics_port = _free_port(), _free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._processes: list[subprocess.Popen[str]] = []
        self.nodes: list[subprocess.Popen[str]] = []
        try:
            self.start_master()
            for _ in range(nodes):
                self.start_node()
        except BaseException:
            self.close()
            raise

    def start_master(self) -> None:
        command = _master_command()
        assert command is not None
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self._metrics_port,
            "default_kv_lease_ttl": int(LEASE_SECONDS * 1000),
            "client_ttl": CLIENT_SECONDS,
        }
        with (self._folder / "master.log").open("a") as file:
            self.master = subprocess.Popen(
                [command, *(f"--{name}={value}" for name, value in options.items())],
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._processes.append(self.master)
        eventually(self._listens)

    def _listens(self) -> bool:
        assert self.master.poll() is None, (self._folder / "master.log").read_text()
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0

    def start_node(self) -> None:
        with (self._folder / f"node{len(self.nodes)}.log").open("a") as file:
            node = subprocess.Popen(
                [sys.executable, "-c", _NODE, self.address, str(self._node_bytes)],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self._processes.append(node)
        self.nodes.append(node)
        assert node.stdout is not None
        assert node.stdout.readline().strip() == "0", "a node does not start"

    def stop_node(self, number: int) -> None:
        self.nodes[number].send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.nodes[number].pid}/stat")
        eventually(lambda: state.read_text().rpartition(") ")[2][0] == "T")

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class OwnMemory(MooncakeEngine):
    """Reads and writes any memory of a test: it is registered for the call."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(memoryview(bytearray(4096)), ClusterOptions(cluster.address))

    def read(self, space: ShardSpace, hashes: Any, memory: Any) -> list[ReadEnd]:
        return self.registered(memory, lambda: MooncakeEngine.read(self, space, hashes, memory))

    def write(self, space: ShardSpace, hashes: Any, memory: Any, checksums: Any) -> list[WriteEnd]:
        return self.registered(memory, lambda: MooncakeEngine.write(self, space, hashes, memory, checksums))

    def registered(self, memory: list[memoryview], call: Callable[[], Any]) -> Any:
        if not memory:
            return call()
        whole = memoryview(memory[0].obj)  # type: ignore[arg-type]
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        assert self._store.register_buffer(address, len(whole)) == 0
        try:
            return call()
        finally:
            assert self._store.unregister_buffer(address) == 0

    def close(self) -> None:
        self.forget(None)
        super().close()


def eventually(holds: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
