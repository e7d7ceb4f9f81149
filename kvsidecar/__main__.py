"""``python -m kvsidecar``. kvsidecar-client, which has no commands, has this file, too: it names who has them."""

from __future__ import annotations

try:
    from kvsidecar.cli.main import main
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("kvsidecar."):
        raise
    raise SystemExit(
        "kvsidecar-client has no commands, only what engines import: "
        "the distribution kvsidecar, from where this one is, has them"
    ) from None

main(prog_name="kvsidecar")
