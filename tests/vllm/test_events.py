"""What routers hear of blocks in the daemon: from every engine of the node, whichever has stored them, and asleep or
not."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvsidecar.client import Client, Namespace
from kvsidecar.support import child_process
from tests.e2e.watcher import Watcher
from tests.harness import SECONDS, DaemonProcess, eventually
from tests.vllm.conftest import POOL, SOON_FULL
from tests.vllm.engine import EngineProcess, Prompt, join, kvsidecar, prompt
from tests.vllm.subscriber import FEW, OWN_PROCESS, Subscriber, events_of, whole_blocks


@contextmanager
def two_engines(model: str, socket: str, directory: Path) -> Iterator[tuple[list[EngineProcess], list[Subscriber]]]:
    with ExitStack() as stack:
        engines, routers = [], []
        for name in ("a", "b"):
            path = f"{directory}/{name}.events"
            routers.append(stack.enter_context(Subscriber(path)))
            options = {**FEW, "kv_events_config": events_of(path)}
            transfer = kvsidecar(socket, instance=name)
            engines.append(stack.enter_context(EngineProcess(model, transfer, OWN_PROCESS, **options)))
        for engine in engines:
            engine.wait_started()
        yield engines, routers


class Held:
    """What the daemon itself says that it holds, and routers who should know."""

    def __init__(self, daemon: DaemonProcess, namespace: Namespace, routers: list[Subscriber]) -> None:
        self._watcher = Watcher(daemon, namespace)
        self._routers = routers

    def blocks(self) -> set[int]:
        return {int(maybe_convert_block_hash(each)) for each in self._watcher.read()}

    def reachable(self) -> set[int]:
        """Those whose whole prefix is held, too: a hit needs it."""
        held, parents = self.blocks(), self._routers[0].parents()

        def has_prefix(block: int) -> bool:
            return block in held and ((parent := parents.get(block)) is None or has_prefix(parent))

        return {each for each in held if has_prefix(each)}

    def known_to_all(self) -> set[int]:
        """Wait until every router believes in all reachable blocks, and in none that is not held."""

        def agreed() -> bool:
            held, reachable = self.blocks(), self.reachable()
            return all(reachable <= set(router.cpu()) <= held for router in self._routers)

        def why() -> str:
            known = [len(router.cpu()) for router in self._routers]
            return f"they know {known} of {len(self.blocks())}, {len(self.reachable())} reachable ones"

        eventually(agreed, why)
        return self.reachable()

    def close(self) -> None:
        self._watcher.close()


def evict_from_pool(storing: EngineProcess, daemon: DaemonProcess, routers: list[Subscriber]) -> None:
    """Prompts, each wholly stored before the next, until all routers have heard what they evict."""
    stored = 0
    for number in itertools.count():
        if all(router.removed("CPU") for router in routers):
            return
        assert stored <= 2 * daemon.get("/status")[1]["pool"]["blocks"], "what is evicted is not heard"
        short = prompt(number, 600)
        chain = whole_blocks(short)
        storing.generate(short, tokens=1)
        for router in routers:
            eventually(lambda router=router: chain <= set(router.cpu().values()), "all is stored")  # type: ignore[misc]  # noqa: B023
        stored += len(chain)


def wait_all_stored(last: Prompt, router: Subscriber, before: set[int], held: Held) -> None:
    """Wait until the daemon has all that an engine has computed and still has on its GPU: it stores what has waited for
    a daemon a few blocks at a time, and what it stores behind a clear stays.

    Args:
        last: what it was asked last.
        before: blocks that its router had heard of until then.
    """
    eventually(lambda: whole_blocks(last) <= set(router.gpu().values()), "the router has heard of the last prompt")
    eventually(lambda: set(router.gpu()) - before <= held.blocks(), "what has waited for a daemon is stored")


def test_every_engine_of_the_node_announces_what_one_stores_and_hears_what_becomes_of_it(
    model: str, short_dir: Path, pool_dir: Path
) -> None:
    kept = (*POOL, "--pool-dir", str(pool_dir))
    with DaemonProcess(short_dir, *kept) as daemon, two_engines(model, daemon.wait_ready().socket, short_dir) as both:
        (storing, other), routers = both
        for engine, router in zip((storing, other), routers, strict=True):
            join(engine, daemon)
            eventually(lambda router=router: router.batches, "the first events")  # type: ignore[misc]
        first, second = prompt("first", 600), prompt("second", 600)
        storing.generate(first)
        chain = whole_blocks(first)
        eventually(lambda: chain <= set(routers[1].cpu().values()), "the tokens are not those of the prompt")
        (namespace,) = [Namespace(**each) for each in namespaces(daemon)]
        held = Held(daemon, namespace, routers)
        known = held.known_to_all()
        assert len(known) >= len(chain)

        # The GPU evicts, and the daemon has it.
        storing.generate(second)
        (answer,) = storing.generate(first)
        assert answer.cached >= 512
        assert set(routers[0].removed("GPU")) & known, "nothing was evicted from the GPU"
        assert known <= held.known_to_all()

        # The daemon evicts.
        evict_from_pool(storing, daemon, routers)
        left = held.known_to_all()
        assert left, "a test without blocks"
        assert not chain & set(routers[1].gpu().values()), "the other engine has computed it"

        # It is killed, and comes back with its blocks, and then without.
        daemon.process.kill()
        daemon.process.wait(SECONDS)
        eventually(lambda: not any(router.cpu() for router in routers), "they are removed")
        with DaemonProcess(short_dir, *kept) as warm:
            warm.wait_ready()
            eventually(held.blocks, "it has kept some")
            assert held.known_to_all() <= left  # the self-test may take the place of one
            warm.process.kill()
            warm.process.wait(SECONDS)
        shutil.rmtree(pool_dir)
        before = set(routers[0].parents())
        for number in range(13):  # more blocks than are stored at a time
            storing.generate(prompt(f"waits {number}", 33), tokens=1)
        with DaemonProcess(short_dir, *POOL) as cold:
            last = join(storing, cold.wait_ready())
            eventually(held.blocks, "it stores again")
            wait_all_stored(last, routers[0], before, held)
            assert not held.known_to_all() & left
            with Client(cold.socket) as operator:
                operator.clear()
            eventually(lambda: not any(router.cpu() for router in routers), "they are removed")
            held.close()
        for router in routers:
            router.check()


def test_every_engine_announces_what_moves_to_the_disk_of_the_node(model: str, short_dir: Path) -> None:
    disk = ("--disk-dir", str(short_dir / "disk"), "--disk-size", "64MiB", "--disk-admission", "all")
    with DaemonProcess(short_dir, *SOON_FULL, *disk) as daemon, two_engines(model, daemon.socket, short_dir) as both:
        daemon.wait_ready().wait_log("tier on")
        (storing, other), routers = both
        for engine, router in zip((storing, other), routers, strict=True):
            join(engine, daemon)
            eventually(lambda router=router: router.batches, "the first events")  # type: ignore[misc]
        first = prompt("first", 600)
        storing.generate(first)
        chain = whole_blocks(first)

        def on_disk(router: Subscriber) -> bool:
            return chain <= set(router.disk().values())

        eventually(lambda: all(map(on_disk, routers)), "the disk's blocks are announced with their tokens")
        evict_from_pool(storing, daemon, routers)
        assert all(map(on_disk, routers)), "what the pool has evicted is still on the disk"
        daemon.process.kill()
        daemon.process.wait(SECONDS)
        eventually(lambda: not any(router.cpu() or router.disk() for router in routers), "they are removed")
        with DaemonProcess(short_dir, *SOON_FULL, *disk) as cold:
            cold.wait_ready().wait_log("tier on")
            eventually(lambda: all(map(on_disk, routers)), "the next daemon has the disk's")
            with Client(cold.socket) as operator:
                operator.clear()
            eventually(lambda: not any(chain & set(router.disk().values()) for router in routers), "it is removed")
        for router in routers:
            router.check()


DYNAMO = os.environ.get("TEST_DYNAMO")
"""A Python with ``ai-dynamo-runtime``, whose dependencies are not those of an engine."""


class Indexer:
    """Dynamo's own, in a process of its own, of some engines. It serves HTTP on all interfaces of its network
    namespace."""

    def __init__(self, *paths: str) -> None:
        assert DYNAMO is not None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        workers = ",".join(f"{number}=ipc://{path}" for number, path in enumerate(paths, 1))
        flags = ["--block-size", "32", "--port", str(self._port), "--workers", workers]
        self._process = child_process.start(
            [DYNAMO, "-m", "dynamo.indexer", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._http = f"http://127.0.0.1:{self._port}"

    def tokens(self, ids: tuple[int, ...]) -> dict[str, tuple[int, int]]:
        """By engine: how many tokens of this prompt it has on the GPU, and there or in host memory."""
        body = json.dumps({"token_ids": ids, "model_name": "default"}).encode()
        request = urllib.request.Request(self._http + "/query", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as reply:
                found = json.load(reply)["instances"]
        except (urllib.error.URLError, ConnectionError):
            return {}
        return {name: (each["gpu"], each["cpu"]) for name, each in found.items()}

    def holdings(self) -> dict[str, int]:
        """Blocks by engine and tier, for the text of a failure."""
        try:
            with urllib.request.urlopen(self._http + "/dump", timeout=SECONDS) as reply:
                events = [each for group in json.load(reply).values() for each in group["events"]]
        except (urllib.error.URLError, ConnectionError):
            return {}
        return Counter(f"{each['worker_id']} {each['storage_tier']}" for each in events)

    def __enter__(self) -> Indexer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.skipif(DYNAMO is None, reason="TEST_DYNAMO names no Python with ai-dynamo-runtime (see docs/vllm.md)")
def test_dynamos_indexer_scores_both_engines_of_a_node(model: str, short_dir: Path, daemon: DaemonProcess) -> None:
    with (
        two_engines(model, daemon.socket, short_dir) as ((storing, other), routers),
        Indexer(f"{short_dir}/a.events", f"{short_dir}/b.events") as indexer,  # it does not wait for who listens later
    ):

        def heard() -> bool:
            join(storing, daemon)
            join(other, daemon)
            return {each.split()[0] for each in indexer.holdings()} == {"1", "2"}

        eventually(heard, "the indexer hears both engines")
        first = prompt("first", 600)
        storing.generate(first)
        eventually(
            lambda: indexer.tokens(first.ids) == {"1": (576, 576), "2": (0, 576)},
            lambda: (indexer.tokens(first.ids), indexer.holdings(), [len(each.cpu()) for each in routers]),
        )
        other.generate(first + [1] * 40)
        eventually(lambda: indexer.tokens(first.ids).get("2") == (576, 576), lambda: indexer.tokens(first.ids))
        with Client(daemon.socket) as operator:
            operator.clear()
        for router in routers:
            eventually(lambda router=router: not router.cpu(), "removed")  # type: ignore[misc]
        storing.generate(prompt("second", 900))  # takes the GPU's blocks
        eventually(lambda: indexer.tokens(first.ids).get("1", (0, 0))[0] < 576, lambda: indexer.tokens(first.ids))


def namespaces(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return [each["namespace"] for each in daemon.get("/status")[1]["namespaces"]]
