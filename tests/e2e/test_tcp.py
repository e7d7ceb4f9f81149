"""TCP with mTLS: who may connect, what may be asked from another host, and certificates that change."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
from pathlib import Path

import grpc
import pytest

from kvsidecar.client import RemoteClient, RequestDenied
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.cli.command import run
from tests.e2e import remote as remotes
from tests.e2e.remote import Pki, Remote, stub
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Rank, done, hashes
from tests.marks import promise

pki, remote = remotes.pki, remotes.remote
"""Fixtures, which pytest looks for in this module."""


@promise("over TCP, certificates named in it")
def test_a_certificate_that_the_policy_names_looks_up_and_is_refused_the_rest(remote: Remote, pki: Pki) -> None:
    rank = Rank(remote.daemon)
    done(rank.store("a", "b"))
    other = pb.Namespace()
    other.CopyFrom(namespace_to_wire(NAMESPACE))
    other.model = "other"
    with RemoteClient(remote.address, pki.client("n1.sched.example")) as client:
        long = client.lookup(NAMESPACE, {0: hashes("a") + [bytes(32)] * 140_000})
        assert long.groups[0].hits == 1, "it goes in parts"
        found = client.lookup(NAMESPACE, {0: hashes("a", "b", "c")})
        assert (found.ready, found.groups[0].hits, found.lease) == (True, 2, None)
        status = client.status()
        assert [each.namespace.model for each in status.namespaces] == ["m"]
        assert (len(status.ranks), status.pool.blocks, status.partial) == (0, 0, True)
        with pytest.raises(RequestDenied, match=r"only admins may drain, and the certificate of n1\.sched\.example"):
            client.drain()
        with pytest.raises(RequestDenied, match="only admins may clear all"):
            client.clear()
        assert client.clear(NAMESPACE) == 2
    assert remote.daemon.refused("denied") == 2
    rank.close()


def test_an_admin_by_certificate_operates_and_uses_no_namespace(remote: Remote, pki: Pki) -> None:
    rank = Rank(remote.daemon)
    done(rank.store("a"))
    with RemoteClient(remote.address, pki.client("ops.example")) as client:
        status = client.status()
        assert (len(status.ranks), status.pool.blocks, status.partial) == (1, 1, False)
        with pytest.raises(RequestDenied, match=r"grants the certificate of ops\.example no namespace"):
            client.lookup(NAMESPACE, {0: hashes("a")})
        assert client.clear() == 1
        client.drain()
        assert remote.daemon.get("/ready")[0] == 503
    rank.close()


def test_nothing_attaches_over_tcp_and_nothing_is_leased(remote: Remote, pki: Pki) -> None:
    lookup = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX, lease_ms=1)
    token = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX, token=b"x")
    with stub(remote, pki.client("n1.sched.example")) as sidecar:
        asked = {
            "a rank must attach over the Unix socket": lambda: list(sidecar.Attach(iter([pb.AttachRequest()]))),
            "there are no leases": lambda: sidecar.Release(pb.ReleaseRequest(lease=1)),
            "are no leases": lambda: sidecar.Renew(pb.RenewRequest(lease=1)),
            "leases are not available over TCP": lambda: sidecar.Lookup(lookup),
            "leases are not available": lambda: sidecar.Lookup(token),
        }
        for text, ask in asked.items():
            with pytest.raises(grpc.RpcError, match=text) as caught:
                ask()
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]
    assert remote.daemon.refused("denied") == len(asked)
    assert remote.daemon.metric("kvsidecar_leases") == 0


@promise("nothing without a client certificate that the policy names")
def test_a_certificate_that_no_rule_names_gets_nothing(remote: Remote, pki: Pki) -> None:
    rank = Rank(remote.daemon)
    done(rank.store("a"))
    with RemoteClient(remote.address, pki.client("sched.example")) as client:  # not *.sched.example
        with pytest.raises(RequestDenied, match="no namespace"):
            client.lookup(NAMESPACE, {0: hashes("a")})
        with pytest.raises(RequestDenied):
            client.clear(NAMESPACE)
        assert not client.status().namespaces
    rank.close()


def test_certificates_are_read_again_when_they_change_and_bad_ones_are_not_taken(remote: Remote, pki: Pki) -> None:
    def serial() -> int:
        context = ssl.create_default_context(cafile=str(pki.ca_file))
        tls = pki.client("ops.example")
        context.load_cert_chain(tls.certificate, tls.key)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("localhost", remote.port), SECONDS) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as connection,
        ):
            shown = connection.getpeercert()
            assert shown is not None
            return int(str(shown["serialNumber"]), 16)

    first = serial()
    assert serial() == first
    pki.key.write_text("half a file")
    assert serial() == first
    assert (
        "are not a matching certificate and key"
        in remote.daemon.wait_log("certificates not reloaded: the previous ones stay in use")["reason"]
    )
    pki.key.unlink()
    os.mkfifo(pki.key, 0o600)  # which nobody writes to
    assert serial() == first
    assert (
        "it is not a regular file"
        in remote.daemon.wait_log("certificates not reloaded: the previous ones stay in use")["reason"]
    )
    pki.key.unlink()
    pki.issue("server", "localhost")
    assert serial() != first
    remote.daemon.wait_log("certificates reloaded")
    with RemoteClient(remote.address, pki.client("ops.example")) as client:
        assert client.status().epoch


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda pki: pki.key.chmod(0o644), "has mode 0644: readable by others"),
        (lambda pki: pki.key.chmod(0o660), "has mode 0660"),
        (lambda pki: pki.key.unlink(), "cannot be read: No such file"),
        (lambda pki: pki.certificate.write_text("x"), "are not a matching certificate and key in PEM"),
        (lambda pki: shutil.copy(pki.issue("another", "localhost")[1], pki.key), "key values mismatch"),
        (lambda pki: pki.ca_file.write_text("x"), "contains no PEM certificates"),
    ],
)
def test_files_that_cannot_be_used_stop_the_start_in_one_sentence(
    short_dir: Path, pki: Pki, spoil: object, said: str
) -> None:
    spoil(pki)  # type: ignore[operator]
    serve = ["serve", "--device", "host", "--socket", str(short_dir / "kvs.sock"), "--pool-size", "1MiB"]
    refused = run(*serve, "--http-port", "0", "--log-format", "json", *pki.flags)
    assert refused.returncode == 78, refused.stderr
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("kvsidecar: --tls-")
    assert said in last


def test_a_port_in_use_may_pass(short_dir: Path, pki: Pki) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        serve = ["serve", "--device", "host", "--socket", str(short_dir / "kvs.sock"), "--pool-size", "1MiB"]
        flags = [*serve, "--http-port", "0", "--log-format", "json", *pki.flags]
        refused = run(*flags, "--tcp-listen", address)
        assert refused.returncode == 75, refused.stderr
        said = refused.stderr.strip().splitlines()[-1]
        assert said == (
            f"kvsidecar: gRPC cannot listen on {address} (Address already in use): free it, or set --tcp-listen"
        )
        assert run(*flags, "--tcp-listen", "no-such-host.invalid:0").returncode in (75, 78)  # as its resolver says


def test_a_key_that_its_group_may_read_is_taken(short_dir: Path, pki: Pki) -> None:
    pki.key.chmod(0o640)
    with DaemonProcess(short_dir, *pki.flags) as daemon:
        daemon.wait_ready()


def test_the_commands_reach_a_daemon_over_tcp(remote: Remote, pki: Pki) -> None:
    rank = Rank(remote.daemon, instance="far-away")
    done(rank.store("a"))
    tls = pki.client("ops.example")
    variables = {
        "KVSIDECAR_CONNECT": remote.address,
        "KVSIDECAR_CONNECT_CA": tls.ca,
        "KVSIDECAR_CONNECT_CERTIFICATE": tls.certificate,
        "KVSIDECAR_CONNECT_KEY": tls.key,
    }
    assert json.loads(run("status", "--json", **variables).stdout)["pool"]["blocks"] == 1
    assert "far-away" in run("engines", **variables).stdout
    assert "far-away" in run("top", "--once", "--interval", "0.1", **variables).stdout
    assert run("clear", "--all", "--yes", **variables).stdout == "1 block cleared.\n"
    assert run("drain", "--wait", "--timeout", "20", **variables).returncode == 0
    assert run("drain", "--cancel", **variables).stdout.startswith("Drain cancelled: ")
    missing = run("status", "--connect", remote.address)
    assert missing.returncode == 2
    assert "--connect needs --connect-ca" in missing.stderr
    both = run("status", "--connect", remote.address, "--socket", remote.daemon.socket)
    assert "either --socket or --connect" in both.stderr
    assert run("status", "--socket", remote.daemon.socket, **variables).returncode == 0
    who = pki.client("n1.sched.example")
    denied = run(
        "drain", **{**variables, "KVSIDECAR_CONNECT_CERTIFICATE": who.certificate, "KVSIDECAR_CONNECT_KEY": who.key}
    )
    assert denied.returncode == 77
    assert "only admins may drain" in denied.stderr
    rank.close()


def test_the_variables_of_the_commands_do_not_stop_a_daemon(short_dir: Path) -> None:
    with DaemonProcess(short_dir, KVSIDECAR_CONNECT="node7:9465", KVSIDECAR_CONNECT_CA="/x") as daemon:
        daemon.wait_ready()
