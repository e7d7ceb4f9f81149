"""What a rank asks the daemon for one request of SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvsidecar.client.types import GroupHits, LookupResult
from kvsidecar.integrations.prompt_gains import PromptGains
from kvsidecar.integrations.sglang.counters import RankCounters
from kvsidecar.integrations.sglang.groups import KV, MAMBA, SWA, groups_of
from kvsidecar.integrations.sglang.lookups import RankLookups
from kvsidecar.integrations.stored_filter import StoredFilter
from tests.harness import NAMESPACE
from tests.linker.transfers import PoolName, Transfer, keys


class Asked:
    """A client whose daemon has everything. Keeps what it is asked."""

    attached, attached_epoch = True, 1

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def lookup(self, _namespace: object, groups: dict[int, bytes], **arguments: Any) -> LookupResult:
        self.arguments = arguments
        found = {index: GroupHits(len(each) // 32, (True,) * (len(each) // 32)) for index, each in groups.items()}
        return LookupResult(True, found, lease=1, lease_seconds=1.0)


def test_of_windows_and_states_only_those_at_the_end_are_leased() -> None:
    client = Asked()
    groups = groups_of([(KV, [0], False), (SWA, [1], False), (MAMBA, [2], False)], 3, 1)
    shared: Any = SimpleNamespace(
        jobs=SimpleNamespace(client=client),
        namespace=NAMESPACE,
        keys=lambda names: b"".join(map(bytes.fromhex, names)),
        groups=groups,
        gains=PromptGains(),
        known=StoredFilter(),
        counters=RankCounters(),
        clock=lambda: 0.0,
    )
    names = keys(9)
    transfers = [Transfer(PoolName.KV, names), Transfer(PoolName.SWA, names[-3:]), Transfer(PoolName.MAMBA, names[-1:])]
    assert RankLookups(shared, 1.0, alone=True).restorable("r", transfers) == [9]
    assert client.arguments["lease_last"] == {1: 3, 2: 1}
