"""Findings about the slower tiers. Pure, like `checks`. None is a problem: the daemon serves without a tier."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvsidecar.cli.doctor.facts import DiskTier, Facts
from kvsidecar.cli.doctor.findings import Result, Verdict
from kvsidecar.support import extras
from kvsidecar.support.units import format_rate, format_size

_OK, _WARNING, _, _NOT_CHECKED = Verdict
_NETWORK = re.compile(r"nfs4?|cifs|smb3|ceph|lustre|gpfs|beegfs|glusterfs|9p|afs|fuse\..*|virtiofs")
_OF_A_NODE = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs")
_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_TRIES_AGAIN = "Fix the cause: the daemon tries again by itself."
_ANOTHER = "Set --disk-dir to a directory on a disk of this node."


def disk(facts: Facts) -> Iterable[Result]:
    tier, off = facts.disk, facts.daemon.tiers.get("disk")
    if not tier.directory:
        yield _OK, "no disk behind the pool: --disk-dir is not set"
        return
    if tier.problem:
        yield _missing(tier, "--disk-dir")
        return
    yield _directory(facts, tier, "--disk-dir") or _room(tier) or (_OK, f"{_named(tier)}, {_rates(tier)}")
    if (place := _file_system(tier)) is not None:
        yield place
    elif tier.direct is False:
        fix = "Use ext4 or XFS for --disk-dir."
        yield _WARNING, "its file system does not support O_DIRECT, so every block goes through the page cache", fix
    if off:
        yield _WARNING, f"the running daemon does not use it: {off}", _TRIES_AGAIN
    elif tier.in_use and facts.daemon.state is None:
        yield _WARNING, "another process uses it", "Give every daemon its own directory."


def _named(tier: DiskTier) -> str:
    held = f"{format_size(tier.held)} of an earlier run" if tier.held else "nothing yet"
    kind = f"{tier.file_system}, of {tier.owner}" if tier.file_system else f"of {tier.owner}"
    return f"{tier.directory} ({kind}): {held}, room for {format_size(tier.room)}"


def _rates(tier: DiskTier) -> str:
    if tier.speed is not None:
        return f"writes {format_rate(tier.speed[0])}, reads {format_rate(tier.speed[1])} one call at a time"
    return f"its speed is unknown: {tier.speed_problem}" if tier.speed_problem else "--disk-speed measures it"


def _missing(tier: DiskTier, option: str) -> Result:
    fix = f"Create the directory, or set {option} to another one."
    return _WARNING, f"{tier.directory} cannot be used: {tier.problem}", fix


def _directory(facts: Facts, tier: DiskTier, option: str) -> Result | None:
    if tier.exists and not tier.owned:
        fix = f"Give the directory to {facts.user}, or set {option} to another one."
        return _WARNING, f"{tier.directory} belongs to {tier.owner}, so {facts.user} does not use it", fix
    if tier.exists and tier.mode & 0o022:
        fix = f"Run chmod 0700 {tier.directory}."
        return _WARNING, f"{tier.directory} has mode {tier.mode:04o}: others could write to it, so it is not used", fix
    if not tier.writable:
        fix = f"Make {tier.directory} and give it to {facts.user}, or set {option} to another one."
        return _WARNING, f"{facts.user} may not create {tier.directory}", fix
    return None


def _room(tier: DiskTier) -> Result | None:
    if tier.room >= tier.need:
        return None
    fix = "Lower --disk-size, or make room."
    return _WARNING, f"{_named(tier)}, less than the {format_size(tier.need)} that the tier needs", fix


def _file_system(tier: DiskTier) -> Result | None:
    kind = tier.file_system
    if _NETWORK.fullmatch(kind):
        return _WARNING, f"{kind} is a network file system: the disk tier is for a disk of this node", _ANOTHER
    if kind in _MEMORY:
        return _WARNING, f"{kind} is memory: give it to the pool instead", _ANOTHER
    if kind == "overlay":
        fix = "Mount a volume of the node's disk there."
        return _WARNING, "overlay is the container's own layer, which is slow and ends with the container", fix
    return None


def cluster(facts: Facts) -> Iterable[Result]:
    tier, off = facts.cluster, facts.daemon.tiers.get("cluster")
    if not tier.master:
        yield _OK, "no cluster behind the pool: --cluster-master is not set"
        return
    if not tier.package:
        yield _WARNING, "Mooncake's client is not installed", f"Run {extras.install('mooncake')}."
    elif tier.problem:
        fix = "Install libibverbs, libnuma and libcurl (Debian: apt install libibverbs1 libnuma1 libcurl4)."
        yield _WARNING, f"Mooncake's client {tier.package} cannot be loaded: {tier.problem}", fix
    else:
        yield _OK, f"Mooncake's client {tier.package}"
    if tier.unreached:
        yield _WARNING, tier.unreached, "Start the master, or correct --cluster-master and the network between."
    elif not tier.tried:
        yield _NOT_CHECKED, f"{tier.master} is a group of masters"
    else:
        yield _OK, f"the master {tier.master} accepts connections"
    if off:
        yield _WARNING, f"the running daemon does not use it: {off}", _TRIES_AGAIN


def shared(facts: Facts) -> Iterable[Result]:
    tier, off = facts.shared, facts.daemon.tiers.get("shared")
    if not tier.directory:
        yield _OK, "no directory behind the pool that nodes share: --shared-dir is not set"
        return
    if tier.problem:
        yield _missing(tier, "--shared-dir")
        return
    room = f"{tier.file_system or 'unknown file system'}, of {tier.owner}): room for {format_size(tier.room)}"
    yield _directory(facts, tier, "--shared-dir") or (_OK, f"{tier.directory} ({room}")
    if tier.file_system in _OF_A_NODE:
        fix = "Set --shared-dir to a directory that the nodes mount."
        yield _WARNING, f"{tier.file_system} is a file system of one node: other nodes do not see its files", fix
    if off:
        yield _WARNING, f"the running daemon does not use it: {off}", _TRIES_AGAIN
