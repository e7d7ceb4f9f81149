"""The slower tiers that the settings ask for."""

from __future__ import annotations

from typing import Any

from kvsidecar.core.tiering import TierPlan
from kvsidecar.daemon.settings import Settings
from kvsidecar.pool.host_pool import HostPool
from kvsidecar.support.supervised_child import ChildSetup
from kvsidecar.tiers.link import TierOptions
from kvsidecar.tiers.tier import Tier


def tier_plans(settings: Settings, pool: HostPool, given: ChildSetup) -> list[TierPlan]:
    """The tiers behind the pool, the fastest first.

    Args:
        given: what their processes get.
    """
    plans: list[TierPlan] = []

    def tier(name: str, deadline: float, options: dict[str, Any], capacity_bytes: int = 0) -> Tier:
        return Tier(name, TierOptions(name, options, capacity_bytes, given), pool, deadline=deadline)

    if settings.disk_dir is not None:
        size, per_day = settings.disk_size or 0, settings.disk_writes_per_day
        options = {"directory": settings.disk_dir, "capacity_bytes": size, "write_bytes_per_day": per_day}
        disk = tier("disk", settings.disk_deadline, options, size)
        plans.append(TierPlan(disk, settings.disk_admission, per_day, own=True))
    if settings.cluster_master is not None:
        options = {
            "master": settings.cluster_master,
            "segment_bytes": settings.cluster_segment or 0,
            "protocol": settings.cluster_protocol,
            "devices": settings.cluster_devices or "",
            "hostname": settings.cluster_hostname or "",
            "replicas": settings.cluster_replicas,
            "soft_pin_seconds": settings.cluster_soft_pin,
            "tenant": settings.cluster_tenant,
        }
        plans.append(TierPlan(tier("cluster", settings.cluster_deadline, options), settings.cluster_admission))
    if settings.shared_dir is not None:
        options = {"directory": settings.shared_dir, "capacity_bytes": settings.shared_size or 0}
        plans.append(TierPlan(tier("shared", settings.shared_deadline, options), settings.shared_admission))
    return plans
