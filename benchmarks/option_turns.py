"""What an option costs a daemon: rates and lookups with and without it, in turns.

    python -m benchmarks.option_turns [--rounds 40] [--jobs 100] [--blocks 32] -- --eviction rhythm

Two daemons of the host device, one with the options behind the dashes (if there are none, with two shares), each with
one rank in this process, which do the same in turns, in changing order: jobs of so many blocks, each of which evicts as
many, four in flight; and lookups of 512 blocks with a lease. Printed are the medians over the rounds, in microseconds,
and with / without of the same round: its median, and the first and the last tenth. "cpu" is what a job takes of the
daemon's main thread.
"""

from __future__ import annotations

from benchmarks.residency_turns import RUN, compare, options_of, started

SHARES = f"""[
    {{ name = "chat", namespaces = ["kvsidecar-bench-{RUN}"], guaranteed = "25%" }},
    {{ name = "batch", namespaces = ["another"], guaranteed = "25%", max = "50%" }},
]"""


def main() -> None:
    parser = options_of(__doc__, jobs=100, lookups=100)
    parser.add_argument("option", nargs="*", help="of kvsidecar serve")
    arguments = parser.parse_args()
    with started(arguments.block, arguments.option or ["--share", SHARES.replace("\n", "")]) as sides:
        compare(sides, arguments, lease_seconds=1.0)


if __name__ == "__main__":
    main()
