import sys

import pytest

from benchmarks.peers.processes import Child, PeerFailedError, free_port, library_path, listens
from benchmarks.peers.timing import poll_until
from tests.benchmarks.alive import is_alive
from tests.harness import SECONDS


def python(code):
    return [sys.executable, "-c", code]


LAUNCHER = """
import os, subprocess, sys, time
server = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(3600)"])
print(server.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("lives", [True, False], ids=["launcher lives", "launcher is gone"])
def test_a_server_behind_a_launcher_is_ended_too(tmp_path, lives):
    log, leave = tmp_path / "log", tmp_path / "leave"
    then = "server.wait()" if lives else f"while not os.path.exists({str(leave)!r}): time.sleep(0.01)"
    with Child("launcher", python(LAUNCHER.format(then=then)), log) as child:
        child.wait_until(lambda: len(child.text().split()) == 2, SECONDS)
        pid = next(int(word) for word in child.text().split() if word.isdigit())
        assert is_alive(pid)
        if not lives:
            leave.touch()
            child.wait(SECONDS)
    # A killed process that is nobody's child here takes a moment to be gone.
    poll_until(lambda: not is_alive(pid), SECONDS, "the server is gone", pause=0.01)


def test_one_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.peers.processes.GRACE", 0.2)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
    )
    with Child("stubborn", python(code), tmp_path / "log") as child:
        child.wait_until(lambda: "up" in child.text(), SECONDS)
    assert not child.running


def test_one_that_dies_before_it_is_ready_tells_its_last_words_and_its_log(tmp_path):
    code = "print('\\x1b[31mlibpython3.12.so.1.0:   cannot open\\x1b[0m'); print(); raise SystemExit(3)"
    with (
        Child("the server", python(code), tmp_path / "log") as child,
        pytest.raises(PeerFailedError, match=r"server ended before .*: libpython3.12.so.1.0: cannot open \(.*log\)"),
    ):
        child.wait_until(lambda: False, SECONDS)


def test_the_backtrace_of_a_panic_does_not_hide_its_reason(tmp_path):
    (tmp_path / "log").write_text(
        "thread 'main' panicked at src/lib.rs:200:5:\nUnable to load libcuda\nstack backtrace:\n   0: __rustc::begin\n"
        "             at /rustc/library/std/src/panicking.rs:689:5\nnote: Some details are omitted\n"
    )
    assert Child("server", [], tmp_path / "log").last_words().startswith("Unable to load libcuda (")


def test_one_that_is_not_ready_in_time_is_given_up(tmp_path):
    with (
        Child("slow", python("import time; time.sleep(3600)"), tmp_path / "log") as child,
        pytest.raises(PeerFailedError, match="slow is not ready after 0 s: it said nothing"),
    ):
        child.wait_until(lambda: False, 0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(4)", "status 4"),
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import time; time.sleep(3600)", "not done after 1 s"),
    ],
)
def test_a_bad_end_says_how(tmp_path, code, said):
    with Child("worker", python(code), tmp_path / "log") as child, pytest.raises(PeerFailedError, match=said):
        child.wait(1 if "time" in code else SECONDS)


def test_a_good_end_is_silent_and_leaving_is_harmless(tmp_path):
    with Child("worker", python("pass"), tmp_path / "log") as child:
        child.wait(SECONDS)
    child.end()


def test_a_free_port_is_one_that_nobody_listens_on():
    assert not listens(free_port())


def test_the_library_path_keeps_what_is_set_and_adds_each_folder_that_has_something(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/already/there")
    for folder, name in (("a", "libcudart.so.13"), ("b", "libother.so"), ("c", "libnvrtc.so.13")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    search = [tmp_path / name for name in ("a", "b", "c", "absent", "a")]
    assert library_path(search=search) == f"/already/there:{tmp_path / 'a'}:{tmp_path / 'c'}"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert library_path(search=[tmp_path / "b"]) == ""
