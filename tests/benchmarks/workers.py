"""Workers that stand in for a system's: ``python -m tests.benchmarks.workers HOW --rows FILE ...``."""

import sys
import time

from benchmarks.peers.report import Transfer
from benchmarks.peers.worker import Rows, settings_from

ROW = Transfer("fake", "contiguous", 1, 1, "store", 1.0, 2.0, verified=True)

if __name__ == "__main__":
    how, settings = sys.argv[1], settings_from(sys.argv[2:])
    with Rows(settings.rows) as rows:
        rows.add(ROW)
        if how == "dies":
            with settings.rows.open("a") as file:
                file.write('{"kind": "Tran')
            raise SystemExit("the GPU fell off the bus")
        if how == "refuses":
            rows.refuse("fake", "tp8-4k:\n  no such call")
        if how == "hangs":
            print("started", flush=True)
            time.sleep(600)
