"""vLLM has no hook for the content of LoRA adapters, so we wrap three of its functions: on each rank, the one that
loads an adapter, to know its content; in the engine core, the one that determines what a block's hash contains, and the
one that starts the load of an adapter, because an idle engine reports nothing. Imports vLLM.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core as vllm_core

from kvsidecar.integrations import content_digest
from kvsidecar.integrations.vllm.adapters import ATTRIBUTE, UNKNOWN, AdapterLoads, Adapters, Files, files_of
from kvsidecar.integrations.wrapping import wrap

_log = logging.getLogger("kvsidecar.vllm")

EXTRA_KEYS = "generate_block_hash_extra_keys"
"""Function of `kv_cache_utils` that returns what a block's hash contains besides tokens."""
_LOAD = "_load_adapter"
_ADD = "add_lora"
_CALL = "kvsidecar_call"
"""Attribute of a function that `wrap_once` has put in place of another one: the function it calls."""

_hashed: weakref.ref[Adapters] | None = None
"""The adapters of the engine core in this process."""
_recorders: weakref.WeakKeyDictionary[AdapterLoads, Any] = weakref.WeakKeyDictionary()
"""The loads of the ranks in this process, with the configuration of their engine."""


# -- hashes ------------------------------------------------------------------------------------------------------------


def hash_by_content(adapters: Adapters) -> bool:
    """Put the identity of an adapter into the hashes of its requests, from now on, instead of its name and path. False:
    this version of vLLM does not support it."""
    global _hashed
    if not hashes_call_extra_keys():
        return False
    _hashed = weakref.ref(adapters)
    # vLLM's KV events have imported the function itself, so they continue to contain the name.
    wrap_once(kv_cache_utils, EXTRA_KEYS, _by_content)
    wrap_once(getattr(vllm_core, "EngineCore", None), _ADD, _announced)
    return True


def hashes_call_extra_keys() -> bool:
    """Whether vLLM determines what a block's hash contains by a call that can be wrapped."""
    hasher = getattr(kv_cache_utils, "get_request_block_hasher", None)
    codes = [each for each in getattr(hasher, "__code__", _NO_CODE).co_consts if isinstance(each, CodeType)]
    return hasattr(kv_cache_utils, EXTRA_KEYS) and any(EXTRA_KEYS in each.co_names for each in codes)


def wrap_once(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Call `wrap`, unless this call wraps it already, or the owner has no such attribute."""
    each = function = getattr(owner, name, None)
    while each is not None:
        if getattr(each, _CALL, None) is call:
            return
        each = getattr(each, "__wrapped__", None)
    if function is not None:
        wrap(owner, name, call)
        setattr(getattr(owner, name), _CALL, call)


def _announced(original: Any, core: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
    adapters = _hashed() if _hashed is not None else None
    if adapters is None:
        return original(core, lora_request, *args, **kwargs)
    adapters.loading(lora_request.lora_int_id, inplace=bool(getattr(lora_request, "load_inplace", False)))
    try:
        return original(core, lora_request, *args, **kwargs)
    except BaseException:
        adapters.not_loaded(lora_request.lora_int_id)
        raise


_NO_CODE = compile("", "", "exec")


def _by_content(original: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    keys, index = original(request, *args, **kwargs)
    adapters = _hashed() if _hashed is not None else None
    if request.lora_request is None or adapters is None:
        return keys, index
    identity = getattr(request, ATTRIBUTE, None)
    if identity is None:
        identity = adapters.identity(request.lora_request.lora_int_id) or UNKNOWN
        setattr(request, ATTRIBUTE, identity)
    keys = tuple(keys or ())
    if identity == UNKNOWN:
        return (*keys, ("kvsidecar", adapters.own)), index
    of_adapter = tuple(kv_cache_utils._gen_lora_extra_hash_keys(request))
    if keys[: len(of_adapter)] == of_adapter:
        keys = keys[len(of_adapter) :]
    return (("kvsidecar", identity), *keys), index


# -- loads -------------------------------------------------------------------------------------------------------------


def record_loads(lora_config: Any) -> AdapterLoads:
    """Record what the rank in this process loads, from now on, for as long as the result is referenced.

    Args:
        lora_config: the engine's own object, which identifies its rank.
    """
    loads = AdapterLoads()
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager

        getattr(WorkerLoRAManager, _LOAD)
    except (ImportError, AttributeError):
        _log.error(
            "kvsidecar: requests with an adapter are not offloaded: this vLLM loads adapters in an unknown way, so "
            "their content is not known"
        )
        return loads
    _recorders[loads] = lora_config
    wrap_once(WorkerLoRAManager, _LOAD, _recorded)
    return loads


def _recorded(original: Any, manager: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
    files = files_of(lora_request.lora_path)
    model = original(manager, lora_request, *args, **kwargs)
    for loads, lora_config in list(_recorders.items()):
        if lora_config is manager.lora_config:
            _record(loads, manager, lora_request, model, files)
    return model


def _record(loads: AdapterLoads, manager: Any, lora_request: Any, model: Any, files: Files | None) -> None:
    lora_id = lora_request.lora_int_id
    try:
        digest = digest_of(model)
    except (TypeError, RuntimeError) as error:  # must not fail the load
        digest = "own " + secrets.token_hex(16)
        _log.error(
            "kvsidecar: KV of adapter %r is shared with no other engine, because its content is unknown: %s",
            lora_request.lora_name,
            error,
        )
    of_manager = weakref.ref(manager)

    def is_resident(lora_id: int) -> bool:
        manager = of_manager()
        return manager is not None and lora_id in manager.list_adapters()

    loads.resident = is_resident
    if files != files_of(lora_request.lora_path):
        files = None  # written to meanwhile
    reread = bool(getattr(lora_request, "load_inplace", False))
    loads.add(lora_id, digest, lora_request.lora_path, files, reread=reread)


def digest_of(model: Any) -> str:
    """The hexadecimal digest of a loaded adapter: its tensors, and all else that vLLM has read from its configuration,
    but not its id.

    Raises:
        TypeError: a value has an unknown type.
    """
    return content_digest.digest_of({name: value for name, value in vars(model).items() if name != "id"}, "vllm.")
