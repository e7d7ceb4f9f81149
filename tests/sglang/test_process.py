"""What a test sees of an engine's process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import eventually
from tests.sglang.engine import SGLangProcess


class Ends(SGLangProcess):
    """A program that ends at once, and logs why."""

    module = "json.tool"


def test_the_end_of_an_engine_shows_its_exit_code_and_the_end_of_its_log(tmp_path: Path) -> None:
    with Ends("no engine", None, tmp_path / "log") as engine:
        why = r"exit code 2: (?s:.*)\[\"no engine\""
        with pytest.raises(AssertionError, match=why):
            engine.wait_started()
        eventually(lambda: engine.process.poll() is not None)
        with pytest.raises(AssertionError, match=why):
            engine.forget()
