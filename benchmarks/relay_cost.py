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
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import grpc
import numpy as np
import trustme

from benchmarks.turns import free_port, python_of, ratio, turns
from kvsidecar.bench.engine import attached
from kvsidecar.bench.layouts import TINY
from kvsidecar.bench.processes import PrivateDaemon, private_daemon
from kvsidecar.client import Blocks
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.support.units import MiB
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc

COUNTS = (64, 512)
LAYOUT, RUN = replace(TINY, num_blocks=max(COUNTS)), "relay"
HASHES = [hashlib.sha256(b"%d" % each).digest() for each in range(max(COUNTS))]
CLIENT = "asker.example"
POLICY = f"[{{certificates=['{CLIENT}'], namespaces=['*']}}, {{uids=[{os.getuid()}], namespaces=['*']}}]"
Ask = Callable[[pb.LookupRequest], pb.LookupReply]


@contextmanager
def started(root: Path, directory: Path, *flags: str) -> Iterator[PrivateDaemon]:
    """A daemon of one version of the code; it has stored all blocks."""
    more = ("--memory-check", "off", *flags)
    with (
        private_daemon(directory, "host", 64 * MiB, more, python=python_of(root)) as daemon,
        attached(daemon.socket, LAYOUT, None, run=RUN, rng=np.random.default_rng(0)) as engine,
    ):
        engine.finish(engine.client.store([Blocks(0, HASHES, list(range(len(HASHES))))]))
        yield daemon


def inner(daemon: PrivateDaemon) -> str:
    """The address of gRPC's own server."""
    for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
        if ".inner" in os.readlink(fd):
            return f"unix:{fd}"
    raise SystemExit("the daemon has no socket behind its relay")


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
    request = pb.LookupRequest(namespace=namespace_to_wire(LAYOUT.namespace(RUN)), mode=pb.LookupRequest.MODE_PREFIX)
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
        for counts, order in turns(options.rounds, (first, second)):
            taken = {way: median_seconds(ways[way], count, options.lookups) for way in order}
            if counts:
                rounds.append((taken[first], taken[second]))
        before, after = zip(*rounds, strict=True)
        times = f"{first} {1e6 * median(before):7.1f} us  {second} {1e6 * median(after):7.1f} us"
        print(f"{what:5} {count:6} hashes  {times}  {ratio(before, after)}", flush=True)


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

        daemon = stack.enter_context(started(here, directory))
        straight, relayed = (grpc.insecure_channel(each) for each in (inner(daemon), f"unix:{daemon.socket}"))
        compare("Unix", {"straight": stub(straight), "relayed": stub(relayed)}, options)
        if options.old is None:
            return
        certificates, ways = Certificates(directory), {}
        for name, root in (("old", options.old.resolve()), ("new", here)):
            port = free_port()
            stack.enter_context(started(root, directory, *certificates.flags(port)))
            ways[name] = stub(grpc.secure_channel(f"localhost:{port}", certificates.credentials))
        compare("TLS", ways, options)


if __name__ == "__main__":
    main()
