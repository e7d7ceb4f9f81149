from __future__ import annotations

from pathlib import Path

import pytest

from kvsidecar.client import Client, ClientError, HostBuffer
from tests.harness import NAMESPACE, SECONDS, layout


class ClosesItsClient:
    """An event ring; what another thread may do while `Client.attach` begins, it does when it is asked for handles."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def handles(self) -> tuple[bytes, ...]:
        self._client.close(0.0)
        return ()

    def record(self, index: int) -> None:
        """Never called."""

    mark = None


def test_an_attach_ends_when_its_client_is_closed(short_dir: Path) -> None:
    """And not when its own time is over: it would use a core until then."""
    buffer = HostBuffer(1 << 20)
    client = Client(str(short_dir / "kvs.sock"))
    ring = ClosesItsClient(client)
    with pytest.raises(ClientError, match="was closed while it attached"):
        client.attach(
            instance="i",
            namespace=NAMESPACE,
            buffers=buffer.kv_buffers(),
            groups=[layout()],
            events=ring,  # type: ignore[arg-type]
            timeout=100 * SECONDS,
        )
    buffer.close()
