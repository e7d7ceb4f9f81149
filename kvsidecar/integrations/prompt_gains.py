"""Counts what an engine's prompts have gained from the daemon since the last report: its hit rate. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class PromptGains:
    """The counts of one engine. The daemon cannot count them: it is also asked for blocks that the engine has."""

    needed: int = 0
    """Tokens, in whole blocks, that the engine did not have itself."""
    loaded: int = 0
    """Needed tokens that the engine has loaded."""

    def count(self, needed: int, loaded: int = 0) -> None:
        self.needed += needed
        self.loaded += loaded

    def tell(self, report: Callable[[int, int], object]) -> None:
        """Report the counts since the last call. If they cannot be sent, the daemon is lost, and so are they."""
        if self.needed or self.loaded:
            needed, loaded = self.needed, self.loaded
            self.needed = self.loaded = 0
            report(needed, loaded)
