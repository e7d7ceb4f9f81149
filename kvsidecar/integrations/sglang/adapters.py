"""Makes SGLang distinguish adapters by their content.

The hash of a page begins with its request's ``extra_key``, at whose end SGLang puts the adapter's id: made from name
and path, or at random. The daemon's pages outlive both. So we wrap the constructor of SGLang's requests, and replace
the id by a digest of the loaded content. SGLang keeps adapters in the memory of each rank until it unloads them, which
waits for their requests, so that the content of a request's adapter does not change.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from kvsidecar.integrations import content_digest, wrapping
from kvsidecar.integrations.callers import attribute_of_caller

_log = logging.getLogger("kvsidecar.sglang")

DIGITS = 32
"""Digits of a digest, the same number as in an id: SGLang's events take it for one."""
NO_CONTENT = ("base_model_name_or_path", "revision", "auto_mapping")
"""Fields of an adapter's configuration that only say where it comes from."""


def manager_of_caller() -> Any:
    """The ``LoRAManager`` of the scheduler that is being constructed by a caller of this function; None: there is none.
    SGLang does not hand it to a linker."""
    worker = attribute_of_caller("tp_worker", lambda each: each is not None)
    return getattr(getattr(worker, "model_runner", None), "lora_manager", None)


def digest_of(adapter: Any) -> str:
    """The hexadecimal digest of SGLang's ``LoRAAdapter``.

    Raises:
        AttributeError, TypeError: this version has other adapters.
    """
    config = {name: value for name, value in adapter.config.hf_config.items() if name not in NO_CONTENT}
    tensors = [layer.weights for layer in adapter.layers]
    others = [adapter.embedding_layers, adapter.added_tokens_embeddings, adapter.config.added_tokens_config]
    return content_digest.digest_of([config, adapter.scaling, tensors, others], "sglang.")


class RankAdapters:
    """The adapters of one rank.

    Args:
        manager: SGLang's ``LoRAManager``; None: the loaded content is unknown.
        own: a name of this engine, the same for all of its ranks.
    """

    def __init__(self, manager: Any, own: str) -> None:
        self._manager, self._own = manager, own
        self._digests: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()

    def extra_key(self, extra_key: str, lora_id: str) -> str:
        """The text that SGLang hashes before a request's tokens, with its adapter's content in place of the id. If the
        content is unknown, it includes this engine's name, so that no other shares the pages."""
        before = extra_key.removesuffix(lora_id)
        digest = self._digest(lora_id)
        return f"{before}{self._own} {lora_id}" if digest is None else before + digest[:DIGITS]

    def _digest(self, lora_id: str) -> str | None:
        adapter = getattr(self._manager, "loras", {}).get(lora_id)
        if adapter is None:
            return None
        if adapter not in self._digests:
            try:
                self._digests[adapter] = digest_of(adapter)
            except (AttributeError, TypeError, RuntimeError) as error:
                self._digests[adapter] = None
                _log.error("kvsidecar: KV of adapter %s is shared with no other engine: %s", lora_id, error)
        return self._digests[adapter]


def wrap(requests: type, adapters: RankAdapters) -> wrapping.End:
    """Identify the requests of this class (``Req``) by the content of their adapters."""

    def init(original: Callable[..., None], self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if self.lora_id is not None:
            self.extra_key = adapters.extra_key(self.extra_key or "", self.lora_id)

    return wrapping.wrap(requests, "__init__", init)
