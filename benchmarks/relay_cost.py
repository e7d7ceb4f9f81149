"""What the relay in front of gRPC costs a lookup: over the Unix socket, and over TCP against an older version.

    git worktree add ../old COMMIT
    python -m benchmarks.relay_cost [--old ../old] [--rounds 20] [--lookups 300]

Hits only, without a lease, of the host device, sent and timed by one process that uses gRPC's stub. "Unix": straight
to gRPC's own server behind the relay, whose socket is found among the daemon's descriptors, and through the relay.
"TLS": a daemon of each version, both with the same certificates. The ways take turns. Printed are the median over the
rounds of each round's median, in microseconds, and the second way / the first of the same round: its median, and the
first and the last tenth.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

import grpc
import trustme

from kvsidecar.client import Blocks, Client, GroupLayout, HostBuffer, Namespace, Region
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

COUNTS = (64, 512)
SECONDS = 60.0
ROW = 4096
NAMESPACE = Namespace("m", "bf16", "LBNHC", 16, 1, 1, "sha256")
HASHES = [hashlib.sha256(b"%d" % each).digest() for each in range(max(COUNTS))]
CLIENT = "asker.example"
POLICY = f"[{{certificates=['{CLIENT}'], namespaces=['*']}}, {{uids=[{os.getuid()}], namespaces=['*']}}]"
Ask = Callable[[pb.LookupRequest], pb.LookupReply]


class Daemon:
    """Of one version of the code; it has stored all blocks."""

    def __init__(self, root: Path, directory: Path, stack: ExitStack, *flags: str) -> None:
        directory.mkdir()
        self.socket = str(directory / "kvs.sock")
        command = [sys.executable, "-m", "kvsidecar", "serve", "--socket", self.socket, "--log-level", "error"]
        command += ["--device", "host", "--http-port", "0", "--pool-size", "64MiB", "--memory-check", "off", *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=root)
        stack.callback(_end, self.process)
        deadline = time.monotonic() + SECONDS
        while not Path(self.socket + ".attach").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the daemon of {root} did not start")
            time.sleep(0.05)
        buffer = HostBuffer(len(HASHES) * ROW)
        client = stack.enter_context(Client(self.socket, timeout=SECONDS, step_budget=SECONDS))
        groups = [GroupLayout(0, len(HASHES), 0, 1, (Region(0, 0, 0, ROW, ROW, 1),))]
        client.attach(instance="asker", namespace=NAMESPACE, buffers=buffer.kv_buffers(), groups=groups)
        client.wait_ready(SECONDS)
        job = client.store([Blocks(0, HASHES, list(range(len(HASHES))))])
        assert client.wait([job], SECONDS)[job].copied_blocks == len(HASHES)

    def inner(self) -> str:
        """The address of gRPC's own server."""
        for fd in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if ".inner" in os.readlink(fd):
                return f"unix:{fd}"
        raise SystemExit("the daemon has no socket behind its relay")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class Certificates:
    def __init__(self, directory: Path) -> None:
        ca, names = trustme.CA(), ("ca.pem", "server.pem", "server.key")
        self._files = [directory / name for name in names]
        server, client = ca.issue_cert("localhost"), ca.issue_cert(CLIENT)
        ca.cert_pem.write_to_path(str(self._files[0]))
        server.cert_chain_pems[0].write_to_path(str(self._files[1]))
        server.private_key_pem.write_to_path(str(self._files[2]))
        self._files[2].chmod(0o600)
        self.credentials = grpc.ssl_channel_credentials(
            ca.cert_pem.bytes(), client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
        )

    def flags(self, port: int) -> tuple[str, ...]:
        ca, certificate, key = map(str, self._files)
        listen = ("--tcp-listen", f"127.0.0.1:{port}", "--policy", POLICY)
        return *listen, "--tls-client-ca", ca, "--tls-certificate", certificate, "--tls-key", key


def median_seconds(ask: Ask, count: int, lookups: int) -> float:
    request = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX)
    request.groups.add(group=0, hashes=b"".join(HASHES[:count]))
    taken = []
    for _ in range(lookups):
        began = time.perf_counter()
        found = ask(request)
        taken.append(time.perf_counter() - began)
        assert found.groups[0].hits == count
    return median(taken)


def compare(what: str, ways: dict[str, Ask], options: argparse.Namespace) -> None:
    first, second = ways
    for count in COUNTS:
        rounds = []
        for number in range(-1, options.rounds):  # the first one warms up
            order = (first, second) if number % 2 else (second, first)
            taken = {way: median_seconds(ways[way], count, options.lookups) for way in order}
            if number >= 0:
                rounds.append((taken[first], taken[second]))
        ratios = [after / before for before, after in rounds]
        tenths = quantiles(ratios, n=10)
        before, after = (1e6 * median(each) for each in zip(*rounds, strict=True))
        share = f"{median(ratios):.2f} ({tenths[0]:.2f} to {tenths[-1]:.2f})"
        print(f"{what:5} {count:6} hashes  {first} {before:7.1f} us  {second} {after:7.1f} us  {share}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, metavar="DIRECTORY", help="a checkout of the other version, for TLS")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lookups", type=int, default=300, help="of each way in a round")
    options = parser.parse_args()
    here = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix="kvs-") as made, ExitStack() as stack:
        directory = Path(made)

        def stub(channel: grpc.Channel) -> Ask:
            lookup: Ask = pb_grpc.SidecarStub(stack.enter_context(channel)).Lookup
            return lookup

        daemon = Daemon(here, directory / "unix", stack)
        straight, relayed = (grpc.insecure_channel(each) for each in (daemon.inner(), f"unix:{daemon.socket}"))
        compare("Unix", {"straight": stub(straight), "relayed": stub(relayed)}, options)
        if options.old is None:
            return
        certificates, ways = Certificates(directory), {}
        for name, root in (("old", options.old.resolve()), ("new", here)):
            port = free_port()
            Daemon(root, directory / name, stack, *certificates.flags(port))
            ways[name] = stub(grpc.secure_channel(f"localhost:{port}", certificates.credentials))
        compare("TLS", ways, options)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
