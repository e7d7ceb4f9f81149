"""Real users of the host, with and without a policy: what each may use, see and do. Needs root to become them."""

from __future__ import annotations

import dataclasses
import grp
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvsidecar.types import TOKEN_METADATA, Namespace
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.cli.command import run
from tests.e2e.policies import daemon_for_others, needs_root
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Rank, done, environment
from tests.marks import both_protocols, promise

ALICE, BOB, OPS = 41001, 41002, 41500
HERS = dataclasses.replace(NAMESPACE, model="alice/model")
HIS = dataclasses.replace(NAMESPACE, model="bob/model")
POLICY = f"""
[[policy]]
uids = [{ALICE}]
namespaces = ["alice/*"]

[[policy]]
uids = [{BOB}]
namespaces = ["bob/*"]
"""


class User:
    """A process of another user with one client."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, what: str, namespace: Namespace = NAMESPACE, name: str = "a", **more: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"what": what, "namespace": dataclasses.asdict(namespace), "name": name, **more}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@contextmanager
def user(daemon: DaemonProcess, uid: int, *groups: int, carrier: str = "local") -> Iterator[User]:
    command = [sys.executable, "-m", "tests.e2e.other_user", daemon.socket, carrier, str(uid), *map(str, groups)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        yield User(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(SECONDS) == 0


@pytest.fixture
def ruled(short_dir: Path) -> Iterator[DaemonProcess]:
    file = short_dir / "kvsidecar.toml"
    file.write_text(POLICY)
    with daemon_for_others(short_dir, "--config", str(file)) as daemon:
        yield daemon


@promise("local users named in a policy, as the kernel identifies them")
@needs_root
@pytest.mark.parametrize("carrier", ["local", "grpc"])
def test_a_user_gets_the_namespaces_of_the_policy_and_is_refused_others(ruled: DaemonProcess, carrier: str) -> None:
    with user(ruled, ALICE, carrier=carrier) as alice, user(ruled, BOB, carrier=carrier) as bob:
        assert alice.ask("attach", HERS) == "attached"
        assert alice.ask("lookup", HERS) == [0, None]
        for refused in (alice.ask("lookup", HIS), bob.ask("lookup", HERS), bob.ask("attach", HERS)):
            assert "the policy grants uid 4100" in refused
        assert ruled.refused("denied") == 3
        assert bob.ask("attach", HIS) == "attached", "after a refusal"
        # Whether the other namespace exists is not told apart.
        never = dataclasses.replace(HERS, model="alice/never")
        assert bob.ask("lookup", never).replace("never", "model") == bob.ask("lookup", HERS)


@needs_root
def test_who_attaches_over_grpc_alone_is_who_the_kernel_says_and_gets_no_more(ruled: DaemonProcess) -> None:
    with user(ruled, ALICE, carrier="grpc") as alice, user(ruled, BOB, carrier="grpc") as bob:
        assert alice.ask("attach over gRPC alone", HERS) == "registered"
        assert "the policy grants uid 41002 no namespace" in bob.ask("attach over gRPC alone", HERS)
        assert ruled.refused("denied") == 1
        assert bob.ask("attach over gRPC alone", HIS) == "registered", "after a refusal"


@needs_root
def test_a_status_shows_a_user_what_is_its_own(ruled: DaemonProcess) -> None:
    with user(ruled, ALICE) as alice, user(ruled, BOB) as bob:
        alice.ask("attach", HERS, "engine-of-alice")
        bob.ask("attach", HIS, "engine-of-bob")
        assert alice.ask("status") == [["alice/model"], ["engine-of-alice"], 0, 0, {}, True]
        assert bob.ask("status") == [["bob/model"], ["engine-of-bob"], 0, 0, {}, True]
        seen = json.loads(run("status", "--socket", ruled.socket, "--json").stdout)  # as root
        assert sorted(each["instance"] for each in seen["ranks"]) == ["engine-of-alice", "engine-of-bob"]
        assert not seen["partial"]
        code, body = ruled.get("/status")
        assert (code, body["namespaces"], body["ranks"], body["partial"]) == (200, [], [], True)
        assert (body["totals"]["ranks"], body["totals"]["attached_ranks"]) == (0, 2)
        assert [each["uuid"] for each in body["devices"]] == ["host"]
        assert "alice" not in json.dumps(body)
        metrics = ruled.get("/metrics")[1]
        assert "alice" not in metrics
        assert "kvsidecar_model_" not in metrics


@needs_root
def test_only_admins_clear_what_is_not_theirs_and_drain(ruled: DaemonProcess) -> None:
    with user(ruled, ALICE) as alice, user(ruled, BOB) as bob:
        assert alice.ask("clear", HERS) == 0
        assert bob.ask("clear", HERS).startswith("RequestDenied: the policy grants uid 41002")
        assert bob.ask("clear all").startswith("RequestDenied: only admins may clear all namespaces")
        assert bob.ask("drain").startswith("RequestDenied: only admins may drain")
        assert bob.ask("cancel drain").startswith("RequestDenied: only admins may cancel a drain")
        assert ruled.get("/ready")[0] == 200
    assert run("clear", "--all", "--yes", "--socket", ruled.socket).returncode == 0
    assert run("drain", "--socket", ruled.socket).returncode == 0
    assert ruled.get("/ready")[0] == 503


@needs_root
def test_a_lease_is_of_its_user(ruled: DaemonProcess) -> None:
    # Root stores for Alice: the policy is changed for that, and for as long.
    file = Path(ruled.socket).parent / "kvsidecar.toml"
    change_policy(ruled, file, POLICY + '[[policy]]\nuids = [0]\nnamespaces = ["alice/*"]\n')
    rank = Rank(ruled, namespace=HERS)
    done(rank.store("a"))
    with user(ruled, ALICE) as alice, user(ruled, BOB) as bob:
        hits, lease = alice.ask("lookup", HERS, lease=30)
        assert hits == 1
        assert lease
        assert bob.ask("release", lease=lease) is False
        assert "policy" in bob.ask("raw release", lease=lease)
        assert "policy" in bob.ask("raw renew", lease=lease)
        # Another's lease and one that never was: the same words, also where the block is there.
        bob.ask("attach", HIS)
        assert bob.ask("store", HIS, "b")[0] == "done"
        for name in ("a", "b"):
            assert bob.ask("load", HIS, name, lease=lease) == bob.ask("load", HIS, name, lease=2**47 + 1)
            assert bob.ask("load", HIS, name, lease=lease)[:2] == ["declined", "stale_lease"]
        assert alice.ask("release", lease=lease) is True
    rank.close()


def change_policy(daemon: DaemonProcess, file: Path, text: str) -> None:
    file.write_text(text)
    daemon.process.send_signal(signal.SIGHUP)
    assert "policy" in daemon.wait_log("settings reloaded")["changed"]


@needs_root
@both_protocols
def test_a_policy_that_takes_a_namespace_away_holds_for_who_is_attached_already(short_dir: Path, local: bool) -> None:
    file = short_dir / "kvsidecar.toml"
    file.write_text('[[policy]]\nuids = [0]\nnamespaces = ["m"]\n')
    with DaemonProcess(short_dir, "--config", str(file), "--log-level", "debug", local=local) as daemon:
        rank = Rank(daemon.wait_ready())
        done(rank.store("a"))
        change_policy(daemon, file, '[[policy]]\nuids = [0]\nnamespaces = ["other"]\n')
        refused = rank.store("b")
        assert (refused.outcome, refused.reason) == ("declined", "denied")
        assert rank.load("a", at=[1]).reason == "denied"
        with pytest.raises(Exception, match="the policy grants uid 0 no namespace"):
            rank.hits("a")
        change_policy(daemon, file, '[[policy]]\nuids = [0]\nnamespaces = ["m"]\n')
        done(rank.load("a", at=[1]))
        assert rank.hits("a") == 1
        rank.close()


@needs_root
def test_without_a_token_a_policy_gives_nothing_and_tells_how(ruled: DaemonProcess) -> None:
    with user(ruled, ALICE) as alice:
        refused = alice.ask("raw lookup", HERS)
    assert refused.startswith("UNAUTHENTICATED: this daemon has a policy")
    assert TOKEN_METADATA in refused
    assert ruled.refused("unidentified") == 1
    with grpc.insecure_channel(f"unix:{ruled.socket}") as channel:
        sidecar = pb_grpc.SidecarStub(channel)
        orders = (("Drain", pb.DrainRequest()), ("CancelDrain", pb.CancelDrainRequest()))
        for method, message in (*orders, ("Clear", pb.ClearRequest(all=True))):
            with pytest.raises(grpc.RpcError) as caught:
                getattr(sidecar, method)(message, timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            sidecar.Lookup(pb.LookupRequest(), metadata=((TOKEN_METADATA, b"guessed"),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@needs_root
def test_without_a_policy_all_may_use_all_and_operators_are_few(short_dir: Path) -> None:
    with daemon_for_others(short_dir) as daemon:
        rank = Rank(daemon, namespace=HERS)
        done(rank.store("a"))
        with user(daemon, BOB) as bob:
            assert bob.ask("lookup", HERS) == [1, None]
            assert bob.ask("raw lookup", HERS) is True
            assert bob.ask("status") == [[], [], 0, 0, {}, True]
            assert bob.ask("clear", HERS).startswith("RequestDenied: only admins may clear a namespace in which")
            assert bob.ask("drain").startswith("RequestDenied")
            assert bob.ask("cancel drain").startswith("RequestDenied")
            assert bob.ask("attach", HERS) == "attached"
            assert bob.ask("clear", HERS) == 1, "an engine may not reset its own cache"
        rank.close()


@needs_root
def test_a_member_of_the_admin_group_is_an_admin_and_a_command_says_who_is_not(short_dir: Path) -> None:
    name = "daemon"  # a group that every system has; nothing here is in it
    gid = grp.getgrnam(name).gr_gid
    with daemon_for_others(short_dir, "--admin-group", name) as daemon:
        rank = Rank(daemon)
        done(rank.store("a"))
        with user(daemon, BOB) as bob:
            assert bob.ask("clear all").startswith("RequestDenied: only admins may clear all namespaces, and uid 41002")
        with user(daemon, OPS, gid) as operator:
            assert operator.ask("status")[2] == 1
            assert operator.ask("clear all") == 1
            assert operator.ask("drain") is None
            assert operator.ask("cancel drain") is True
        rank.close()


def test_with_a_private_socket_raw_clients_are_admins_as_ever(daemon: DaemonProcess) -> None:
    rank = Rank(daemon)
    done(rank.store("a"))
    with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
        sidecar = pb_grpc.SidecarStub(channel)
        status = sidecar.Status(pb.StatusRequest(), timeout=SECONDS)
        assert (status.partial, len(status.ranks), status.pool.blocks) == (False, 1, 1)
        assert sidecar.Clear(pb.ClearRequest(all=True), timeout=SECONDS).blocks == 1
    rank.close()


@needs_root
def test_whether_a_session_has_ended_is_told_to_whoever_knows_its_number(short_dir: Path) -> None:
    """A client asks this when its connections are gone: what it may see of the list proves nothing."""
    with DaemonProcess(short_dir, "--policy", "[{uids=[0], namespaces=['*']}]") as daemon:
        rank = Rank(daemon.wait_ready())
        session = rank.client._supervisor.session
        assert session is not None
        with grpc.insecure_channel(f"unix:{daemon.socket}") as channel:
            sidecar = pb_grpc.SidecarStub(channel)
            ask = pb.StatusRequest(session=session.id)
            status = sidecar.Status(ask, timeout=SECONDS)
            assert (status.partial, list(status.ranks), status.session_ended) == (True, [], False)
            assert not sidecar.Status(pb.StatusRequest(), timeout=SECONDS).session_ended
            rank.close()
            assert sidecar.Status(ask, timeout=SECONDS).session_ended
