"""``python -m docs.generate``: write the generated pages."""

from __future__ import annotations

from docs.generate import DOCS, PAGES

for name, page in PAGES.items():
    (DOCS / name).write_text(page())
