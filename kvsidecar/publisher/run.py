"""Runs ``kvsidecar publish``."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Final

import uvloop

from kvsidecar.publisher.options import PublisherOptions
from kvsidecar.publisher.publisher import Publisher
from kvsidecar.support import log

NICE: Final = 10
"""Lets the node's daemon and engines go first, whose cores these are, whatever a router or a tenant makes this process
do. Nobody waits for what is published."""

_log = log.get("publish")


def run(options: PublisherOptions, log_format: str) -> None:
    """Publish until SIGTERM or SIGINT.

    Args:
        log_format: as for `log.configure`.

    Raises:
        AddressUnavailable, ConfigError: it cannot start; the text is one sentence.
    """
    # Applies to this thread, which does all the work, and to those that it starts.
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    log.configure(log_format=log_format, level="info")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(options))


async def _run(options: PublisherOptions) -> None:
    publisher = Publisher(options)
    running = asyncio.ensure_future(publisher.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    _log.info("publishing", endpoints=publisher.endpoints)
    try:
        await asyncio.wait([running])
    finally:
        publisher.close()
    if not running.cancelled():
        running.result()
