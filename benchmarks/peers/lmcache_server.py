"""``lmcache server``, with its compiled extension also on torch 2.11."""

import sys

# isort: off
from benchmarks.peers import lazy_symbols  # noqa: F401 - before anything imports lmcache
# isort: on

from lmcache.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
