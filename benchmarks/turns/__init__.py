"""What benchmarks share that start daemons, ask two of them, or compare two versions of the code, in turns."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

_Side = TypeVar("_Side")


def python_of(tree: Path) -> list[str]:
    """This interpreter and its packages, with the code of a checkout."""
    return ["env", f"PYTHONPATH={tree.resolve()}", sys.executable, "-P"]


def free_port() -> int:
    """A port of localhost that nobody listens on. Another program could take it before the server does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Script:
    """A program that answers each line of its standard input, a JSON list, with one of JSON. It is killed with the
    stack, and Ctrl-C is not for it.

    Args:
        python: how Python is started, with the code of one of the versions.
    """

    def __init__(self, stack: ExitStack, python: Sequence[str], program: str, *arguments: object) -> None:
        command = [*python, "-c", program, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    def tell(self, *what: object) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *what: object) -> Any:
        self.tell(*what)
        return self.answer()


def turns(rounds: int, sides: Sequence[_Side]) -> Iterator[tuple[bool, Sequence[_Side]]]:
    """For each round whether it counts, as all but the first do, which warms up; and the sides in the order of their
    turns."""
    for number in range(rounds + 1):
        yield number > 0, sides if number % 2 else sides[::-1]


def ratio(before: Sequence[float], after: Sequence[float]) -> str:
    """After / before of the same round: its median, and the first and the last tenth."""
    ratios = [second / first for first, second in zip(before, after, strict=True)]
    tenths = quantiles(ratios, n=10)
    return f"{median(ratios):.3f} ({tenths[0]:.2f} to {tenths[-1]:.2f})"
