from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from kvsidecar.integrations.engine_log import log_through


@pytest.fixture
def engine() -> Iterator[io.StringIO]:
    """What an engine logs that has set up its own logger alone, as vLLM does."""
    own, logger = logging.getLogger("kvsidecar"), logging.getLogger("an_engine")
    before, said = own.parent, io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(logging.Formatter("engine %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield said
    own.parent = before
    own.setLevel(own.level)
    logger.handlers.clear()


def test_what_the_package_says_is_in_the_engines_log_in_its_format_and_once(engine: io.StringIO) -> None:
    root, elsewhere = logging.getLogger(), io.StringIO()
    handler = logging.StreamHandler(elsewhere)
    root.addHandler(handler)
    logging.getLogger("kvsidecar.client").info("not in the log of a program that has set up none")
    try:
        log_through("an_engine")
        log_through("an_engine")
        logging.getLogger("kvsidecar.client").info("attached")
        logging.getLogger("kvsidecar.vllm").debug("too much")
    finally:
        root.removeHandler(handler)
    assert (engine.getvalue(), elsewhere.getvalue()) == ("engine INFO attached\n", "")


def test_handlers_of_its_own_are_left_alone(engine: io.StringIO) -> None:
    own, said = logging.getLogger("kvsidecar"), io.StringIO()
    handler = logging.StreamHandler(said)
    own.addHandler(handler)
    try:
        log_through("an_engine")
        logging.getLogger("kvsidecar.client").warning("lost")
    finally:
        own.removeHandler(handler)
    assert (said.getvalue(), engine.getvalue()) == ("lost\n", "")
