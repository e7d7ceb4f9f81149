"""Follows the daemon's namespaces and publishes their events over ZeroMQ, in vLLM's wire format.

When a router subscribes, all of them forget what they know of this publisher and hear everything again: it may come
back with blocks in mind that are gone. A router that has missed messages can ask for them where ``replay`` is served;
if they are not kept any more, everything is said again, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase

import zmq
import zmq.asyncio

from kvsidecar.client import Client, ClientError, Namespace
from kvsidecar.errors import AddressUnavailable, ConfigError
from kvsidecar.protocol.wire import namespace_from_wire
from kvsidecar.publisher.follower import Follower, keep_below
from kvsidecar.publisher.options import Options
from kvsidecar.publisher.sequence import END, Sequence
from kvsidecar.publisher.topic import Event, Topic
from kvsidecar.support import log
from kvsidecar.v1 import sidecar_pb2 as pb

_log = log.get("publish")

LOOK_SECONDS = 1.0
"""Between looks at which namespaces there are."""
MAX_FOLLOWED = 64
"""Namespaces, the largest first: each takes two threads."""
AGAIN_SECONDS = 5.0
"""Everything is said again at most so often."""
REPEAT_SECONDS = 0.05
"""Between looks at whether that is done."""
MESSAGE_BLOCKS = 512
"""Blocks in one message, about: 50 KB with 16 tokens each."""
MESSAGE_TOKENS = 16 * 1024
"""The same in tokens: 80 KB at most, with an event more."""
MAX_KNOWN_BYTES = 128 * 1024 * 1024
"""Of blocks that are announced, or may be with the next daemon, in all namespaces: see `KnownBlocks.nbytes`."""
MAX_WAITING = 1000
"""Messages for a subscriber that does not read; it loses what is more."""
SILENCE_MS = 30_000
"""A subscriber that does not answer for so long is given up."""
REPLAY_SECONDS = 10.0
"""A router that does not read for so long gets no more of a replay."""


class Publisher:
    """Binds its sockets in the constructor; `run` publishes, until it is cancelled; then `close`.

    Raises:
        AddressUnavailable: an address is in use or does not exist here.
        ConfigError: an endpoint is invalid.
    """

    def __init__(self, options: Options, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._options, self._look_seconds = options, look_seconds
        self._context = zmq.asyncio.Context()
        self._sequence = Sequence()
        self._topics: dict[str, Topic] = {}
        self._followed: dict[Namespace, _Followed] = {}
        self._ending: list[_Followed] = []
        self._news = asyncio.Event()
        self._again = asyncio.Event()
        self._problem = ""
        """Why the namespaces are not known, as last said."""
        self._left_out = False
        try:
            self._sockets = self._bind()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._operator = Client(options.socket, name="kvsidecar publish")

    def _bind(self) -> tuple[zmq.asyncio.Socket, zmq.asyncio.Socket | None]:
        out = self._context.socket(zmq.XPUB)
        out.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription is told, also of a topic that somebody else has
        out.setsockopt(zmq.SNDHWM, MAX_WAITING)
        _listen(out, "bind", self._options.bind)
        if self._options.replay is None:
            return out, None
        replay = self._context.socket(zmq.ROUTER)
        replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells who has gone, and who does not read
        replay.setsockopt(zmq.SNDHWM, MAX_WAITING)
        _listen(replay, "replay", self._options.replay)
        return out, replay

    @property
    def endpoints(self) -> list[str]:
        """Where it is bound."""
        return [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in self._sockets if each is not None]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look())
            group.create_task(self._hear_subscriptions())
            group.create_task(self._say_again())
            group.create_task(self._publish())
            if self._sockets[1] is not None:
                group.create_task(self._answer_replays(self._sockets[1]))

    def close(self) -> None:
        """May be called more than once."""
        for each in (*self._followed.values(), *self._ending):
            each.client.close()
        self._operator.close()
        self._context.destroy(linger=0)

    # -- namespaces --------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            try:
                reply = await asyncio.to_thread(self._operator.status)
            except ClientError as error:
                self._say_problem(str(error))
            else:
                self._say_problem("")
                self._follow(reply)
            await asyncio.sleep(self._look_seconds)

    def _say_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            if problem:
                _log.warning("the daemon's namespaces are not known, it is asked again", error=problem)
            else:
                _log.info("the daemon answers again")

    def _say_left_out(self, count: int) -> None:
        if count > 0 and not self._left_out:
            _log.warning(
                "too many namespaces: routers do not hear of the smallest", followed=MAX_FOLLOWED, others=count
            )
        self._left_out = count > 0

    def _follow(self, reply: pb.StatusReply) -> None:
        listed = [each.namespace for each in reply.namespaces] + [each.namespace for each in reply.ranks]
        found = [each for each in dict.fromkeys(map(namespace_from_wire, listed)) if self._wants(each)]
        is_all = reply.totals.namespaces <= len(reply.namespaces)
        for namespace in [each for each in self._followed if is_all and each not in found]:
            ended = self._followed.pop(namespace)
            ended.follower.end()
            self._ending.append(ended)
            self._news.set()
        new = [each for each in found if each not in self._followed]
        room = MAX_FOLLOWED - len(self._followed)
        self._say_left_out(len(new) - max(0, room))
        for namespace in new[: max(0, room)]:
            topic = self._topic(self._options.topic_of(namespace.model))
            client = self._watch(namespace)
            self._followed[namespace] = _Followed(namespace, client, Follower(namespace.hash_bytes, client, topic))
            _log.info("namespace followed", model=namespace.model, topic=topic.name)

    def _wants(self, namespace: Namespace) -> bool:
        patterns = self._options.models
        return not patterns or any(fnmatchcase(namespace.model, each) for each in patterns)

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
        """Watch anew where that is needed, and forget what has ended."""
        for each in everything:
            if each.follower.needs_snapshot:
                old, each.client = each.client, self._watch(each.namespace)
                each.follower.watch_anew(each.client)
                await asyncio.to_thread(old.close)
        for each in [each for each in self._ending if not each.follower.pending]:
            self._ending.remove(each)
            each.follower.release()
            await asyncio.to_thread(each.client.close)
            _log.info("namespace gone", model=each.namespace.model)
        # A topic that nobody holds anything of any more is forgotten when all has been said: clients name models.
        for topic in [each for each in self._topics.values() if not each.pending]:
            used = any(each.follower.topic is topic for each in [*self._followed.values(), *self._ending])
            if not used:
                del self._topics[topic.name]

    async def _send_events(self) -> None:
        for topic in list(self._topics.values()):
            for events in in_messages(topic.take(MESSAGE_BLOCKS)):
                message = self._sequence.add(topic.name, events, time.time())
                await self._sockets[0].send_multipart(message, copy=False)

    # -- routers -----------------------------------------------------------------------------------------------------

    async def _hear_subscriptions(self) -> None:
        while True:
            message = await self._sockets[0].recv()
            if message[:1] == b"\x01" and self._topics:
                self._again.set()

    async def _say_again(self) -> None:
        while True:
            await self._again.wait()
            self._again.clear()
            # Else routers that come again and again would let nobody hear the end.
            while any(topic.repeats for topic in self._topics.values()):  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(REPEAT_SECONDS)
            for topic in self._topics.values():
                topic.say_again()
            self._news.set()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _answer_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning("a replay was asked for with something else than 8 bytes")
                continue
            who, first = frames[0], int.from_bytes(frames[2], "big")
            if not self._sequence.has(first):
                _log.info(
                    "a router has missed messages that are not kept any more: everything is said again", first=first
                )
                self._again.set()
            for message in (*self._sequence.since(first), (b"", END, b"")):
                if not await _answer(socket, [who, b"", *message]):
                    break


class _Followed:
    def __init__(self, namespace: Namespace, client: Client, follower: Follower) -> None:
        self.namespace, self.client, self.follower = namespace, client, follower


def in_messages(events: list[Event]) -> Iterator[list[Event]]:
    """The same, in pieces of `MESSAGE_BLOCKS` and `MESSAGE_TOKENS`, about."""
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


def _listen(socket: zmq.asyncio.Socket, option: str, endpoint: str) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, SILENCE_MS // 3)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        text = f"--{option} {endpoint}: {error.strerror or error}"
        if error.errno in (zmq.EADDRINUSE, zmq.EADDRNOTAVAIL):
            raise AddressUnavailable(text) from error
        raise ConfigError(text) from error


async def _answer(socket: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """False if the router has gone, or does not read."""
    end = time.monotonic() + REPLAY_SECONDS
    while True:
        try:
            await socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.01)
        except zmq.ZMQError:  # EHOSTUNREACH: it has gone
            return False
        else:
            return True
