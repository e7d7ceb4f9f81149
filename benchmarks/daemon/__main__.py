"""What the project asks of a daemon beyond `kvsidecar bench`, in the same setting and with the same JSON.

python -m benchmarks.daemon [--only footprint,pacing,interference] [--json more.json] [-- SERVE_OPTION...]
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.daemon import footprint, interference, pacing
from benchmarks.daemon.tables import TABLES
from kvsidecar.bench.options import BenchOptions
from kvsidecar.bench.run import Measure, run
from kvsidecar.errors import KVSidecarError

MEASURE: dict[str, Measure] = {
    "footprint": footprint.measure,
    "pacing": pacing.measure,
    "interference": interference.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.daemon", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="NAME[,NAME]", help=f"some of {', '.join(MEASURE)}")
    parser.add_argument("--device", choices=("auto", "cuda", "host"), default="auto")
    parser.add_argument("--socket", help="of a running daemon; otherwise one is started for this run")
    parser.add_argument("--pool-size", help="of the daemon that is started")
    parser.add_argument("--quick", action="store_true", help="shows that everything works, not how fast")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE|-")
    parser.add_argument("serve_flags", nargs="*", metavar="-- SERVE_OPTION", help="of the daemon that is started")
    try:
        options = BenchOptions.checked(measurements=MEASURE, **vars(parser.parse_args()))
        sys.exit(run(options, MEASURE, TABLES))
    except KVSidecarError as error:
        sys.exit(f"benchmarks.daemon: {error}")


if __name__ == "__main__":
    main()
