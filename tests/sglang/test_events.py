"""What routers hear of pages in the daemon: from every engine of the node, whichever has stored them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sglang.srt.disaggregation.kv_events import KVEventBatch

from kvsidecar.client import Namespace
from tests.e2e.watcher import Watcher
from tests.harness import DaemonProcess, eventually
from tests.publisher.process import PublisherProcess
from tests.router import Subscriber
from tests.sglang.conftest import POOL
from tests.sglang.engine import PAGE, SGLangProcess, attach, forgotten, join, linker, stored
from tests.vllm.engine import LONG, Prompt, blocks, prompt


def pages(what: Prompt) -> set[tuple[int, ...]]:
    return {tuple(what.ids[i : i + PAGE]) for i in range(0, len(what.ids) // PAGE * PAGE, PAGE)}


class Node:
    """Two engines at one daemon's socket, and a router for each. A third router listens to `kvsidecar publish`."""

    def __init__(self, model: str, home: Path, logs: Path, stack: ExitStack) -> None:
        self.home, self.socket = home, str(home / "kvs.sock")
        self.routers, self.engines = [], []
        for name in ("a", "b"):
            path = f"{home}/{name}.events"
            self.routers.append(stack.enter_context(Subscriber(path, KVEventBatch, "CPU_PINNED")))
            events = json.dumps({"publisher": "zmq", "endpoint": f"ipc://{path}"})
            self.engines.append(
                stack.enter_context(
                    SGLangProcess(model, linker(self.socket), logs / f"{name}.log", kv_events_config=events)
                )
            )
        publisher = stack.enter_context(PublisherProcess(home, self.socket))
        self.routers.append(stack.enter_context(Subscriber(publisher.path, None, "CPU_PINNED")))
        for each in self.engines:
            each.wait_started()

    def agree(self, daemon: DaemonProcess) -> set[int]:
        """Wait until every router believes in all that the daemon says that it holds with its whole prefix, as a hit
        needs it, and in nothing that it does not hold. Returns the former."""
        (namespace,) = [Namespace(**each["namespace"]) for each in daemon.get("/status")[1]["namespaces"]]
        watcher = Watcher(daemon, namespace)

        def held() -> set[int]:
            return {int.from_bytes(each[:8], "big", signed=True) for each in watcher.read()}

        def reachable() -> set[int]:
            there, parents = held(), {key: value for router in self.routers for key, value in router.parents().items()}

            def has_prefix(page: int) -> bool:
                return page in there and ((parent := parents.get(page)) is None or has_prefix(parent))

            return {each for each in there if has_prefix(each)}

        def agreed() -> bool:
            return all(reachable() <= set(router.cpu()) <= held() for router in self.routers)

        def why() -> str:
            known = [len(router.cpu()) for router in self.routers]
            return f"they know {known} of {len(held())}, {len(reachable())} reachable ones"

        eventually(agreed, why)
        found = reachable()
        watcher.close()
        return found


@pytest.fixture(scope="module")
def node(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    home = Path(tempfile.mkdtemp(prefix="kvs-"))
    with ExitStack() as stack:
        yield Node(model, home, tmp_path_factory.mktemp("engines"), stack)
    shutil.rmtree(home)


def test_every_engine_announces_what_one_stores_and_hears_what_becomes_of_it(node: Node, pool_dir: Path) -> None:
    kept = (*POOL, "--pool-dir", str(pool_dir))
    storing, other = node.engines
    first, second, _ = node.routers
    with DaemonProcess(node.home, *kept) as daemon:
        join(storing, daemon.wait_ready())
        attach(other, daemon)
        stored(storing, daemon, LONG)
        eventually(lambda: pages(LONG) <= set(second.cpu().values()), "the tokens are not those of the prompt")
        before = node.agree(daemon)

        # SGLang forgets all, and says so: what the daemon has is announced again.
        storing.forget()
        assert node.agree(daemon) == before

        # The daemon evicts.
        total = 0
        while not second.removed("CPU_PINNED"):
            assert total <= 2 * blocks(daemon), "what is evicted is not heard"
            short = prompt(total, 700)
            storing.ask(short, tokens=1)
            eventually(lambda: pages(short) <= set(second.cpu().values()), "all is stored")  # noqa: B023
            storing.forget()
            total += len(pages(short))
        node.agree(daemon)

        # It dies, and forgets nothing.
        daemon.process.kill()
        daemon.process.wait()
        eventually(lambda: not first.cpu() and not second.cpu(), "the daemon is gone")
    with DaemonProcess(node.home, *kept) as daemon:
        attach(storing, daemon.wait_ready())
        attach(other, daemon)
        assert len(node.agree(daemon)) > len(pages(LONG))
    for each in node.routers:
        eventually(lambda each=each: not each.cpu(), "the daemon is gone")  # type: ignore[misc]

    # All that it had is lost.
    with DaemonProcess(node.home, *POOL) as daemon:
        join(other, daemon.wait_ready())
        attach(storing, daemon)
        node.agree(daemon)
        stored(other, daemon, LONG)
        eventually(lambda: pages(LONG) <= set(first.cpu().values()), "it is stored again")
        node.agree(daemon)
        # A hit brings the pages back to the GPU, and they stay in the daemon.
        forgotten(storing, daemon, LONG)
        assert storing.ask(LONG).host
        eventually(lambda: pages(LONG) <= set(first.gpu().values()), "they are on the GPU")
        node.agree(daemon)
    for each in node.routers:
        each.check()


def test_pages_of_requests_with_a_salt_are_not_announced(node: Node) -> None:
    """Their events name other hashes than the pages have."""
    storing, _ = node.engines
    with DaemonProcess(node.home, *POOL) as daemon:
        join(storing, daemon.wait_ready())
        node.agree(daemon)
        before, salted = blocks(daemon), Prompt(LONG.ids, "salt")
        storing.ask(salted)
        eventually(lambda: blocks(daemon) >= before + len(LONG.ids) // PAGE, "it is stored")
        storing.forget()
        plain = prompt("plain", 100)
        stored(storing, daemon, plain)
        for router in node.routers:
            eventually(lambda router=router: pages(plain) <= set(router.cpu().values()), "it is announced")  # type: ignore[misc]
            assert not pages(LONG) & set(router.cpu().values())
            router.check()


def test_new_weights_are_announced_anew(node: Node, other_weights: str) -> None:
    storing, other = node.engines
    first, second, _ = node.routers
    with DaemonProcess(node.home, *POOL) as daemon:
        join(storing, daemon.wait_ready())
        attach(other, daemon)
        stored(storing, daemon, LONG)
        eventually(lambda: pages(LONG) <= set(first.cpu().values()), "it is announced")
        storing.update(other_weights, "new")
        eventually(lambda: not first.cpu(), "what is of the old weights")
        assert pages(LONG) <= set(second.cpu().values()), "the other engine still has the old ones"
        stored(storing, daemon, LONG)
        eventually(lambda: pages(LONG) <= set(first.cpu().values()), "it is announced, of the new weights")
        first.check()
