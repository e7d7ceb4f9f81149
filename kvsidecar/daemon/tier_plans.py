"""The slower tiers that the settings ask for."""

from __future__ import annotations

from functools import partial

from kvsidecar.core.tiering import TierPlan
from kvsidecar.daemon.settings import Settings
from kvsidecar.pool.host_pool import HostPool
from kvsidecar.support.supervised_child import Given
from kvsidecar.tiers.link import TierOptions
from kvsidecar.tiers.tier import Tier


def tier_plans(settings: Settings, pool: HostPool, given: Given) -> list[TierPlan]:
    """The tiers behind the pool, the fastest first.

    Args:
        given: to their processes.
    """
    plans = []
    start = partial(TierOptions, given=given)
    if settings.disk_dir is not None:
        size = settings.disk_size or 0
        options = {
            "directory": settings.disk_dir,
            "capacity_bytes": size,
            "write_bytes_per_day": settings.disk_writes_per_day,
        }
        disk = start("disk", options, capacity_bytes=size)
        tier = Tier("disk", disk, pool, deadline=settings.disk_deadline)
        plans.append(TierPlan(tier, settings.disk_admission, settings.disk_writes_per_day, own=True))
    if settings.cluster_master is not None:
        cluster = {
            "master": settings.cluster_master,
            "segment_bytes": settings.cluster_segment or 0,
            "protocol": settings.cluster_protocol,
            "devices": settings.cluster_devices or "",
            "hostname": settings.cluster_hostname or "",
            "replicas": settings.cluster_replicas,
            "soft_pin_seconds": settings.cluster_soft_pin,
            "tenant": settings.cluster_tenant,
        }
        tier = Tier("cluster", start("cluster", cluster, capacity_bytes=0), pool, deadline=settings.cluster_deadline)
        plans.append(TierPlan(tier, settings.cluster_admission))
    if settings.shared_dir is not None:
        shared = start(
            "shared", {"directory": settings.shared_dir, "capacity_bytes": settings.shared_size or 0}, capacity_bytes=0
        )
        plans.append(
            TierPlan(Tier("shared", shared, pool, deadline=settings.shared_deadline), settings.shared_admission)
        )
    return plans
