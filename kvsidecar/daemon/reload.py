"""Reload on SIGHUP: reads the settings again, and applies those that can change while the daemon serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvsidecar.daemon.settings import Settings
from kvsidecar.errors import ConfigError
from kvsidecar.support import log

RELOADABLE: Final = frozenset({"log_level", "store_chunk", "drain_timeout", "stuck_after", "policy", "share"})
"""Settings that are read at each use, the policy and the shares. The others are built into sockets, pool or cache."""

_log = log.get("reload")


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """The result of reading the settings again. Options are named as in the file."""

    settings: Settings
    """In force from now on."""
    taken: tuple[str, ...]
    left: tuple[str, ...]
    """Changed too, and in force only after a restart."""


def change(in_force: Settings, read: Settings) -> SettingsChange:
    """Apply those settings of ``read`` that can be applied."""
    changed = [option for option in Settings.model_fields if getattr(read, option) != getattr(in_force, option)]
    taken = tuple(option for option in changed if option in RELOADABLE)
    left = tuple(option for option in changed if option not in RELOADABLE)
    return SettingsChange(in_force.model_copy(update={option: getattr(read, option) for option in taken}), taken, left)


class Reloader:
    """Reads and applies the settings on request.

    Args:
        read: reads the same flags, file and environment as at the start.
        apply: applies settings, in the event loop. Raises ConfigError, with nothing changed, if they do not fit the
            pool.
    """

    def __init__(self, settings: Settings, read: Callable[[], Settings], apply: Callable[[Settings], None]) -> None:
        self._settings = settings
        self._read = read
        self._apply = apply

    async def reload(self) -> str:
        """Returns the result in a few words, and never raises. A file with a mistake changes nothing."""
        try:
            result = change(self._settings, await asyncio.to_thread(self._read))
            self._apply(result.settings)
        except ConfigError as error:
            _log.error("settings not reloaded", reason=str(error))
            return f"settings not reloaded: {error}"
        except Exception as error:  # noqa: BLE001 - the next file may be right, and must be heard
            _log.exception("settings not reloaded", reason=str(error))
            return f"settings not reloaded: {type(error).__name__}: {error}"
        self._settings = result.settings
        _log.info("settings reloaded", changed=list(result.taken))
        if result.left:
            _log.warning("some settings need a restart", options=list(result.left))
            return f"settings reloaded; a restart is needed for {', '.join(result.left)}"
        return "settings reloaded"
