from __future__ import annotations

import pytest

from kvsidecar.core.quota import Quota
from kvsidecar.errors import LimitExceeded


def test_the_peak_is_that_of_all_since_it_was_asked_for() -> None:
    quota = Quota(4, "things", 6)
    quota.take("a", 4)
    quota.take("b", 2)
    with pytest.raises(LimitExceeded):
        quota.take("b")
    quota.give_back("a", 4)
    assert quota.peak() == 6
    assert quota.peak() == quota.held == 2
    quota.give_back("b", 2)
    assert quota.peak() == 2
    assert quota.peak() == 0
