"""A daemon that was lent to a test is lent again only if the next one cannot tell."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import Rank, done, eventually
from tests.lent_daemon import LentDaemon

STORES = 'kvsidecar_jobs_total{direction="store",outcome="done"}'


@pytest.fixture
def lent(short_dir: Path) -> Iterator[LentDaemon]:
    daemon = LentDaemon(short_dir)
    with daemon:
        daemon.begin(local=True)
        yield daemon


def test_what_a_test_has_stored_and_counted_is_gone(lent: LentDaemon) -> None:
    rank = Rank(lent)
    done(rank.store("a"))
    assert lent.metric(STORES) == 1
    rank.close()
    assert lent.is_as_new()
    lent.begin(local=True)
    assert lent.metric(STORES) == 0
    rank = Rank(lent)
    assert rank.hits("a") == 0
    rank.close()


def stays_attached(lent: LentDaemon) -> None:
    done(Rank(lent).store("a"))


def loses_its_copier(lent: LentDaemon) -> None:
    (copier,) = lent.copiers()
    os.kill(copier, signal.SIGKILL)
    eventually(lambda: lent.copiers() not in ([], [copier]))


def is_stopped(lent: LentDaemon) -> None:
    lent.process.send_signal(signal.SIGSTOP)
    eventually(lent.is_stopped)


def ends(lent: LentDaemon) -> None:
    assert lent.terminate() == 0


@pytest.mark.parametrize("change", [stays_attached, loses_its_copier, is_stopped, ends])
def test_one_that_a_test_has_changed_for_good_is_not_lent_again(
    lent: LentDaemon, change: Callable[[LentDaemon], None]
) -> None:
    change(lent)
    assert not lent.is_as_new()
    lent.process.send_signal(signal.SIGCONT)
