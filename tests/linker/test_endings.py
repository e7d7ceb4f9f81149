"""Ends of requests and sessions, with a tree that has SGLang's methods."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvsidecar.integrations.sglang.endings import hashes_of_request, session_of, watch


def tree_class() -> Any:
    class Tree:
        """Nodes are numbers, of which each has a page of its name and those of all smaller ones."""

        tree_core = SimpleNamespace(get_hash_values=lambda node: [f"page {node}"] if node else [])

        def get_prefix_hash_values(self, node: int) -> list[str]:
            return [f"page {each}" for each in range(1, node)]

        def on_release(self, req: Any, *, checkpointed: bool) -> str:
            return f"{req.rid} {checkpointed}"

        def release_radix_session(self, session_id: str) -> int:
            return len(session_id)

    return Tree


def request(rid: str = "r", last_node: Any = 3, finished: bool = True, session_id: Any = None, **session: Any) -> Any:
    of = SimpleNamespace(**session) if session else None
    return SimpleNamespace(rid=rid, last_node=last_node, finished=lambda: finished, session_id=session_id, session=of)


def test_requests_that_end_and_sessions_are_noticed_in_one_tree_until_the_end() -> None:
    kind, seen = tree_class(), []
    mine, other = kind(), kind()
    end = watch(kind, lambda tree: tree is mine, lambda _, each: seen.append(each.rid), seen.append)
    for tree in (other, mine):
        assert tree.on_release(request("first"), checkpointed=True) == "first True"
        assert tree.on_release(request("retracted", finished=False), checkpointed=False) == "retracted False"
        assert tree.release_radix_session("s") == 1
    assert seen == ["first", "s"]
    end()
    mine.on_release(request("late"), checkpointed=True)
    mine.release_radix_session("late")
    assert seen == ["first", "s"]


def test_who_has_wrapped_them_again_keeps_its_wrapper() -> None:
    kind, seen = tree_class(), []
    end = watch(kind, lambda _: True, lambda _, each: seen.append(each.rid), seen.append)
    inner = kind.on_release
    kind.on_release = lambda *arguments, **options: inner(*arguments, **options)
    outer = kind.on_release
    end()
    assert kind.on_release is outer


def test_an_sglang_without_these_methods_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watch(object, lambda _: True, lambda *_: None, lambda _: None)()
    assert "does not report when requests end" in caplog.text


def test_the_pages_of_a_request_are_those_of_its_node_and_before() -> None:
    tree = tree_class()()
    assert hashes_of_request(tree, request(last_node=3)) == ["page 1", "page 2", "page 3"]
    assert hashes_of_request(tree, request(last_node=None)) == []
    assert hashes_of_request(tree, request(last_node=object())) == [], "a streaming session keeps it"


def test_a_request_has_its_own_session_or_that_of_sglang() -> None:
    assert session_of(request(session_id="own", session_id_of="x")) == "own"
    assert session_of(request()) is None
    each = request()
    each.session = SimpleNamespace(session_id="sglang's")
    assert session_of(each) == "sglang's"
