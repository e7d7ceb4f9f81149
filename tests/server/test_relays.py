"""Relays in front of gRPC leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path

from kvsidecar.server import grpc_front
from kvsidecar.server.grpc_front import GrpcFront
from kvsidecar.server.socket_files import SocketFiles
from kvsidecar.server.unix_front import UnixFront
from kvsidecar.support.tasks import TaskSet
from kvsidecar.support.turns import Turns
from tests.attacks.http2_client import PREFACE, SETTINGS, frame
from tests.harness import eventually_in_loop

CLIENTS = 20


async def test_a_connection_that_is_over_leaves_nothing_for_the_garbage_collector(short_dir: Path) -> None:
    """A collection holds up the event loop the longer, the more there is to collect."""
    tasks = TaskSet(lambda name, error: None)
    turns = Turns()
    front = GrpcFront(grpc_front.LIMITS, lambda _: None, tasks, turns)
    unix = UnixFront(SocketFiles(short_dir / "kvs.sock", mode=0o600, group=None), front, tasks, turns)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short_dir}/server")
        server.listen(CLIENTS)
        front.start(f"{short_dir}/server")
        unix.listen()
        gc.collect()
        gc.disable()
        try:
            clients = [socket.socket(socket.AF_UNIX) for _ in range(CLIENTS)]
            for client in clients:
                client.connect(f"{short_dir}/kvs.sock")
                client.send(PREFACE + frame(SETTINGS))
            await eventually_in_loop(lambda: len(front._relays) == CLIENTS)
            for client in clients:
                client.close()
            await eventually_in_loop(lambda: not front._relays)
            await asyncio.sleep(0)
            left = [each for each in gc.get_objects() if isinstance(each, grpc_front._Relay | grpc_front.End)]
            assert not left
        finally:
            gc.enable()
        unix.stop_listening()
        front.close()
        await tasks.cancel()
