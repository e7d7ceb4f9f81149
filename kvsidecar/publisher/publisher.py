"""Follows the daemon's namespaces and publishes their events over ZeroMQ, in vLLM's wire format.

When a router subscribes, all of them forget what they know of this publisher and hear everything again: it may come
back believing in blocks that are gone. A router that has missed messages can ask for them where ``replay`` is served;
if they are not kept any more, everything is announced again, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase

from kvsidecar.client import Client, ClientError, Namespace
from kvsidecar.protocol.wire import namespace_from_wire
from kvsidecar.publisher import zmtp
from kvsidecar.publisher.endpoint import SILENCE_SECONDS, Endpoint, RouterConnection, both, frames
from kvsidecar.publisher.engine_dialects import Event
from kvsidecar.publisher.events import Topic
from kvsidecar.publisher.follower import Follower, keep_below
from kvsidecar.publisher.http import MetricsServer
from kvsidecar.publisher.metrics import PublisherMetrics, Reason, RouterRefused
from kvsidecar.publisher.options import PublisherOptions
from kvsidecar.publisher.sequence import END, Sequence
from kvsidecar.support import free_memory, log
from kvsidecar.v1 import sidecar_pb2 as pb

_log = log.get("publish")
_caused = log.limited("publish")
"""Rate-limited logger for what routers and tenants cause."""

LOOK_SECONDS = 1.0
"""Interval at which the daemon is asked for its namespaces."""
MAX_FOLLOWED = 64
"""Most namespaces that are followed, the largest first: each takes two threads."""
AGAIN_SECONDS = 5.0
"""Least time between two announcements of everything."""
REPEAT_SECONDS = 0.05
"""Interval of the checks whether everything has been announced again."""
MESSAGE_BLOCKS = 512
"""About how many blocks fill a message: 50 KB with 16 tokens each."""
MESSAGE_TOKENS = 16 * 1024
"""About how many tokens fill a message: 80 KB at most, with one event more."""
MAX_KNOWN_BYTES = 128 * 1024 * 1024
"""Memory for blocks that are announced, or may be with the next daemon, in all namespaces: see `KnownBlocks.nbytes`."""
REPLAY_SECONDS = 10.0
"""A router that does not read a message of a replay within this time is disconnected."""
MAX_REPLAYS = 4
"""Most replays that one router has requested and not received yet."""


class Publisher:
    """Binds its sockets in the constructor; `run` publishes, until it is cancelled; then `close`.

    Raises:
        AddressUnavailable: an address is in use or does not exist here.
        ConfigError: an endpoint is invalid.
    """

    def __init__(self, options: PublisherOptions) -> None:
        self._options = options
        self._sequence = Sequence()
        self._topics: dict[str, Topic] = {}
        self._followed: dict[Namespace, _Followed] = {}
        self._ending: list[_Followed] = []
        self._news = asyncio.Event()
        self._again = asyncio.Event()
        self._problem = ""
        """Why the namespaces are not known, as last logged."""
        self._left_out = 0
        """How many namespaces were too many to follow at the last look."""
        self._more = asyncio.Event()
        """Set, and replaced, when a message is added to the sequence."""
        self.metrics = PublisherMetrics()
        self._out = Endpoint("bind", options.bind, b"XPUB", self._serve_subscriber, self.metrics)
        self._endpoints = [self._out]
        try:
            if options.replay is not None:
                served = Endpoint("replay", options.replay, b"ROUTER", self._serve_replays, self.metrics)
                self._endpoints.append(served)
        except BaseException:
            self._out.close()
            raise
        self._operator = Client(options.socket, name="kvsidecar publish")
        self.metrics.read_gauges_from(
            followed_namespaces=lambda: len(self._followed),
            left_out_namespaces=lambda: self._left_out,
            announced_blocks=lambda: sum(map(len, self._topics.values())),
            kept_bytes=lambda: self._sequence.nbytes,
            known_bytes=lambda: self._known_bytes,
        )

    @property
    def endpoints(self) -> list[str]:
        """The addresses at which it is bound."""
        return [each.address for each in self._endpoints]

    async def run(self) -> None:
        """Raises AddressUnavailable, ConfigError: the metrics cannot be served."""
        http = MetricsServer(self.metrics)
        try:
            if (address := self._options.metrics_address) is not None:
                await http.start(address)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._look())
                group.create_task(self._say_again())
                group.create_task(self._publish())
                for each in self._endpoints:
                    group.create_task(each.run())
        finally:
            await http.stop()

    def close(self) -> None:
        """May be called more than once."""
        for each in (*self._followed.values(), *self._ending):
            each.client.close()
        self._operator.close()
        for endpoint in self._endpoints:
            endpoint.close()

    # -- namespaces --------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        remembered = free_memory.Peak()
        while True:
            try:
                reply = await asyncio.to_thread(self._operator.status)
            except ClientError as error:
                self._say_problem(str(error))
            else:
                self._say_problem("")
                self._follow(reply)
            await remembered.used(self._known_bytes + self._sequence.nbytes)
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def _known_bytes(self) -> int:
        return sum(each.follower.known_bytes for each in [*self._followed.values(), *self._ending])

    def _say_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            if problem:
                _log.warning("the daemon has not reported its namespaces; asking again", error=problem)
            else:
                _log.info("the daemon answers again")

    def _say_left_out(self, count: int) -> None:
        if count > 0 and not self._left_out:
            _log.warning(
                "too many namespaces: the smallest are not announced to routers", followed=MAX_FOLLOWED, others=count
            )
        self._left_out = max(0, count)

    def _follow(self, reply: pb.StatusReply) -> None:
        names = names_of(reply, {namespace: each.name for namespace, each in self._followed.items()})
        found = [each for each in names if self._wants(each, names[each])]
        is_all = reply.totals.namespaces <= len(reply.namespaces)
        gone = [each for each in self._followed if is_all and each not in found]
        # What was announced under the old name is retracted, and announced again under the new one.
        renamed = [each for each in found if each in self._followed and self._followed[each].name != names[each]]
        for namespace in gone + renamed:
            ended = self._followed.pop(namespace)
            ended.follower.end()
            self._ending.append(ended)
            self._news.set()
        new = [each for each in found if each not in self._followed]
        room = MAX_FOLLOWED - len(self._followed)
        self._say_left_out(len(new) - max(0, room))
        for namespace in new[: max(0, room)]:
            name, client = names[namespace], self._watch(namespace)
            topic = self._topic(self._options.topic_of(name))
            follower = Follower(namespace.hash_bytes, client, topic)
            self._followed[namespace] = _Followed(namespace, name, client, follower)
            _caused.info("namespace followed", model=namespace.model, topic=topic.name)

    def _wants(self, namespace: Namespace, name: str) -> bool:
        models = (name, namespace.model)
        patterns = self._options.models
        return not patterns or any(fnmatchcase(model, each) for model in models for each in patterns)

    def _topic(self, name: str) -> Topic:
        if name not in self._topics:
            self._topics[name] = Topic(name, self._options.ownership)
        return self._topics[name]

    def _watch(self, namespace: Namespace) -> Client:
        loop = asyncio.get_running_loop()

        def on_news() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._news.set)

        client = Client(self._options.socket, name="kvsidecar publish")
        client.watch(namespace, on_news)
        return client

    # -- events ------------------------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while True:
                everything = [*self._followed.values(), *self._ending]
                for each in everything:
                    if each.follower.topic.backlog < MESSAGE_BLOCKS:
                        each.follower.step()
                keep_below([each.follower for each in everything], MAX_KNOWN_BYTES)
                await self._send_events()
                await self._attend(everything)
                pending = any(each.follower.pending for each in everything)
                if not pending and not any(each.pending for each in self._topics.values()):
                    break

    async def _attend(self, everything: list[_Followed]) -> None:
        """Watch again where that is needed, and forget what has ended."""
        for each in everything:
            if each.follower.needs_snapshot:
                old, each.client = each.client, self._watch(each.namespace)
                each.follower.watch_again(each.client)
                await asyncio.to_thread(old.close)
        for each in [each for each in self._ending if not each.follower.pending]:
            self._ending.remove(each)
            each.follower.release()
            await asyncio.to_thread(each.client.close)
            _caused.info("namespace gone", model=each.namespace.model)
        # A topic that is no longer used is forgotten when all its events are sent: clients name models.
        for topic in [each for each in self._topics.values() if not each.pending]:
            used = any(each.follower.topic is topic for each in [*self._followed.values(), *self._ending])
            if not used:
                del self._topics[topic.name]

    async def _send_events(self) -> None:
        for topic in list(self._topics.values()):
            for events in in_messages(topic.take(MESSAGE_BLOCKS)):
                self._sequence.add(topic.name, events, time.time())
                self.metrics.messages.inc()
                more, self._more = self._more, asyncio.Event()
                more.set()
                await asyncio.sleep(0)  # each router may be sent this one

    # -- routers -----------------------------------------------------------------------------------------------------

    async def _say_again(self) -> None:
        while True:
            await self._again.wait()
            self._again.clear()
            # Else routers that come again and again would let nobody hear the end.
            while any(topic.repeats for topic in self._topics.values()):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(REPEAT_SECONDS)
            for topic in self._topics.values():
                topic.say_again()
            self.metrics.repeats.inc()
            self._news.set()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _serve_subscriber(self, connection: RouterConnection) -> None:
        def hear(frame: zmtp.Frame) -> None:
            name, topic = zmtp.split_command(frame.body) if frame.is_command else (b"", frame.body[1:])
            if name == b"SUBSCRIBE" or (not name and frame.body[:1] == b"\x01"):
                connection.subscribe(topic)
                if self._topics:
                    self._again.set()
            elif name == b"CANCEL" or (not name and frame.body[:1] == b"\x00"):
                connection.unsubscribe(topic)

        await both(frames(connection, hear), self._send_all(connection))

    async def _send_all(self, connection: RouterConnection) -> None:
        """Send every message from now on. A router that falls behind what is kept misses some."""
        first = self._sequence.next
        while True:
            more = self._more
            for message in self._sequence.since(first):
                first = int.from_bytes(message[1], "big") + 1
                if connection.wants(message[0]):
                    await connection.send(zmtp.message(message), SILENCE_SECONDS)
            if first >= self._sequence.next:
                await more.wait()

    async def _serve_replays(self, connection: RouterConnection) -> None:
        wanted: asyncio.Queue[int] = asyncio.Queue()
        parts: list[bytes] = []

        def hear(frame: zmtp.Frame) -> None:
            if frame.is_command:
                return
            parts.append(frame.body if len(parts) < 3 else b"")
            del parts[3:]
            if frame.more:
                return
            is_request = len(parts) == 2 and parts[0] == b"" and len(parts[1]) == 8
            if is_request and wanted.qsize() >= MAX_REPLAYS:
                raise RouterRefused(Reason.REPLAYS, f"more than {MAX_REPLAYS} replays are requested at once")
            if is_request:
                wanted.put_nowait(int.from_bytes(parts[1], "big"))
            else:
                self._endpoints[-1].refuse(Reason.NO_REQUEST, "a replay is asked for with 8 bytes: this is ignored")
            parts.clear()

        await both(frames(connection, hear), self._replay(connection, wanted))

    async def _replay(self, connection: RouterConnection, wanted: asyncio.Queue[int]) -> None:
        while True:
            first = await wanted.get()
            kept = self._sequence.has(first)
            self.metrics.replays.labels("kept" if kept else "lost").inc()
            if not kept:
                _caused.info(
                    "a router has missed messages that are no longer kept: everything is announced again", first=first
                )
                self._again.set()
            for message in self._sequence.since(first):
                await connection.send(zmtp.message((b"", *message)), REPLAY_SECONDS)
            await connection.send(zmtp.message((b"", b"", END, b"")), REPLAY_SECONDS)


class _Followed:
    def __init__(self, namespace: Namespace, name: str, client: Client, follower: Follower) -> None:
        self.namespace, self.name, self.client, self.follower = namespace, name, client, follower


def names_of(reply: pb.StatusReply, known: Mapping[Namespace, str]) -> dict[Namespace, str]:
    """The name under which requests address each namespace's model. Where no engine has reported it, as after a restart
    of the daemon, it is the last known one, or else that of the weights."""
    served: dict[Namespace, str] = {}
    said = [(each.namespace, each.served_name) for each in reply.namespaces]
    for message, name in said + [(each.namespace, each.served_name) for each in reply.ranks]:
        namespace = namespace_from_wire(message)
        served[namespace] = served.get(namespace) or name
    return {each: name or known.get(each, each.model) for each, name in served.items()}


def in_messages(events: list[Event]) -> Iterator[list[Event]]:
    """Split events into messages of about `MESSAGE_BLOCKS` and `MESSAGE_TOKENS`."""
    piece: list[Event] = []
    blocks = tokens = 0
    for event in events:
        piece.append(event)
        blocks += len(event.get("block_hashes", ()))
        tokens += len(event.get("token_ids", ()))
        if blocks >= MESSAGE_BLOCKS or tokens >= MESSAGE_TOKENS:
            yield piece
            piece, blocks, tokens = [], 0, 0
    if piece:
        yield piece
