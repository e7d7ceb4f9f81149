"""Notices the ends of requests and sessions, which SGLang does not report to linkers.

It does report them to its prefix tree: every request whose KV the tree gets or frees, and sessions that are closed or
have expired. So we wrap two methods of the tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from kvsidecar.integrations.wrapping import End, wrap

_log = logging.getLogger("kvsidecar.sglang")

RELEASE: Final = "on_release"
"""The tree's method that is called when it owns a request's KV, or the KV is free. Not called for the turns of a
streaming session, which keeps its KV."""
END_SESSION: Final = "release_radix_session"


def hashes_of_request(tree: Any, request: Any) -> list[str]:
    """The hashes of a request's pages in the tree, in their order."""
    node = request.last_node
    if not isinstance(node, int):  # nothing, or what a streaming session keeps
        return []
    return [*tree.get_prefix_hash_values(node), *tree.tree_core.get_hash_values(node)]


def session_of(request: Any) -> str | None:
    """The id of the session that a request belongs to."""
    own: str | None = request.session_id
    return request.session.session_id if own is None and request.session is not None else own


def watch(
    tree_class: Any,
    is_mine: Callable[[Any], bool],
    request_ended: Callable[[Any, Any], None],
    session_ended: Callable[[str], None],
) -> End:
    """Watch the ends in one tree.

    Args:
        tree_class: SGLang's class of trees.
        is_mine: whether a tree of this class is the watched one.
        request_ended: called with the tree and a request that has ended.
        session_ended: called with the id of a session that has ended.
    """
    if not all(hasattr(tree_class, name) for name in (RELEASE, END_SESSION)):
        _log.warning(
            "kvsidecar: this version of SGLang does not report when requests end, so the daemon does not learn of it"
        )
        return lambda: None

    def on_release(original: Callable[..., Any], tree: Any, request: Any, **options: Any) -> Any:
        result = original(tree, request, **options)
        if request.finished() and is_mine(tree):  # else it was only interrupted
            request_ended(tree, request)
        return result

    def release_session(original: Callable[..., Any], tree: Any, session_id: str) -> Any:
        result = original(tree, session_id)
        if is_mine(tree):
            session_ended(session_id)
        return result

    ends = ExitStack()
    ends.callback(wrap(tree_class, RELEASE, on_release))
    ends.callback(wrap(tree_class, END_SESSION, release_session))
    return ends.close
