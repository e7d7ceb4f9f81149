"""Every setting of the daemon, written once: name, type, default and description are the fields of `Settings`.

The flags of ``kvsidecar serve``, the environment's variables and the keys of the TOML file are made from them (see
`kvsidecar.daemon.setting_sources`), so no setting can be missing in one of these.

Imports nothing heavy: ``kvsidecar serve --help`` needs this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvsidecar.daemon.setting_types import (
    Address,
    ChunkSize,
    Devices,
    Directory,
    DiskSize,
    File,
    Master,
    PolicyRules,
    PoolSize,
    Seconds,
    ShareRules,
    Shown,
    SizeOrOff,
    SlabSize,
    SocketPath,
    StoreChunk,
    default_prefault_threads,
)
from kvsidecar.protocol.paths import default_socket_path
from kvsidecar.support.memory_limits import HugePages
from kvsidecar.support.units import GiB, MiB, Size, format_size
from kvsidecar.tiers.policy import Admission
from kvsidecar.types import Eviction, Verify


class Settings(BaseModel):
    """The daemon's settings. Build it with `kvsidecar.daemon.setting_sources.load_settings`, which merges the sources
    and words the errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    socket: SocketPath = Field(
        default_factory=default_socket_path,
        description="Path of the Unix socket that serves gRPC. The attach socket is created beside it, with the suffix "
        ".attach.",
    )
    socket_mode: Literal["0600", "0660"] = Field(
        "0600",
        description="File mode of both sockets. 0600: only the daemon's user may connect. 0660: members of "
        "--socket-group may connect too.",
    )
    socket_group: Annotated[str | None, Shown("GROUP", "the daemon's group")] = Field(
        None, min_length=1, description="Group that owns the sockets. Requires --socket-mode 0660."
    )
    admin_group: Annotated[str | None, Shown("GROUP", "none")] = Field(
        None,
        min_length=1,
        description="Unix group of administrators. Its members, root and the daemon's user may clear and drain, and "
        "see the namespaces and engines of all users.",
    )
    policy: PolicyRules = Field(
        None,
        description="Access policy: which users, groups and certificates may use which namespaces, as [[policy]] "
        "tables of the file (docs/security.md). Without a policy, anyone who can connect to the socket may use every "
        "namespace.",
    )
    share: ShareRules = Field(
        (),
        description="Shares of the pool for tenants: which namespaces or users, and how many bytes of the pool and of "
        "the disk tier they are guaranteed and may have at most, as [[share]] tables of the file (docs/sharing.md). "
        "Without shares, the tenant that stores most takes most of the pool.",
    )
    local_protocol: Annotated[bool, Shown("on|off", "on")] = Field(
        True,
        description="Offer the local protocol to clients on this host: the same messages as gRPC, framed on the attach "
        "socket, at a fifth of the latency.",
    )
    tcp_listen: Address = Field(
        None,
        description="Also serve gRPC over TCP at this address, for lookups and admin commands from other hosts. "
        "Requires mTLS and a policy that names client certificates. Engines always attach over the Unix socket.",
    )
    tls_certificate: File = Field(None, description="Server certificate chain for --tcp-listen, as a PEM file.")
    tls_key: File = Field(
        None, description="Private key of --tls-certificate, as a PEM file. Its mode must be 0640 or stricter."
    )
    tls_client_ca: File = Field(
        None, description="CA bundle that client certificates are verified against, as a PEM file."
    )
    http_host: Annotated[str, Shown("ADDRESS")] = Field(
        "127.0.0.1",
        min_length=1,
        description="Address that serves /health, /ready, /metrics and /status over plain HTTP. Set 0.0.0.0 when "
        "probes or Prometheus connect from outside the host or container.",
    )
    http_port: Annotated[int, Shown("PORT")] = Field(
        9464, ge=0, le=65535, description="TCP port of the HTTP endpoints. 0 picks a free port."
    )
    http_page: Annotated[bool, Shown("on|off", "on")] = Field(
        True,
        description="Serve a live, read-only web page at /: state, pool, rates, hits, engines, tiers and GPUs. It "
        "shows no more than /metrics and /status do.",
    )
    device: Literal["auto", "cuda", "host"] = Field(
        "auto",
        description="Device whose KV cache is offloaded. cuda: NVIDIA GPUs. host: host memory stands in for a GPU, for "
        "tests and development. auto: cuda if a GPU is visible, otherwise host.",
    )
    devices: Devices = Field(
        (),
        description="Devices to serve, separated by commas: GPU UUIDs, or indices in the driver's order. Each gets a "
        "copier process with its own CUDA context. all: every visible GPU.",
    )
    # 8 GiB: 64 Ki tokens of Llama-3.1-8B (128 KiB each), enough to see hits on the first day; pinned in a few seconds,
    # and every machine with a data-centre GPU can spare it.
    pool_size: PoolSize = Field(
        Size(nbytes=8 * GiB),
        description="Host memory to pin, as a size or as a percentage of the machine's memory or the container's "
        "memory limit, whichever is less. Rounded down to whole memory pages. The default suits a first trial; set it "
        "in production.",
    )
    slab_size: SlabSize = Field(
        "auto",
        description="Length of a usual slab. A slab of the pool holds slots of one size, and is longer if its slots "
        "need it, so a block's shard may be larger: up to an eighth of the pool. auto: about a 32nd of the pool, at "
        "most 64 MiB.",
    )
    chunk_size: ChunkSize = Field(
        GiB,
        description="Memory pinned by one driver call. Must be a multiple of the slab size. Smaller chunks keep "
        "/health responsive while the pool is being pinned.",
    )
    huge_pages: HugePages = Field(
        HugePages.AUTO,
        description="Page size of the pool. thp: transparent huge pages. hugetlb: huge pages that the operator has "
        "reserved. none: 4 KiB pages, which are slow to pin. auto: hugetlb if enough are free, otherwise thp.",
    )
    pool_dir: Directory = Field(
        None,
        description="Directory on tmpfs or hugetlbfs that holds the pool, so that the cache outlives the daemon. "
        "Created if only its last component is missing. Without it, the cache outlives the daemon only if systemd's "
        "descriptor store holds the pool.",
    )
    table_dir: Annotated[str | None, Field(min_length=1), Shown("DIRECTORY", "--pool-dir")] = Field(
        None,
        description="Directory on tmpfs that holds the table of what the pool contains. Needed if --pool-dir is on "
        "hugetlbfs.",
    )
    cold_start: Annotated[bool, Shown("on|off", "off")] = Field(
        False,
        description="Discard what an earlier daemon has left: free its memory and start with an empty cache.",
    )
    prefault_threads: Annotated[int, Shown("COUNT", "one per two cores, at most 16")] = Field(
        default_factory=default_prefault_threads,
        ge=1,
        le=1024,
        description="Threads that prefault the pool before it is pinned. More threads pin faster but take CPU from "
        "engines that start at the same time.",
    )
    numa: Literal["auto", "off"] = Field(
        "auto",
        description="NUMA placement of the pool. auto: bind it to the NUMA nodes of the GPUs in use, if there is more "
        "than one node. off: leave placement to the kernel.",
    )
    on_pin_failure: Literal["auto", "stay", "exit"] = Field(
        "auto",
        description="What to do if the pool cannot be pinned. stay: keep running, not ready, and report the reason. "
        "exit: report it and exit, with code 78 if a limit refuses the pool at every start, else 1. auto: exit where "
        "a service manager waits until the daemon is ready (NOTIFY_SOCKET), otherwise stay.",
    )
    memory_check: Annotated[bool, Shown("on|off", "on")] = Field(
        True,
        description="Check the pool against every memory limit before any of it is allocated, and refuse a pool that "
        "does not fit. Turn it off on virtual machines whose memory grows on demand.",
    )
    disk_dir: Directory = Field(
        None,
        description="Directory on a local disk for blocks that are used again. They outlive the pool and a reboot. "
        "Created if only its last component is missing.",
    )
    disk_size: DiskSize = Field(None, description="Bytes of --disk-dir to use. They are allocated at the first start.")
    disk_admission: Admission = Field(
        Admission.SECOND_USE,
        description="Which blocks are written to --disk-dir. second_use: those that are loaded after they were stored. "
        "all: every block. on_evict: every block that the pool is about to evict. none: no further blocks; existing "
        "ones are read.",
    )
    disk_writes_per_day: SizeOrOff = Field(
        None,
        description="Most bytes that are written to --disk-dir in a day, to protect a flash disk from wear. The rest "
        "of the day's budget is recorded there, so a restart does not renew it. off: no limit.",
    )
    disk_deadline: Seconds = Field(
        2.0,
        gt=0,
        description="Seconds after which a read of --disk-dir is late and its blocks count as misses. After three late "
        "or failed calls, the disk is not used until it works again.",
    )
    cluster_master: Master = Field(
        None,
        description="Master of a Mooncake Store for blocks that are shared with other nodes. For a group of masters: "
        "etcd://HOST:PORT. Requires kvsidecar[mooncake].",
    )
    cluster_hostname: Annotated[str | None, Field(min_length=1), Shown("ADDRESS", "auto")] = Field(
        None,
        description="Address at which the cluster's other nodes reach this one. auto: the address from which this node "
        "reaches --cluster-master.",
    )
    cluster_segment: SizeOrOff = Field(
        None,
        description="Memory, in addition to the pool, that this node gives to the cluster. Its content is lost when "
        "the daemon ends. off: none; the cluster uses the memory of other nodes.",
    )
    cluster_protocol: Literal["tcp", "rdma"] = Field("tcp", description="How blocks are transferred between nodes.")
    cluster_devices: Annotated[str | None, Field(min_length=1), Shown("LIST", "auto")] = Field(
        None, description="RDMA devices, separated by commas. auto: Mooncake chooses."
    )
    cluster_replicas: Annotated[int, Shown("COUNT")] = Field(
        1, ge=1, le=16, description="Number of nodes that get a copy of each block that this node writes."
    )
    cluster_soft_pin: Seconds = Field(
        0.0,
        ge=0,
        description="Time in seconds for which blocks written by this node are evicted only after all others. 0: none.",
    )
    cluster_tenant: Annotated[str, Field(min_length=1), Shown("NAME")] = Field(
        "default", description="Mooncake's tenant. Tenants have quotas, and do not see each other's blocks."
    )
    cluster_admission: Admission = Field(
        Admission.ALL,
        description="Which blocks are written to the cluster. all: every block. on_evict: every block that the pool is "
        "about to evict. second_use: those that are loaded after they were stored. none: no further blocks; those that "
        "others have written are read.",
    )
    cluster_deadline: Seconds = Field(
        2.0,
        gt=0,
        description="Seconds after which a read of the cluster is late and its blocks count as misses. After three "
        "late or failed calls, the cluster is not used until it works again.",
    )
    shared_dir: Directory = Field(
        None,
        description="Directory on a file system that several nodes mount, for blocks that are used again. The nodes "
        "share them. Created if only its last component is missing.",
    )
    shared_size: DiskSize = Field(
        None,
        description="Approximate size of the files of all nodes in --shared-dir together. Set the same on every node.",
    )
    shared_admission: Admission = Field(
        Admission.SECOND_USE,
        description="Which blocks are written to --shared-dir. second_use: those that are loaded after they were "
        "stored. all: every block. on_evict: every block that the pool is about to evict. none: no further blocks; "
        "existing ones are read.",
    )
    shared_deadline: Seconds = Field(
        2.0,
        gt=0,
        description="Seconds after which a read of --shared-dir is late and its blocks count as misses. After three "
        "late or failed calls, the directory is not used until it works again.",
    )
    # The curve is in docs/benchmarks.md, "Pacing": with 4 MiB a sampled token's copy takes about 50 µs (99 %: below
    # 100) while stores go at two thirds of the link; without a bound they have all of it and the token waits 500 µs.
    store_chunk: StoreChunk = Field(
        4 * MiB,
        description="Store pacing: the most bytes of stores in flight on a GPU while an engine is busy there. Keeps "
        "the engine's own small copies, such as sampled tokens, fast. Smaller values reduce store bandwidth. off: "
        "stores may use the whole link at any time.",
    )
    verify: Verify = Field(
        Verify.OFF,
        description="Checksum slots when they are sealed, and verify them before they are loaded. off: never. sample: "
        "one block in 16. always: every block. A mismatch is a miss, and the slot is quarantined. Checksums "
        "outlive the daemon with their blocks; blocks that were stored while it was off have none.",
    )
    eviction: Eviction = Field(
        Eviction.LRU,
        description="Which blocks a full pool evicts first. lru: the least recently used ones. rhythm: those that are "
        "expected to stay unused for longest, judged by the time between their past uses; for coding agents, whose "
        "sessions return after each tool call (docs/operating.md#eviction).",
    )
    lease_max: Seconds = Field(
        60.0,
        gt=0,
        description="Longest lease that a client can get, in seconds. Leased blocks are not evicted, so lower it if "
        "leases keep the pool full.",
    )
    pin_max: PoolSize = Field(
        Size(percent=10.0),
        description="Most bytes that kvsidecar pin may keep in the pool, as a size or as a percentage of the pool.",
    )
    zero_freed: Annotated[bool, Shown("on|off", "off")] = Field(
        False,
        description="Zero the bytes of a block soon after it is evicted, expires, is cleared, or fails to complete. "
        "Slots of an earlier daemon that hold no block are zeroed, too.",
    )
    drain_timeout: Seconds = Field(
        10.0,
        ge=0,
        description="Longest wait for running copies at shutdown, in seconds. Must be shorter than the grace period of "
        "systemd or Kubernetes.",
    )
    light_sleep: Seconds = Field(
        0.001,
        ge=0,
        le=10,
        description="How long the daemon's threads stay in a light sleep after a job, in seconds. They then wake at "
        "once for the next job, at the cost of a tenth of two cores. 0 turns it off. Always off on machines with fewer "
        "than four cores.",
    )
    # Longer than the drain_timeout of the daemon that ends, which finishes its copies and unpins before it gives way.
    lock_wait: Seconds = Field(
        15.0,
        ge=0,
        description="How long a starting daemon waits for the end of another daemon on the same socket or --pool-dir "
        "that is stopping or was killed, in seconds. Should exceed that daemon's --drain-timeout. If that daemon keeps "
        "serving, the start fails after a second. 0: do not wait.",
    )
    stuck_after: Seconds = Field(
        60.0,
        gt=0,
        description="Longest time that a copier may make no progress, in seconds: with a copy in flight, in a driver "
        "call, or not taking copies. About two seconds later the daemon kills it and starts another. Its jobs fail; "
        "the cache stays.",
    )
    tracing: Literal["off", "otlp"] = Field(
        "off",
        description="Export OpenTelemetry spans of jobs that belong to a sampled trace. otlp: export over OTLP, "
        "configured by the standard OTEL_* variables. Requires kvsidecar[tracing].",
    )
    log_format: Literal["auto", "text", "json"] = Field(
        "auto",
        description="Log format on standard error. auto: text on a terminal, otherwise json, one object per line.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Minimum severity of log records that are written."
    )

    _names: dict[str, str] = PrivateAttr(default_factory=dict)

    def called(self, option: str) -> str:
        """What the user calls an option, for the texts of errors: a flag, a variable, or a key of the file."""
        return self._names.get(option, option)

    def name(self, names: Mapping[str, str]) -> None:
        """Say what the user calls each option."""
        self._names.update(names)

    @property
    def socket_mode_bits(self) -> int:
        return int(self.socket_mode, 8)

    @property
    def table_path(self) -> Path | None:
        return None if self.table_dir is None else Path(self.table_dir)

    @property
    def tls_files(self) -> list[Path]:
        """The certificate, its key and the clients' CA, with ``tcp_listen``."""
        return [Path(path) for path in (self.tls_certificate, self.tls_key, self.tls_client_ca) if path is not None]

    @field_validator("*")
    @classmethod
    def _no_zero_bytes(cls, value: object) -> object:
        if isinstance(value, str) and "\0" in value:
            raise ValueError("contains a NUL character")  # which no path, name or address may
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        """Check options against each other. Blames the option that was given, where only one of the two was; others
        are in braces."""
        if self.slab_size != "auto":
            pool = self.pool_size.nbytes
            if pool is not None and self.slab_size > pool:
                self._blame("slab_size", f"is more than {{pool_size}} ({format_size(pool)})")
                self._blame("pool_size", f"is less than {{slab_size}} ({format_size(self.slab_size)})")
            if self.chunk_size % self.slab_size:
                self._blame("slab_size", f"does not divide {{chunk_size}} ({format_size(self.chunk_size)})")
                self._blame("chunk_size", f"is not a multiple of {{slab_size}} ({format_size(self.slab_size)})")
        files = ("tls_certificate", "tls_key", "tls_client_ca")
        if self.tcp_listen:
            if missing := [option for option in files if not getattr(self, option)]:
                self._blame("tcp_listen", f"needs {{{missing[0]}}}: TCP is served with mTLS only")
            if self.policy is None or not self.policy.names_certificates:
                self._blame("tcp_listen", "needs a rule of the policy with certificates: without one all are refused")
        for tier in ("disk", "shared"):
            if getattr(self, f"{tier}_dir") and not getattr(self, f"{tier}_size"):
                self._blame(f"{tier}_dir", f"needs {{{tier}_size}}: how many bytes of it to use")
        needs = {option: "tcp_listen" for option in files if getattr(self, option)}
        for tier, main in ("disk", "disk_dir"), ("cluster", "cluster_master"), ("shared", "shared_dir"):
            given = self.model_fields_set - {main}
            needs |= {option: main for option in given if option.startswith(f"{tier}_")}
        needs |= {"table_dir": "pool_dir"} if self.table_dir else {}
        for option, main in needs.items():
            if not getattr(self, main):
                self._blame(option, f"has no effect without {{{main}}}")
        if self.socket_group and self.socket_mode == "0600":
            self._blame("socket_group", "has no effect with {socket_mode} 0600: use 0660")
        return self

    def _blame(self, option: str, problem: str) -> None:
        if option in self.model_fields_set:
            raise PydanticCustomError("fit_together", "{problem}", {"option": option, "problem": problem})
