"""Accepts connections on the event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

from kvsidecar.support.log import Limited

RETRY_SECONDS: Final = 0.1


async def accept(listener: socket.socket, caused: Limited) -> tuple[socket.socket, Any]:
    """The next connection, which does not block, and the address of its other end."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, address = await loop.sock_accept(listener)
        except OSError as error:
            # EMFILE and similar errors pass when others close; retrying in a busy loop would starve the process.
            caused.warning("accept failed", error=str(error))
            await asyncio.sleep(RETRY_SECONDS)
            continue
        connection.setblocking(False)
        return connection, address
