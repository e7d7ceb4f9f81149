"""What routers hear of a real engine's blocks from `kvsidecar publish`, and what from the engine itself then."""

from __future__ import annotations

from pathlib import Path

from tests.harness import SECONDS, DaemonProcess, eventually
from tests.publisher.process import PublisherProcess
from tests.router import Subscriber as Router
from tests.vllm.conftest import POOL
from tests.vllm.engine import EngineProcess, join, kvsidecar, prompt
from tests.vllm.subscriber import FEW, OWN_PROCESS, Subscriber, events_of, whole_blocks


def test_the_publisher_names_an_engines_blocks_as_the_engine_does_and_outlives_it(model: str, short_dir: Path) -> None:
    path = f"{short_dir}/engine.events"
    with DaemonProcess(short_dir, *POOL) as daemon:
        options = {**FEW, "kv_events_config": events_of(path), "served_model_name": "chat"}
        transfer = kvsidecar(daemon.wait_ready().socket, publisher=True)
        with (
            PublisherProcess(short_dir, daemon.socket) as publisher,
            Router(publisher.path, None) as router,
            Subscriber(path) as of_engine,
            EngineProcess(model, transfer, OWN_PROCESS, **options) as engine,
        ):
            engine.wait_started()
            join(engine, daemon)
            first = prompt("first", 600)
            engine.generate(first)
            chain = whole_blocks(first)
            eventually(lambda: chain <= set(router.cpu().values()), "the tokens are not those of the prompt")
            assert router.topics == {"kv@n1@chat"}

            # They have the names that the engine has given them, which tells nothing of them itself.
            eventually(lambda: set(router.cpu().items()) & set(of_engine.gpu().items()))
            named = {tokens: name for name, tokens in router.cpu().items()}
            while len(of_engine.removed("GPU")) < len(chain):
                engine.generate(prompt(of_engine.batches, 600), tokens=1)
            assert {named[tokens] for tokens in chain} & set(of_engine.removed("GPU"))
            assert of_engine.cpu() == {}
            (answer,) = engine.generate(first)
            assert answer.cached >= 512, "a test without hits"
            engine.process.kill()
            engine.process.wait(SECONDS)
            with Router(publisher.path, None) as late:
                eventually(lambda: chain <= set(late.cpu().values()), "it does not outlive the engine")
                late.check()
            router.check()
