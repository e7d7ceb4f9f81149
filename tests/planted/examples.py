"""A plugin of pytest: the same examples in every run, and none is made smaller once it has failed, which takes longer
than to find it."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile(
    "planted", deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)
