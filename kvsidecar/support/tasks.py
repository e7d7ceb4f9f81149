"""A set of asyncio tasks with an owner: no task is lost, and every failure is reported.

Unlike in `asyncio.TaskGroup`, a failing task does not cancel its siblings: one engine's bad job must not end another
engine's copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")

AGAIN_SECONDS: Final = 1.0
"""Wait after an unexpected error before a lasting part begins again."""


class TaskSet:
    """Runs coroutines as tasks and reports their exceptions.

    Args:
        on_error: called with (task name, exception) for every task that raises. Cancellation is not an error.
    """

    def __init__(self, on_error: Callable[[str, BaseException], None]) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        # The event loop keeps only weak references to tasks (see asyncio.create_task).
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, part: Callable[[], Coroutine[Any, Any, object]], *, name: str) -> asyncio.Task[Any]:
        """Spawn a lasting part. If it raises, the error is reported, and it begins again after `AGAIN_SECONDS`: no part
        of a daemon may end unnoticed, nor for ever because of one error.

        Args:
            part: begins it; can begin it again.
        """

        async def run() -> None:
            while True:
                try:
                    await part()
                    return
                except Exception as error:  # noqa: BLE001 - reported; the part goes on
                    self._on_error(name, error)
                await asyncio.sleep(AGAIN_SECONDS)

        return self.spawn(run(), name=name)

    def attempt(self, call: Callable[[], object], *, name: str) -> None:
        """Make one of several independent calls: an error is reported, and does not prevent the others."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - reported; the caller goes on
            self._on_error(name, error)

    def report(self, name: str, error: BaseException) -> None:
        """Report an error as if a task of this name had raised it."""
        self._on_error(name, error)

    async def join(self, timeout: float | None = None) -> int:
        """Wait until every task has ended, at most ``timeout`` seconds. Returns the number of running tasks."""
        current = asyncio.current_task()
        tasks = {task for task in self._tasks if task is not current}
        if not tasks:
            return 0
        _, pending = await asyncio.wait(tasks, timeout=timeout)
        return len(pending)

    async def cancel(self) -> None:
        """Cancel every task and wait until all have ended."""
        for task in tuple(self._tasks):
            task.cancel()
        await self.join()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(task.get_name(), error)


def heard(what: str, error: BaseException) -> None:
    """Report an unexpected error to the event loop's exception handler, as if this callback had raised it: for callers
    that have more to do."""
    asyncio.get_running_loop().call_exception_handler({"message": what, "exception": error})


def run_all_steps(steps: Generator[None, None, T]) -> T:
    """Run a computation without a pause between its steps, and return the generator's return value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
