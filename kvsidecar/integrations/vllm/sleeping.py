"""Notices vLLM's sleep mode in versions that do not report it to a connector, and whether the weights survived it.

An engine that sleeps unmaps its KV cache, and maps other memory at the same addresses when it wakes. Until the daemon
has unmapped it, too, none of it is free; and copies to an old mapping would not move the engine's KV. Imports torch.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from kvsidecar.integrations.callers import attribute_of_caller
from kvsidecar.integrations.wrapping import wrap

_log = logging.getLogger("kvsidecar.vllm")

KV_CACHE: Final = "kv_cache"
"""vLLM's tag of the memory of the KV cache."""
CHUNK: Final = 1 << 20
"""Words of a parameter that are summed at once: 8 MiB, and twice as much in addition."""


def watch(allocator: Any, before_sleep: Callable[[], object], after_wake: Callable[[], object]) -> None:
    """Make vLLM's allocator of a process call these from now on, for versions before 0.33, which do not call a
    connector. A later watch of the same allocator replaces the earlier one.

    Args:
        allocator: vLLM's ``CuMemAllocator``.
        before_sleep: called before the memory of the KV cache is unmapped.
        after_wake: called when it is mapped again.
    """

    def asleep(tags: Iterable[str] | str | None) -> bool:
        return tags is None or KV_CACHE in ([tags] if isinstance(tags, str) else tags)

    def sleep(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before_sleep()  # it unmaps everything; its argument selects what is saved before
        return original(*args, **kwargs)

    def discard(original: Callable[..., Any], tags: Any, **kwargs: Any) -> Any:
        if asleep(tags):
            before_sleep()
        return original(tags, **kwargs)

    def wake_up(original: Callable[..., Any], tags: Any = None, **kwargs: Any) -> Any:
        result = original(tags, **kwargs)
        if asleep(tags):
            after_wake()
        return result

    for call in (sleep, discard, wake_up):
        if (method := getattr(allocator, call.__name__, None)) is not None:
            setattr(allocator, call.__name__, getattr(method, "__wrapped__", method))
            wrap(allocator, call.__name__, call)


class StartWeights:
    """The weights that this rank had at its start.

    Args:
        model: the rank's part of the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._at_start = _digest(model)

    @classmethod
    def of_caller(cls) -> StartWeights | None:
        """The weights of the model runner that calls this function, directly or not; None if no caller has a model."""
        model = attribute_of_caller("model", lambda each: isinstance(each, torch.nn.Module))
        return None if model is None else cls(model)

    def unchanged(self) -> bool:
        """Whether the weights have the same content as at the start. False if that cannot be found out."""
        try:
            return self._at_start == _digest(self._model)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            _log.warning("kvsidecar: it is unknown whether the weights have changed: %s", error)
            return False


def _digest(model: torch.nn.Module) -> str:
    """A digest of the names, shapes and content of all parameters: two sums of each, one of them by position. Reads the
    weights in place, in some ten milliseconds for 16 GB on a GPU. Detects changes, not forgeries."""
    digest = hashlib.sha256()
    sums: list[torch.Tensor] = []
    factors: dict[torch.device, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        content = parameter.detach().reshape(-1).view(torch.uint8)
        whole = content.numel() // 8 * 8
        rest = content[whole:]
        sums.append(torch.nn.functional.pad(rest, (0, 8 - len(rest))).view(torch.int64)[0])
        words = content[:whole]
        if words.data_ptr() % 8:
            words = words.clone()
        words = words.view(torch.int64)
        if words.device not in factors:
            factors[words.device] = _factors(words.device)
        factor = factors[words.device]
        for index, chunk in enumerate(words.split(CHUNK)):
            sums.append(chunk.sum())
            sums.append((chunk * factor[: len(chunk)]).sum() * (2 * index + 1))
    for device in {each.device for each in sums}:
        digest.update(torch.stack([each for each in sums if each.device == device]).cpu().numpy().tobytes())
    return digest.hexdigest()


def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    factors = torch.randint(-(1 << 62), 1 << 62, (CHUNK,), dtype=torch.int64, generator=generator)
    return (factors | 1).to(device)
