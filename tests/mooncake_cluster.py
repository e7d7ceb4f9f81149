"""Mooncake Store on loopback: masters, and nodes that give memory, each a process that a test may stop or kill."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from kvsidecar.tiers.backend import ReadEnd, ShardSpace, WriteEnd
from kvsidecar.tiers.cluster.backend import ClusterBackend, ClusterOptions

START_SECONDS = 120.0
LEASE_SECONDS = 5.0
"""For how long a read protects what it reads. If it takes longer, it fails."""
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
    """What a Mooncake Store with a standby lacks here; empty if nothing."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"needs kvsidecar[mooncake], libibverbs1, libnuma1 and libcurl4: {error}"
    if not _master_command():
        return "mooncake_master is not on the path"
    return "" if shutil.which("etcd") else "etcd is not on the path (Debian: etcd-server)"


def _master_command() -> str | None:
    beside = Path(sys.executable).parent / "mooncake_master"
    return str(beside) if beside.is_file() else shutil.which("mooncake_master")


class Cluster:
    """Args:
    node_bytes: of memory that each node gives.
    standby: two masters that agree by etcd which of them leads; the other one follows its log.
    """

    def __init__(self, folder: Path, *, nodes: int = 1, node_bytes: int = 64 << 20, standby: bool = False) -> None:
        self._folder, self._node_bytes = folder, node_bytes
        self._processes: list[subprocess.Popen[str]] = []
        self.nodes: list[subprocess.Popen[str]] = []
        self._endpoint = ""
        """Of etcd."""
        self._port = _free_port()
        self.address = f"127.0.0.1:{self._port}"
        try:
            if standby:
                self._start_etcd()
                self.address = f"etcd://{self._endpoint}"
            self.start_master()
            if standby:
                self.leader = self.master
                self._port = _free_port()
                self._run_master()
            for _ in range(nodes):
                self.start_node()
        except BaseException:
            self.close()
            raise

    def _start_etcd(self) -> None:
        self._endpoint = f"127.0.0.1:{_free_port()}"
        clients, peers = f"http://{self._endpoint}", f"http://127.0.0.1:{_free_port()}"
        options = {
            "data-dir": self._folder / "etcd",
            "listen-client-urls": clients,
            "advertise-client-urls": clients,
            "listen-peer-urls": peers,
            "initial-advertise-peer-urls": peers,
            "initial-cluster": f"default={peers}",
        }
        etcd = self._run("etcd", ["etcd", *(f"--{name}={value}" for name, value in options.items())])
        eventually(lambda: self._listens(etcd, int(self._endpoint.rpartition(":")[2])))

    def start_master(self) -> None:
        """And wait until it serves."""
        master = self._run_master()
        eventually(lambda: self._listens(master, self._port))

    def _run_master(self) -> subprocess.Popen[str]:
        command = _master_command()
        assert command is not None
        self._metrics_port = _free_port()
        options: dict[str, object] = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self._metrics_port,
            "default_kv_lease_ttl": int(LEASE_SECONDS * 1000),
            "client_ttl": CLIENT_SECONDS,
        }
        if self._endpoint:
            options |= {"enable_ha": "true", "etcd_endpoints": self._endpoint, "enable_oplog": "true"}
        self.master = self._run("master", [command, *(f"--{name}={value}" for name, value in options.items())])
        return self.master

    def wait_standby(self, entries: int) -> None:
        """Until the standby has read so many entries of the log: one for each write."""

        def enough() -> bool:
            with urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics") as page:
                found = re.search(rb"^ha_oplog_applied_entries_total (\d+)", page.read(), re.MULTILINE)
            return found is not None and int(found[1]) >= entries

        eventually(enough)

    def _run(self, name: str, command: list[str]) -> subprocess.Popen[str]:
        with (self._folder / f"{name}.log").open("a") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, text=True)
        self._processes.append(process)
        return process

    def _listens(self, process: subprocess.Popen[str], port: int) -> bool:
        assert process.poll() is None, "\n".join(log.read_text() for log in self._folder.glob("*.log"))
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

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


class OwnMemory(ClusterBackend):
    """Reads and writes any memory of a test: it is registered for the call."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(memoryview(bytearray(4096)), ClusterOptions(cluster.address))

    def read(self, space: ShardSpace, hashes: Any, memory: Any) -> list[ReadEnd]:
        return self.registered(memory, lambda: ClusterBackend.read(self, space, hashes, memory))

    def write(self, space: ShardSpace, hashes: Any, memory: Any, checksums: Any) -> list[WriteEnd]:
        return self.registered(memory, lambda: ClusterBackend.write(self, space, hashes, memory, checksums))

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
