"""Names images, audio and video by their content in vLLM's block hashes. Imports vLLM.

vLLM identifies an item by a hash of what the client has sent, or by a uuid from the client, alone or hashed. One uuid
may stand for another image tomorrow, or on another node, and the daemon's blocks outlive the engine. So hashes contain
instead a digest of the processed item, which is what the model computes from. The encoder's outputs, which vLLM keeps
by identifier, must be those of the same content: an item gets another identifier if its own already represents other
content. If the content cannot be read, its name is the engine's own, and nobody else hits its KV.

We wrap two functions of vLLM, as for adapters (`adapter_hooks`): the one that makes the engine core's request, before
it is hashed, and the one that determines what a block's hash contains. KV events continue to contain the identifier.
"""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any, Final

import torch
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core as vllm_core
from vllm.v1.request import Request

from kvsidecar.integrations.vllm.adapter_hooks import EXTRA_KEYS, hashes_call_extra_keys, wrap_once

ATTRIBUTE = "kvsidecar_media"
"""Attribute of vLLM's feature, which is one item of a request: the name that represents it in hashes."""
MAX_KNOWN: Final = 1 << 17
"""Most identifiers whose content is remembered: more than an encoder cache has room for."""

_MAKE = "from_engine_core_request"
_OF_MEDIA = "_gen_mm_extra_hash_keys"

_hashed: weakref.ref[Media] | None = None
"""The names that block hashes of this process's engine core contain."""


class Media:
    """The items of one engine's requests.

    Args:
        seen: whether the model computes from what arrives with the request. Otherwise all names are the engine's own.
        token: makes a unique name.
    """

    def __init__(self, *, seen: bool = True, token: Callable[[], str] = lambda: secrets.token_hex(16)) -> None:
        self._seen = seen
        self._own = token()
        self._contents: OrderedDict[str, str] = OrderedDict()
        """The content whose encoder outputs vLLM may keep, by identifier."""
        self._age = 0

    def reset(self) -> None:
        """Give the encoder's outputs identifiers of their own from now on: the weights may have changed. vLLM keeps the
        old outputs unless it resets them, too."""
        self._age += 1
        self._contents.clear()

    def name(self, features: Iterable[Any]) -> None:
        """Give each item of a new request its name, and another identifier if its own represents other content."""
        for feature in features:
            if hasattr(feature, ATTRIBUTE):
                continue  # several requests of one prompt share it
            identifier, content = feature.identifier, self._content(feature)
            if content is None:
                setattr(feature, ATTRIBUTE, f"own {self._own} {identifier}")
                continue
            setattr(feature, ATTRIBUTE, content)
            if self._age or self._known(identifier, content) != content:
                feature.identifier = f"{identifier} kvsidecar {self._age} {content}"

    def name_of(self, feature: Any) -> str:
        """The name that represents an item in hashes."""
        name: str | None = getattr(feature, ATTRIBUTE, None)
        return f"own {self._own} {feature.identifier}" if name is None else name

    def _known(self, identifier: str, content: str) -> str:
        first = self._contents.setdefault(identifier, content)
        self._contents.move_to_end(identifier)
        if len(self._contents) > MAX_KNOWN:
            self._contents.popitem(last=False)
        return first

    def _content(self, feature: Any) -> str | None:
        """The content of an item; None: it is unknown what the model computes from."""
        # An identifier that is not the item's own names an adapter of the encoder, whose content is not known here.
        if (
            not self._seen
            or feature.data is None
            or getattr(feature, "mm_hash", None) not in (None, feature.identifier)
        ):
            return None
        known: str | None = getattr(feature.data, ATTRIBUTE, None)
        if known is None and (known := content_of(feature.data)) is not None:
            setattr(feature.data, ATTRIBUTE, known)  # vLLM keeps it, and it comes again with the same identifier
        return known


def content_of(item: Mapping[str, Any]) -> str | None:
    """A digest of all bytes of a processed item; None: some of them are not here, but in another process or on a GPU.

    Args:
        item: the item's values by argument of the model.
    """
    found = hashlib.sha256()
    if "address" in item and "monotonic_id" in item:  # in memory that is shared with the workers
        return None
    try:
        for name in sorted(item):
            found.update(f"{name!r} ".encode())
            _update(found, item[name].data)
    except TypeError:
        return None
    return f"content {found.hexdigest()}"


def _update(found: Any, value: Any) -> None:
    """Add a value to a digest. Raises TypeError: the value cannot be read, or has an unknown type."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        found.update(repr((value.dtype, tuple(value.shape))).encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, list | tuple):
        found.update(f"{len(value)} values ".encode())
        for each in value:
            _update(found, each)
    elif isinstance(value, bool | int | float | str):
        found.update(f"{type(value).__name__} {value!r} ".encode())
    else:
        raise TypeError


def named_by_content(vllm_config: Any) -> Media | None:
    """Name items of requests by their content, from now on, for as long as the result is referenced. None: the model
    takes none.

    Raises:
        ValueError: this version of vLLM does not support it.
    """
    global _hashed
    of_media = getattr(vllm_config.model_config, "multimodal_config", None)
    if of_media is None:
        return None
    makers = getattr(getattr(vllm_core, "EngineCore", None), "preprocess_add_request", None)
    code = getattr(makers, "__code__", None)
    if not (
        isinstance(code, CodeType)
        and _MAKE in code.co_names
        and hasattr(kv_cache_utils, _OF_MEDIA)
        and hashes_call_extra_keys()
    ):
        raise ValueError(
            "this vLLM computes block hashes in an unknown way, so they cannot contain the content of images, audio "
            "and video, of which two may have the same name"
        )
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    # What another engine's encoder has put out is found by identifier, whatever the item is here.
    elsewhere = transfer is not None and bool(getattr(transfer, "is_ec_consumer", True))
    # Scales that the encoder finds as it goes depend on the items before.
    scaled = getattr(of_media, "mm_encoder_attn_dtype", None) is not None
    scaled = scaled and getattr(of_media, "mm_encoder_fp8_scale_path", None) is None
    media = Media(seen=not (elsewhere or scaled))
    _hashed = weakref.ref(media)
    wrap_once(Request, _MAKE, _named)
    wrap_once(kv_cache_utils, EXTRA_KEYS, _by_content)
    return media


def _media() -> Media | None:
    return _hashed() if _hashed is not None else None


def _named(original: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    if request.mm_features and (media := _media()) is not None:
        media.name(request.mm_features)
    return original(request, *args, **kwargs)


def _by_content(original: Any, request: Any, start: int, end: int, first: int) -> Any:
    keys, following = original(request, start, end, first)
    media = _media()
    if not keys or not request.mm_features or media is None:
        return keys, following
    of_media = tuple(getattr(kv_cache_utils, _OF_MEDIA)(request, start, end, first)[0])
    if not of_media:
        return keys, following
    names = {feature.identifier: media.name_of(feature) for feature in request.mm_features}
    renamed = [_renamed(key, names) for key in of_media]
    for at in range(len(keys) - len(of_media) + 1):
        if keys[at : at + len(of_media)] == of_media:
            return (*keys[:at], *renamed, *keys[at + len(of_media) :]), following
    return (*keys, *renamed), following


def _renamed(key: Any, names: Mapping[str, str]) -> Any:
    if isinstance(key, tuple):
        return tuple([_renamed(each, names) for each in key])
    return names.get(key, key) if isinstance(key, str) else key
