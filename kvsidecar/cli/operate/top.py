"""`kvsidecar top`: polls the daemon's status and displays it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from kvsidecar.cli.operate.top_view import PRINTED_HEIGHT, Screen, render
from kvsidecar.cli.status_figures import Sample, Worth, rates_between
from kvsidecar.errors import ClientError
from kvsidecar.v1 import sidecar_pb2 as pb

if sys.platform == "win32":
    import msvcrt
else:
    import termios
    import tty
if TYPE_CHECKING:
    from kvsidecar.client import Client, RemoteClient

LIVE_ANSWER_SECONDS = 1.0
"""Timeout of a status request while keys are read, and so the longest delay of a key press."""
_HISTORY = 60
_KEY_SECONDS = 0.05
"""Interval at which Windows is asked for a key."""
_QUIT = frozenset("qQ\x03\x04")
"""q, and Ctrl-C and Ctrl-D if the terminal does not turn them into signals."""


class Observations:
    """The observations of one daemon, which may disappear and come back."""

    def __init__(self, client: Client | RemoteClient, worth: Worth | None) -> None:
        self._client = client
        self._last: Sample | None = None
        self._history: deque[tuple[float, float]] = deque(maxlen=_HISTORY)
        self._lost_at: float | None = None
        self._screen = Screen(reply=None, rates=None, history=(), lost_for=None, worth=worth)

    def poll(self) -> Screen:
        try:
            self._take(self._client.status())
        except ClientError as error:
            now = time.monotonic()
            self._lost_at = now if self._lost_at is None else self._lost_at
            self._screen = replace(self._screen, rates=None, lost_for=now - self._lost_at, lost_reason=str(error))
        return self._screen

    def _take(self, reply: pb.StatusReply) -> None:
        before, now = self._last, Sample(time.monotonic(), reply)
        self._last, self._lost_at = now, None
        rates = None if before is None else rates_between(before, now)
        restarts = self._screen.restarts
        if before is not None and before.reply.epoch != reply.epoch:
            restarts += 1
            self._history.clear()
        if rates is not None:
            self._history.append((rates.stored_bytes, rates.loaded_bytes))
        worth, history = self._screen.worth, tuple(self._history)
        self._screen = Screen(reply, rates, history, lost_for=None, restarts=restarts, worth=worth)


def once(client: Client | RemoteClient, interval: float, console: Console, worth: Worth | None) -> pb.StatusReply:
    """Print one screen, with rates over ``interval`` seconds. Raises ClientError if no daemon answers.

    Returns the last answer that it shows.
    """
    shown = client.status()
    watch = Observations(client, worth)
    watch.poll()
    time.sleep(interval)
    screen = watch.poll()
    console.print(render(screen, console.width, PRINTED_HEIGHT))
    return screen.reply or shown


def live(client: Client | RemoteClient, interval: float, console: Console, worth: Worth | None) -> None:
    """Refresh the screen until q or Ctrl-C."""
    watch = Observations(client, worth)
    with _keys() as key_within, Live(console=console, screen=True, auto_refresh=False) as shown:
        while True:
            next_poll = time.monotonic() + interval
            screen = watch.poll()
            shown.update(render(screen, console.width, console.height), refresh=True)
            while (left := next_poll - time.monotonic()) > 0:
                if key_within(left) in _QUIT:
                    return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Read single keys without echo: yields a function that waits some seconds for a key, and returns it or "".

    SIGTERM ends `live` like q, so that the terminal is restored.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _terminal_keys() as key_within:
            yield key_within
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


if sys.platform == "win32":

    @contextlib.contextmanager
    def _terminal_keys() -> Iterator[Callable[[float], str]]:
        def key_within(seconds: float) -> str:
            until = time.monotonic() + seconds
            while not msvcrt.kbhit():
                if (left := until - time.monotonic()) <= 0:
                    return ""
                time.sleep(min(left, _KEY_SECONDS))  # the console cannot be waited for together with a timeout
            return msvcrt.getwch()

        yield key_within

else:

    @contextlib.contextmanager
    def _terminal_keys() -> Iterator[Callable[[float], str]]:
        def key_within(seconds: float) -> str:
            if not select.select([] if fd is None else [fd], [], [], seconds)[0] or fd is None:
                return ""
            return os.read(fd, 1).decode(errors="replace") or "\x04"  # the terminal is gone

        fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        mode = None if fd is None else termios.tcgetattr(fd)
        try:
            if fd is not None:
                tty.setcbreak(fd)
            yield key_within
        finally:
            if fd is not None and mode is not None:
                termios.tcsetattr(fd, termios.TCSADRAIN, mode)
