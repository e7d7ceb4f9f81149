"""The options of ``kvsidecar publish``, checked."""

from __future__ import annotations

import string
from dataclasses import dataclass, fields

from kvsidecar.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    bind: str
    """ZeroMQ endpoint for subscribers."""
    replay: str | None
    """ZeroMQ endpoint for replays. None: a router cannot recover messages that it has missed."""
    node: str
    topic: str
    models: tuple[str, ...]
    """Patterns; none: all models."""
    ownership: str | None
    socket: str | None
    metrics: str | None = None
    """ADDRESS:PORT; None: metrics are not served."""

    def __post_init__(self) -> None:
        """Raises ConfigError: an option is invalid; the text names it."""
        for name in ("bind", "replay"):
            endpoint = getattr(self, name)
            if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
                raise ConfigError(f"--{name} {endpoint!r} is neither tcp://ADDRESS:PORT nor ipc://PATH")
        try:
            names = {name for _, name, _, _ in string.Formatter().parse(self.topic) if name is not None}
        except ValueError as error:
            raise ConfigError(f"--topic {self.topic!r}: {error}") from error
        if not names <= {"node", "model"}:
            raise ConfigError(f"--topic {self.topic!r} may have {{node}} and {{model}}, and nothing else in braces")
        if self.metrics is not None and self.metrics_address is None:
            raise ConfigError(f"--metrics {self.metrics!r} is not ADDRESS:PORT")
        for each in fields(self):
            if getattr(self, each.name) == "":
                raise ConfigError(f"--{each.name} is empty")

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of ``metrics``; None: there is none, or it is not of this form."""
        host, _, port = (self.metrics or "").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        is_number = port.isascii() and port.isdigit() and int(port) <= 65535
        return (host, int(port)) if host and is_number else None

    def topic_of(self, model: str) -> str:
        return self.topic.format(node=self.node, model=model)
