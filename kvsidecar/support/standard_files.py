"""Standard input, output and error, which a process may be started without."""

from __future__ import annotations

import os


def open_missing() -> None:
    """Open /dev/null where one of the three is closed. Call this before anything else is opened: else a socket or an
    event loop's own file would get the number, libuv would abort at its end, and what a library prints would go there.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number; every child inherits 0 to 2
            os.set_inheritable(fd, True)
