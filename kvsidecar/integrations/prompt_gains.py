"""What the prompts that an engine has begun have gained from the daemon, until it is told: its hit rate. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class PromptGains:
    """One per engine. Only the engine knows: it asks the daemon also for blocks that it has itself."""

    needed: int = 0
    """Tokens, in whole blocks, that the engine did not have itself."""
    loaded: int = 0
    """Those of them that it has loaded."""

    def count(self, needed: int, loaded: int = 0) -> None:
        self.needed += needed
        self.loaded += loaded

    def tell(self, report: Callable[[int, int], object]) -> None:
        """Report what was counted since the last call. What cannot be sent is not counted: the daemon is lost."""
        if self.needed or self.loaded:
            needed, loaded = self.needed, self.loaded
            self.needed = self.loaded = 0
            report(needed, loaded)
