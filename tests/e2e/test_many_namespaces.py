"""Very many namespaces and ranks, with the longest texts that are allowed: operators see the daemon all the same."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.cli.operate.targets import LISTED
from kvsidecar.cli.status_view import SHOWN
from kvsidecar.client import HostBuffer
from kvsidecar.core.labelled_counts import LABEL_CHARACTERS, MODELS_SHOWN
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES
from kvsidecar.protocol.wire import namespace_to_wire, pack_ids
from kvsidecar.server.report import NAMESPACES_BYTES, RANKS_BYTES
from kvsidecar.types import MAX_TEXT_BYTES, PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.cli.command import run
from tests.e2e.wire import framed, hello, register, stub, welcome
from tests.harness import NAMESPACE, SECONDS, SHARD_BYTES, DaemonProcess, eventually, hashes
from tests.marks import daemon_may_open, promise

pytestmark = daemon_may_open(3000)

NAMESPACES, RANKS, LARGE = 960, 200, 3
HELLO = framed(pb.Hello(protocol=PROTOCOL, num_fds=1))


def longest(text: str) -> str:
    return text.ljust(MAX_TEXT_BYTES, "x")


def namespace(number: int) -> pb.Namespace:
    message = namespace_to_wire(NAMESPACE)
    message.model = longest(f"model-{number:03}")
    message.dtype = message.kv_layout = message.hash_algorithm = message.extra = longest("")
    return message


def model(number: int) -> str:
    return namespace(number).model


class Crowd:
    """Ranks that each store one block into a namespace of their own, the last few of them two; some stay attached."""

    def __init__(self, daemon: DaemonProcess, stack: ExitStack) -> None:
        self._daemon = daemon
        self._buffer = HostBuffer(1 << 20)
        self._sidecar = stack.enter_context(stub(daemon))
        self._streams: list[Any] = []  # gRPC cancels a stream that nobody has any more
        self._stay = threading.Event()
        stack.callback(self._stay.set)
        for number in range(NAMESPACES):
            with ExitStack() as leaving:
                self._attach(number, stack if number < RANKS else leaving)
        eventually(lambda: daemon.metric("kvsidecar_attached_ranks") == RANKS)

    def _attach(self, number: int, stack: ExitStack) -> None:
        connection = stack.enter_context(hello(self._daemon, HELLO, [self._buffer.fd]))
        first = register(welcome(connection).token, self._buffer, instance=longest(f"engine-{number:03}"))
        first.namespace.CopyFrom(namespace(number))
        count = 2 if number >= NAMESPACES - LARGE else 1
        packed = [pb.Blocks(group=0, hashes=b"".join(hashes(*range(count))), block_ids=pack_ids(list(range(count))))]
        over = self._stay if number < RANKS else threading.Event()
        requests = self._requests(first, pb.Store(job=1, blocks=packed), over)
        replies = self._sidecar.Attach(requests, timeout=20 * SECONDS)
        assert [next(replies).WhichOneof("message"), next(replies).done.copied_blocks] == ["registered", count]
        if number < RANKS:
            self._streams.append(replies)
        else:
            over.set()
            assert not list(replies)

    @staticmethod
    def _requests(first: pb.Register, store: pb.Store, over: threading.Event) -> Iterator[pb.AttachRequest]:
        yield pb.AttachRequest(register=first)
        yield pb.AttachRequest(store=store)
        over.wait()


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    directory = tempfile.mkdtemp(prefix="kvs-")
    with DaemonProcess(Path(directory), "--pool-size", "16MiB") as process, ExitStack() as stack:
        process.wait_ready()
        process.metrics_before = process.get("/metrics")[1]  # type: ignore[attr-defined]
        crowd = Crowd(process, stack)
        yield process
        del crowd
    shutil.rmtree(directory)


def printed(*arguments: str, daemon: DaemonProcess, **variables: str) -> str:
    done = run(*arguments, "--socket", daemon.socket, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def models(namespaces: list[dict[str, Any]]) -> list[str]:
    return [each["namespace"]["model"] for each in namespaces]


@promise("replies are bounded and paged, totals count everything")
def test_status_shows_the_largest_and_says_how_many_more_there_are(daemon: DaemonProcess) -> None:
    text = printed("status", daemon=daemon, COLUMNS="200")
    shown = [number for number in range(NAMESPACES) if f"model-{number:03}" in text]
    assert len(shown) == SHOWN
    assert shown[-LARGE:] == list(range(NAMESPACES - LARGE, NAMESPACES))
    assert f"and {NAMESPACES - SHOWN} more: kvsidecar status --json lists all" in text
    assert f"and {RANKS - SHOWN} more: kvsidecar engines lists all" in text
    assert len(text.splitlines()) < 3 * 2 * SHOWN, "the texts of clients fill the screen"


def test_status_as_json_has_every_namespace_and_every_rank_once(daemon: DaemonProcess) -> None:
    reply = json.loads(printed("status", "--json", daemon=daemon))
    assert models(reply["namespaces"]) == [model(number) for number in range(NAMESPACES)]
    ranks = sorted(each["instance"] for each in reply["ranks"])
    assert ranks == [longest(f"engine-{number:03}") for number in range(RANKS)]
    blocks = NAMESPACES + LARGE
    totals = {"namespaces": NAMESPACES, "blocks": blocks, "bytes": blocks * SHARD_BYTES, "ranks": RANKS}
    assert reply["totals"] == {**totals, "jobs_running": 0, "attached_ranks": RANKS}
    assert not reply["more"]


def test_engines_lists_every_rank(daemon: DaemonProcess) -> None:
    text = printed("engines", daemon=daemon, COLUMNS="200")
    assert all(f"engine-{number:03}" in text for number in range(RANKS))
    assert len(json.loads(printed("engines", "--json", daemon=daemon))) == RANKS


def test_top_shows_what_fits(daemon: DaemonProcess) -> None:
    text = printed("top", "--once", "--interval", "0.1", daemon=daemon, COLUMNS="100")
    assert "No answer" not in text
    lines = [line for line in text.splitlines() if line.startswith("engine-")]
    assert 0 < len(lines) < RANKS  # as many as one answer has
    assert all(" 0/1 " in line for line in lines), "a name has left no room for the numbers"
    assert f"and {RANKS - len(lines)} less busy: kvsidecar engines lists all" in text


def test_one_answer_is_of_bounded_size_and_pages_have_the_rest_whatever_comes_and_goes(daemon: DaemonProcess) -> None:
    with stub(daemon) as sidecar, daemon.client() as client:
        reply = sidecar.Status(pb.StatusRequest(), timeout=SECONDS)
        assert RANKS_BYTES // 2 < reply.ByteSize() < NAMESPACES_BYTES + RANKS_BYTES + 65536 < MAX_MESSAGE_BYTES
        assert [each.blocks for each in reply.namespaces[: LARGE + 1]] == [2] * LARGE + [1]
        assert not reply.more
        request = pb.StatusRequest(page=pb.StatusPage())
        page = sidecar.Status(request, timeout=SECONDS)
        assert page.more
        seen, ranks = [each.namespace.model for each in page.namespaces], len(page.ranks)
        gone = model(NAMESPACES - 100)
        assert client.clear(_namespace(gone, client)) == 1  # of those that are not attached
        while page.more:
            request.page.after_namespace.CopyFrom(page.namespaces[-1].namespace)
            if page.ranks:
                request.page.after_session = page.ranks[-1].session
            page = sidecar.Status(request, timeout=SECONDS)
            seen += [each.namespace.model for each in page.namespaces]
            ranks += len(page.ranks)
    assert seen == [model(number) for number in range(NAMESPACES) if model(number) != gone]
    assert ranks == RANKS


def _namespace(wanted: str, client: Any) -> Any:
    from kvsidecar.cli.operate.targets import find_namespace

    return find_namespace(wanted, client.status(everything=True))


def test_status_over_http_is_bounded_and_metrics_have_labels_for_a_few_models(daemon: DaemonProcess) -> None:
    code, body = daemon.get("/status")
    assert code == 200
    assert len(json.dumps(body)) < MAX_MESSAGE_BYTES
    assert len(body["namespaces"]) < body["totals"]["namespaces"]
    code, metrics = daemon.get("/metrics")
    assert code == 200

    def series(text: str) -> list[str]:
        return [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]

    new = set(series(metrics)) - set(series(daemon.metrics_before))  # type: ignore[attr-defined]
    of_models = {each for each in new if each.startswith("kvsidecar_model_")}
    assert new - of_models == {'kvsidecar_imported_gpu_bytes{device="host"}'}
    used = {each for each in of_models if each.startswith("kvsidecar_model_used_bytes")}
    assert len(used) == MODELS_SHOWN
    assert len(of_models) == 10 * MODELS_SHOWN
    assert max(map(len, of_models)) < 3 * LABEL_CHARACTERS
    shown = sum(map(daemon.metric, used))
    pool = daemon.metric("kvsidecar_pool_used_bytes")
    assert 0 < daemon.metric('kvsidecar_model_used_bytes{model="other"}') == pool - shown


def test_an_unknown_namespace_is_refused_with_some_of_those_there_are(daemon: DaemonProcess) -> None:
    refused = run("clear", "--namespace", "nobody's", "--socket", daemon.socket)
    assert refused.returncode == 1
    assert refused.stderr.count("model-") == LISTED
    assert "more: kvsidecar status --json lists all" in refused.stderr


def test_a_namespace_that_one_answer_has_no_room_for_is_cleared_by_its_model(daemon: DaemonProcess) -> None:
    with stub(daemon) as sidecar:
        known = {each.namespace.model for each in sidecar.Status(pb.StatusRequest(), timeout=SECONDS).namespaces}
    far = next(model(number) for number in reversed(range(NAMESPACES - 100)) if model(number) not in known)
    assert printed("clear", "--namespace", far, daemon=daemon) == "1 block cleared.\n"


def test_all_are_cleared_and_the_question_counts_them_all(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        totals = client.status().totals
    asked = run("clear", "--all", "--socket", daemon.socket)
    assert asked.returncode == 1  # nobody answers
    assert f"Clear all {totals.blocks} blocks" in asked.stdout
    assert f"in {totals.namespaces} namespaces" in asked.stdout
    assert printed("clear", "--all", "--yes", daemon=daemon) == f"{totals.blocks:,} blocks cleared.\n"
    with daemon.client() as client:
        assert client.status().totals.namespaces == RANKS  # these are attached
