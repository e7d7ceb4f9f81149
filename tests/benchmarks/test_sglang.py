"""The benchmarks of SGLang's linker, where they need no SGLang."""

from __future__ import annotations

import itertools
from argparse import Namespace

import pytest

from benchmarks.sglang.load_layers import Engine, measure
from tests.harness import DaemonProcess

OPTIONS = Namespace(
    device="host", tokens=128, layers=4, page=16, heads=1, dim=8, chunks=[1, 3], rounds=2, pool_size=8 << 20,
    scattered=False,
)  # fmt: skip


@pytest.mark.parametrize("scattered", [False, True], ids=["side by side", "scattered"])
def test_every_layer_is_what_was_stored_when_it_may_be_computed(scattered: bool) -> None:
    results = measure(Namespace(**{**vars(OPTIONS), "scattered": scattered}), ())
    assert [(chunks, len(each["first"])) for chunks, each in results.items()] == [(1, 2), (3, 2)]


def test_a_layer_that_is_not_what_was_stored_is_seen(daemon: DaemonProcess) -> None:
    engine = Engine(daemon.socket, 2, OPTIONS)
    engine.content[3][engine.stored[5]] += 1
    with pytest.raises(RuntimeError, match="1 pieces of layer 3"):
        engine.compare()
    engine.side.close()


def test_scattered_pages_touch_no_other_one(daemon: DaemonProcess) -> None:
    engine = Engine(daemon.socket, 1, Namespace(**{**vars(OPTIONS), "scattered": True}))
    used = sorted([*engine.stored, *engine.loaded])
    assert len(used) == 2 * engine.pages
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(used))
    engine.side.close()
