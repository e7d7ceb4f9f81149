from __future__ import annotations

import threading

from kvsidecar.integrations.vllm.waking import Alarm
from tests.harness import SECONDS, eventually


def test_an_alarm_wakes_once_however_often_it_is_set_and_may_be_set_again() -> None:
    woken, rang = threading.Semaphore(0), []

    def wake() -> None:
        rang.append(threading.current_thread())
        woken.release()

    alarm = Alarm(wake)
    alarm.set(0.02)
    alarm.set(0.02)
    assert woken.acquire(timeout=SECONDS)
    eventually(lambda: not rang[0].is_alive(), "its thread ends")
    assert len(rang) == 1
    alarm.set(0.0)
    assert woken.acquire(timeout=SECONDS)
    assert rang[1].daemon, "it does not keep the engine's process from ending"
