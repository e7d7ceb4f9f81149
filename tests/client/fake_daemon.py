"""A daemon of which a test writes every answer: both sockets, no pool, no copies. It runs in the test's process."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from kvsidecar.protocol.framing import HEADER_BYTES, frame
from kvsidecar.v1 import sidecar_pb2 as pb
from kvsidecar.v1 import sidecar_pb2_grpc as pb_grpc
from tests.frames import frames
from tests.harness import SECONDS


class Stream:
    """One Attach stream as the daemon sees it."""

    def __init__(self, register: pb.Register) -> None:
        self.register = register
        self.received: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[pb.AttachReply | None] = queue.SimpleQueue()

    def next(self) -> pb.AttachRequest:
        """The next message of the client."""
        message = self.received.get(timeout=SECONDS)
        assert message is not None, "the client ended the stream"
        return message

    def store(self) -> pb.Store:
        message = self.next()
        assert message.WhichOneof("message") == "store", message
        return message.store

    def done(self, job: int, outcome: int = pb.JobDone.OUTCOME_DONE) -> None:
        self.answers.put(pb.AttachReply(done=pb.JobDone(job=job, outcome=outcome)))

    def wait_issued(self, event: int) -> None:
        self.answers.put(pb.AttachReply(wait_issued=pb.WaitIssued(event=event)))

    def flushed(self, flush: int, *pending: int) -> None:
        self.answers.put(pb.AttachReply(flushed=pb.Flushed(flush=flush, pending=pending)))


def send(link: socket.socket, **message: Any) -> None:
    link.sendall(frame(pb.LocalReply(**message).SerializeToString()))


class FakeDaemon(pb_grpc.SidecarServicer):
    """Listens from the start to `close`.

    Args:
        local_protocol: whether it offers one.
        registered: what a registration is answered with; epoch and session are filled in.
    """

    def __init__(self, directory: Path, *, epoch: int = 7, local_protocol: bool = True, **registered: Any) -> None:
        self.socket = str(directory / "kvs.sock")
        self.epoch = epoch
        self._local_protocol = local_protocol
        self.registered = registered
        self.streams: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.status = pb.StatusReply(epoch=epoch, session_ended=True)
        self.on_lookup: Callable[[pb.LookupRequest], pb.LookupReply] = lambda _: pb.LookupReply(ready=True)
        self.on_renew: Callable[[pb.RenewRequest], pb.RenewReply] = lambda _: pb.RenewReply(renewed=True)
        self.before_answer = b""
        """Goes before every answer to a lookup over the local protocol."""
        self._links: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.socket + ".attach")
        self._listener.listen()
        self._server = grpc.server(ThreadPoolExecutor(16))
        pb_grpc.add_SidecarServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()
        self._thread = threading.Thread(target=self._greet, daemon=True)
        self._thread.start()

    def stream(self) -> Stream:
        """The next stream that is attached."""
        return self.streams.get(timeout=SECONDS)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for link in self._links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        self._server.stop(0).wait()

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _greet(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            data, fds, _, _ = socket.recv_fds(link, 4096, 8)
            for fd in fds:
                os.close(fd)
            self._links.append(link)
            hello = pb.Hello.FromString(data[HEADER_BYTES:])
            assert hello.num_fds == len(fds)
            welcome = pb.Welcome(token=b"token", epoch=self.epoch, local_protocol=self._local_protocol, num_pidfds=1)
            own = os.pidfd_open(os.getpid())
            socket.send_fds(link, [frame(welcome.SerializeToString())], [own])
            os.close(own)
            if self._local_protocol:
                threading.Thread(target=self._serve_local, args=(link,), daemon=True).start()

    def _serve_local(self, link: socket.socket) -> None:
        stream: Stream | None = None
        with contextlib.suppress(OSError):  # closed under us
            for payload in frames(link):
                request = pb.LocalRequest.FromString(payload)
                match request.WhichOneof("message"):
                    case "attach" if stream is None:
                        stream = Stream(request.attach.register)
                        registered = pb.Registered(epoch=self.epoch, session=11, **self.registered)
                        send(link, attach=pb.AttachReply(registered=registered))
                        threading.Thread(target=self._answer_local, args=(link, stream), daemon=True).start()
                        self.streams.put(stream)
                    case "attach":
                        assert stream is not None
                        stream.received.put(request.attach)
                    case "detach":
                        break
                    case "lookup":
                        link.sendall(self.before_answer)
                        send(link, call=request.call, lookup=self.on_lookup(request.lookup))
                    case "renew":
                        send(link, call=request.call, renew=self.on_renew(request.renew))
                    case "release":
                        send(link, call=request.call, release=pb.ReleaseReply())
        if stream is not None:
            stream.received.put(None)
            stream.answers.put(None)

    def _answer_local(self, link: socket.socket, stream: Stream) -> None:
        with contextlib.suppress(OSError):
            while (answer := stream.answers.get()) is not None:
                send(link, attach=answer)
            send(link, ended=pb.Ended())

    def Attach(self, requests: Iterator[pb.AttachRequest], _context: Any) -> Iterator[pb.AttachReply]:  # noqa: N802
        stream = Stream(next(requests).register)

        def read() -> None:
            try:
                for request in requests:
                    stream.received.put(request)
            except grpc.RpcError:
                pass  # the client broke it off
            stream.received.put(None)
            stream.answers.put(None)

        threading.Thread(target=read, daemon=True).start()
        yield pb.AttachReply(registered=pb.Registered(epoch=self.epoch, session=11, **self.registered))
        self.streams.put(stream)
        while (answer := stream.answers.get()) is not None:
            yield answer

    def Status(self, _request: Any, _context: Any) -> pb.StatusReply:  # noqa: N802
        return self.status

    def Lookup(self, request: pb.LookupRequest, _context: Any) -> pb.LookupReply:  # noqa: N802
        return self.on_lookup(request)

    def Renew(self, request: pb.RenewRequest, _context: Any) -> pb.RenewReply:  # noqa: N802
        return self.on_renew(request)

    def Release(self, _request: Any, _context: Any) -> pb.ReleaseReply:  # noqa: N802
        return pb.ReleaseReply(released=False)
