"""The command lines of pages that start an engine."""

from __future__ import annotations

import re
import shlex

from tests.docs.pages import fences


def arguments(page: str, command: str) -> list[list[str]]:
    """What follows a command, such as ``vllm serve``, each time that a code block of a page has it: at least once."""
    text = "".join(fences(page, "sh"))
    lines = re.findall(rf"^(?:\w+=\S+ )*{re.escape(command)} ((?:'[^']*'|\\\n|[^'\n])*)", text, re.MULTILINE)
    assert len(lines) == text.count(command) > 0
    return [shlex.split(line.replace("\\\n", " "), comments=True) for line in lines]
