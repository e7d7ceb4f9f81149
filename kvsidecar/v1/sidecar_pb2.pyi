from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Namespace(_message.Message):
    __slots__ = ("model", "dtype", "kv_layout", "block_size", "tp_size", "pp_size", "hash_algorithm", "hash_bytes", "extra")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    model: str
    dtype: str
    kv_layout: str
    block_size: int
    tp_size: int
    pp_size: int
    hash_algorithm: str
    hash_bytes: int
    extra: str
    def __init__(self, model: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., block_size: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_size: _Optional[int] = ..., hash_algorithm: _Optional[str] = ..., hash_bytes: _Optional[int] = ..., extra: _Optional[str] = ...) -> None: ...

class Allocation(_message.Message):
    __slots__ = ("cuda_ipc_handle", "fd_index", "ranges", "own_fd", "size")
    CUDA_IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    FD_INDEX_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    OWN_FD_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    cuda_ipc_handle: bytes
    fd_index: int
    ranges: Ranges
    own_fd: int
    size: int
    def __init__(self, cuda_ipc_handle: _Optional[bytes] = ..., fd_index: _Optional[int] = ..., ranges: _Optional[_Union[Ranges, _Mapping]] = ..., own_fd: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Ranges(_message.Message):
    __slots__ = ("fd_indexes", "sizes")
    FD_INDEXES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    fd_indexes: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fd_indexes: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("allocation", "offset", "row_stride", "block_stride", "row_bytes", "num_rows")
    ALLOCATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROW_STRIDE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    allocation: int
    offset: int
    row_stride: int
    block_stride: int
    row_bytes: int
    num_rows: int
    def __init__(self, allocation: _Optional[int] = ..., offset: _Optional[int] = ..., row_stride: _Optional[int] = ..., block_stride: _Optional[int] = ..., row_bytes: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("group", "num_blocks", "shard", "num_shards", "regions", "slices")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    group: int
    num_blocks: int
    shard: int
    num_shards: int
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    slices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., num_blocks: _Optional[int] = ..., shard: _Optional[int] = ..., num_shards: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., slices: _Optional[_Iterable[int]] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("protocol", "token", "instance", "namespace", "rank", "world_size", "device", "allocations", "groups", "event_handles", "options", "served_name")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    token: bytes
    instance: str
    namespace: Namespace
    rank: int
    world_size: int
    device: str
    allocations: _containers.RepeatedCompositeFieldContainer[Allocation]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    event_handles: _containers.RepeatedScalarFieldContainer[bytes]
    options: _containers.RepeatedCompositeFieldContainer[Option]
    served_name: str
    def __init__(self, protocol: _Optional[int] = ..., token: _Optional[bytes] = ..., instance: _Optional[str] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., device: _Optional[str] = ..., allocations: _Optional[_Iterable[_Union[Allocation, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., event_handles: _Optional[_Iterable[bytes]] = ..., options: _Optional[_Iterable[_Union[Option, _Mapping]]] = ..., served_name: _Optional[str] = ...) -> None: ...

class Option(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("epoch", "session", "readiness", "version", "device_order", "device_order_refused", "token")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ORDER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ORDER_REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    session: int
    readiness: Readiness
    version: str
    device_order: bool
    device_order_refused: str
    token: bytes
    def __init__(self, epoch: _Optional[int] = ..., session: _Optional[int] = ..., readiness: _Optional[_Union[Readiness, _Mapping]] = ..., version: _Optional[str] = ..., device_order: bool = ..., device_order_refused: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class Readiness(_message.Message):
    __slots__ = ("state", "pool_bytes", "pinned_bytes", "pin_bytes_per_second", "eta_seconds", "reason", "serves_kept")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Readiness.State]
        STATE_STARTING: _ClassVar[Readiness.State]
        STATE_PINNING: _ClassVar[Readiness.State]
        STATE_READY: _ClassVar[Readiness.State]
        STATE_DRAINING: _ClassVar[Readiness.State]
        STATE_FAILED: _ClassVar[Readiness.State]
    STATE_UNSPECIFIED: Readiness.State
    STATE_STARTING: Readiness.State
    STATE_PINNING: Readiness.State
    STATE_READY: Readiness.State
    STATE_DRAINING: Readiness.State
    STATE_FAILED: Readiness.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIN_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ETA_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SERVES_KEPT_FIELD_NUMBER: _ClassVar[int]
    state: Readiness.State
    pool_bytes: int
    pinned_bytes: int
    pin_bytes_per_second: float
    eta_seconds: float
    reason: str
    serves_kept: bool
    def __init__(self, state: _Optional[_Union[Readiness.State, str]] = ..., pool_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., pin_bytes_per_second: _Optional[float] = ..., eta_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., serves_kept: bool = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("group", "hashes", "block_ids", "notes", "slice")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    group: int
    hashes: bytes
    block_ids: bytes
    notes: bytes
    slice: int
    def __init__(self, group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., block_ids: _Optional[bytes] = ..., notes: _Optional[bytes] = ..., slice: _Optional[int] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ("job", "blocks", "event", "deadline_ms", "traceparent", "ttl_seconds", "priority", "idle_ttl_seconds")
    class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PRIORITY_NORMAL: _ClassVar[Store.Priority]
        PRIORITY_LOW: _ClassVar[Store.Priority]
        PRIORITY_HIGH: _ClassVar[Store.Priority]
    PRIORITY_NORMAL: Store.Priority
    PRIORITY_LOW: Store.Priority
    PRIORITY_HIGH: Store.Priority
    JOB_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IDLE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    job: int
    blocks: _containers.RepeatedCompositeFieldContainer[Blocks]
    event: int
    deadline_ms: int
    traceparent: bytes
    ttl_seconds: int
    priority: Store.Priority
    idle_ttl_seconds: int
    def __init__(self, job: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Blocks, _Mapping]]] = ..., event: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[bytes] = ..., ttl_seconds: _Optional[int] = ..., priority: _Optional[_Union[Store.Priority, str]] = ..., idle_ttl_seconds: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("job", "lease", "blocks", "deadline_ms", "traceparent")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    job: int
    lease: int
    blocks: _containers.RepeatedCompositeFieldContainer[Blocks]
    deadline_ms: int
    traceparent: bytes
    def __init__(self, job: _Optional[int] = ..., lease: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Blocks, _Mapping]]] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[bytes] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("session", "store")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    session: int
    store: Store
    def __init__(self, session: _Optional[int] = ..., store: _Optional[_Union[Store, _Mapping]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("session", "load")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    session: int
    load: Load
    def __init__(self, session: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Flush(_message.Message):
    __slots__ = ("flush", "jobs", "timeout_ms", "mode")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[Flush.Mode]
        MODE_FINISH: _ClassVar[Flush.Mode]
        MODE_CANCEL: _ClassVar[Flush.Mode]
    MODE_UNSPECIFIED: Flush.Mode
    MODE_FINISH: Flush.Mode
    MODE_CANCEL: Flush.Mode
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    flush: int
    jobs: _containers.RepeatedScalarFieldContainer[int]
    timeout_ms: int
    mode: Flush.Mode
    def __init__(self, flush: _Optional[int] = ..., jobs: _Optional[_Iterable[int]] = ..., timeout_ms: _Optional[int] = ..., mode: _Optional[_Union[Flush.Mode, str]] = ...) -> None: ...

class Idle(_message.Message):
    __slots__ = ("idle",)
    IDLE_FIELD_NUMBER: _ClassVar[int]
    idle: bool
    def __init__(self, idle: bool = ...) -> None: ...

class Watch(_message.Message):
    __slots__ = ("protocol", "token", "namespace")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    token: bytes
    namespace: Namespace
    def __init__(self, protocol: _Optional[int] = ..., token: _Optional[bytes] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("register", "store", "load", "flush", "idle", "watch")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    register: Register
    store: Store
    load: Load
    flush: Flush
    idle: Idle
    watch: Watch
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., store: _Optional[_Union[Store, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., flush: _Optional[_Union[Flush, _Mapping]] = ..., idle: _Optional[_Union[Idle, _Mapping]] = ..., watch: _Optional[_Union[Watch, _Mapping]] = ...) -> None: ...

class JobDone(_message.Message):
    __slots__ = ("job", "outcome", "reason", "error", "copied_blocks", "skipped_blocks", "bytes", "copy_seconds", "queue_seconds")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[JobDone.Outcome]
        OUTCOME_DONE: _ClassVar[JobDone.Outcome]
        OUTCOME_DECLINED: _ClassVar[JobDone.Outcome]
        OUTCOME_FAILED: _ClassVar[JobDone.Outcome]
    OUTCOME_UNSPECIFIED: JobDone.Outcome
    OUTCOME_DONE: JobDone.Outcome
    OUTCOME_DECLINED: JobDone.Outcome
    OUTCOME_FAILED: JobDone.Outcome
    JOB_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    job: int
    outcome: JobDone.Outcome
    reason: str
    error: str
    copied_blocks: int
    skipped_blocks: int
    bytes: int
    copy_seconds: float
    queue_seconds: float
    def __init__(self, job: _Optional[int] = ..., outcome: _Optional[_Union[JobDone.Outcome, str]] = ..., reason: _Optional[str] = ..., error: _Optional[str] = ..., copied_blocks: _Optional[int] = ..., skipped_blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., copy_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class Flushed(_message.Message):
    __slots__ = ("flush", "pending")
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    flush: int
    pending: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, flush: _Optional[int] = ..., pending: _Optional[_Iterable[int]] = ...) -> None: ...

class WaitIssued(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: int
    def __init__(self, event: _Optional[int] = ...) -> None: ...

class Residency(_message.Message):
    __slots__ = ("sequence", "reset", "changes", "complete")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    reset: bool
    changes: _containers.RepeatedCompositeFieldContainer[ResidencyChange]
    complete: bool
    def __init__(self, sequence: _Optional[int] = ..., reset: bool = ..., changes: _Optional[_Iterable[_Union[ResidencyChange, _Mapping]]] = ..., complete: bool = ...) -> None: ...

class ResidencyChange(_message.Message):
    __slots__ = ("kind", "group", "hashes", "notes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ResidencyChange.Kind]
        KIND_STORED: _ClassVar[ResidencyChange.Kind]
        KIND_REMOVED: _ClassVar[ResidencyChange.Kind]
        KIND_CLEARED: _ClassVar[ResidencyChange.Kind]
        KIND_NOTES: _ClassVar[ResidencyChange.Kind]
        KIND_TIER_STORED: _ClassVar[ResidencyChange.Kind]
        KIND_TIER_REMOVED: _ClassVar[ResidencyChange.Kind]
        KIND_TIER_CLEARED: _ClassVar[ResidencyChange.Kind]
    KIND_UNSPECIFIED: ResidencyChange.Kind
    KIND_STORED: ResidencyChange.Kind
    KIND_REMOVED: ResidencyChange.Kind
    KIND_CLEARED: ResidencyChange.Kind
    KIND_NOTES: ResidencyChange.Kind
    KIND_TIER_STORED: ResidencyChange.Kind
    KIND_TIER_REMOVED: ResidencyChange.Kind
    KIND_TIER_CLEARED: ResidencyChange.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    kind: ResidencyChange.Kind
    group: int
    hashes: bytes
    notes: bytes
    def __init__(self, kind: _Optional[_Union[ResidencyChange.Kind, str]] = ..., group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., notes: _Optional[bytes] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("registered", "done", "flushed", "readiness", "wait_issued", "residency")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    WAIT_ISSUED_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    done: JobDone
    flushed: Flushed
    readiness: Readiness
    wait_issued: WaitIssued
    residency: Residency
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., done: _Optional[_Union[JobDone, _Mapping]] = ..., flushed: _Optional[_Union[Flushed, _Mapping]] = ..., readiness: _Optional[_Union[Readiness, _Mapping]] = ..., wait_issued: _Optional[_Union[WaitIssued, _Mapping]] = ..., residency: _Optional[_Union[Residency, _Mapping]] = ...) -> None: ...

class LookupGroup(_message.Message):
    __slots__ = ("group", "hashes", "wanted", "lease_last", "tail")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_LAST_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    group: int
    hashes: bytes
    wanted: bytes
    lease_last: int
    tail: int
    def __init__(self, group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., wanted: _Optional[bytes] = ..., lease_last: _Optional[int] = ..., tail: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace", "groups", "mode", "lease_ms", "token", "fetch_ms", "prefill_rate", "choose", "fetch_tokens", "lease", "touch", "pause_seconds", "needed_tokens", "loaded_tokens")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[LookupRequest.Mode]
        MODE_PREFIX: _ClassVar[LookupRequest.Mode]
        MODE_BITMAP: _ClassVar[LookupRequest.Mode]
    MODE_UNSPECIFIED: LookupRequest.Mode
    MODE_PREFIX: LookupRequest.Mode
    MODE_BITMAP: LookupRequest.Mode
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_RATE_FIELD_NUMBER: _ClassVar[int]
    CHOOSE_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    groups: _containers.RepeatedCompositeFieldContainer[LookupGroup]
    mode: LookupRequest.Mode
    lease_ms: int
    token: bytes
    fetch_ms: int
    prefill_rate: float
    choose: bool
    fetch_tokens: int
    lease: int
    touch: bool
    pause_seconds: int
    needed_tokens: int
    loaded_tokens: int
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[LookupGroup, _Mapping]]] = ..., mode: _Optional[_Union[LookupRequest.Mode, str]] = ..., lease_ms: _Optional[int] = ..., token: _Optional[bytes] = ..., fetch_ms: _Optional[int] = ..., prefill_rate: _Optional[float] = ..., choose: bool = ..., fetch_tokens: _Optional[int] = ..., lease: _Optional[int] = ..., touch: bool = ..., pause_seconds: _Optional[int] = ..., needed_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("ready", "epoch", "lease", "lease_ms", "groups", "asking")
    READY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    ASKING_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    epoch: int
    lease: int
    lease_ms: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupHits]
    asking: bool
    def __init__(self, ready: bool = ..., epoch: _Optional[int] = ..., lease: _Optional[int] = ..., lease_ms: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupHits, _Mapping]]] = ..., asking: bool = ...) -> None: ...

class GroupHits(_message.Message):
    __slots__ = ("group", "hits", "bitmap", "coming", "held", "first", "count")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    group: int
    hits: int
    bitmap: bytes
    coming: int
    held: bytes
    first: int
    count: int
    def __init__(self, group: _Optional[int] = ..., hits: _Optional[int] = ..., bitmap: _Optional[bytes] = ..., coming: _Optional[int] = ..., held: _Optional[bytes] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: bool = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease", "lease_ms")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    lease_ms: int
    def __init__(self, lease: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("renewed", "lease_ms")
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    renewed: bool
    lease_ms: int
    def __init__(self, renewed: bool = ..., lease_ms: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("session", "page")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    session: int
    page: StatusPage
    def __init__(self, session: _Optional[int] = ..., page: _Optional[_Union[StatusPage, _Mapping]] = ...) -> None: ...

class StatusPage(_message.Message):
    __slots__ = ("after_namespace", "after_session")
    AFTER_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_SESSION_FIELD_NUMBER: _ClassVar[int]
    after_namespace: Namespace
    after_session: int
    def __init__(self, after_namespace: _Optional[_Union[Namespace, _Mapping]] = ..., after_session: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("epoch", "version", "uptime_seconds", "readiness", "pool", "namespaces", "ranks", "jobs", "refusals", "backend", "lookups", "partial", "session_ended", "totals", "more", "tiers", "pins", "shares", "devices")
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    READINESS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ENDED_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: str
    uptime_seconds: float
    readiness: Readiness
    pool: PoolStatus
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    jobs: JobsStatus
    refusals: _containers.ScalarMap[str, int]
    backend: str
    lookups: LookupsStatus
    partial: bool
    session_ended: bool
    totals: StatusTotals
    more: bool
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    pins: _containers.RepeatedCompositeFieldContainer[PinStatus]
    shares: _containers.RepeatedCompositeFieldContainer[ShareStatus]
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStatus]
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., readiness: _Optional[_Union[Readiness, _Mapping]] = ..., pool: _Optional[_Union[PoolStatus, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., jobs: _Optional[_Union[JobsStatus, _Mapping]] = ..., refusals: _Optional[_Mapping[str, int]] = ..., backend: _Optional[str] = ..., lookups: _Optional[_Union[LookupsStatus, _Mapping]] = ..., partial: bool = ..., session_ended: bool = ..., totals: _Optional[_Union[StatusTotals, _Mapping]] = ..., more: bool = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., pins: _Optional[_Iterable[_Union[PinStatus, _Mapping]]] = ..., shares: _Optional[_Iterable[_Union[ShareStatus, _Mapping]]] = ..., devices: _Optional[_Iterable[_Union[DeviceStatus, _Mapping]]] = ...) -> None: ...

class DeviceStatus(_message.Message):
    __slots__ = ("uuid", "down", "copier_deaths")
    UUID_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    COPIER_DEATHS_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    down: str
    copier_deaths: int
    def __init__(self, uuid: _Optional[str] = ..., down: _Optional[str] = ..., copier_deaths: _Optional[int] = ...) -> None: ...

class ShareStatus(_message.Message):
    __slots__ = ("name", "used_bytes", "guaranteed_bytes", "max_bytes", "pinned_bytes", "evicted_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GUARANTEED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    used_bytes: int
    guaranteed_bytes: int
    max_bytes: int
    pinned_bytes: int
    evicted_bytes: int
    def __init__(self, name: _Optional[str] = ..., used_bytes: _Optional[int] = ..., guaranteed_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., evicted_bytes: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "off", "capacity_bytes", "used_bytes", "blocks", "kept_blocks", "read_bytes", "written_bytes", "failures", "write_budget_bytes", "evicted_blocks", "shares")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    name: str
    off: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    kept_blocks: int
    read_bytes: int
    written_bytes: int
    failures: int
    write_budget_bytes: int
    evicted_blocks: int
    shares: _containers.RepeatedCompositeFieldContainer[ShareStatus]
    def __init__(self, name: _Optional[str] = ..., off: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., kept_blocks: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., failures: _Optional[int] = ..., write_budget_bytes: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[ShareStatus, _Mapping]]] = ...) -> None: ...

class PinStatus(_message.Message):
    __slots__ = ("name", "owner", "namespace", "blocks", "bytes", "seconds_left")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    namespace: Namespace
    blocks: int
    bytes: int
    seconds_left: float
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds_left: _Optional[float] = ...) -> None: ...

class StatusTotals(_message.Message):
    __slots__ = ("namespaces", "blocks", "bytes", "ranks", "jobs_running", "attached_ranks")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    JOBS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_RANKS_FIELD_NUMBER: _ClassVar[int]
    namespaces: int
    blocks: int
    bytes: int
    ranks: int
    jobs_running: int
    attached_ranks: int
    def __init__(self, namespaces: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., ranks: _Optional[int] = ..., jobs_running: _Optional[int] = ..., attached_ranks: _Optional[int] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("total_bytes", "used_bytes", "free_bytes", "reserved_bytes", "leased_bytes", "quarantined_bytes", "page_kind", "numa_nodes", "blocks", "leases", "evicted_blocks", "evicted_bytes", "carrier", "kept_blocks", "dropped_blocks", "cold_start_reason", "unzeroed_bytes", "rounding_bytes", "eviction")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_KIND_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    KEPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COLD_START_REASON_FIELD_NUMBER: _ClassVar[int]
    UNZEROED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUNDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int
    leased_bytes: int
    quarantined_bytes: int
    page_kind: str
    numa_nodes: _containers.RepeatedScalarFieldContainer[int]
    blocks: int
    leases: int
    evicted_blocks: int
    evicted_bytes: int
    carrier: str
    kept_blocks: int
    dropped_blocks: int
    cold_start_reason: str
    unzeroed_bytes: int
    rounding_bytes: int
    eviction: str
    def __init__(self, total_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., page_kind: _Optional[str] = ..., numa_nodes: _Optional[_Iterable[int]] = ..., blocks: _Optional[int] = ..., leases: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., evicted_bytes: _Optional[int] = ..., carrier: _Optional[str] = ..., kept_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., cold_start_reason: _Optional[str] = ..., unzeroed_bytes: _Optional[int] = ..., rounding_bytes: _Optional[int] = ..., eviction: _Optional[str] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("namespace", "blocks", "bytes", "hits", "misses", "differs", "needed_tokens", "loaded_tokens", "served_name", "digest")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    blocks: int
    bytes: int
    hits: int
    misses: int
    differs: _containers.RepeatedScalarFieldContainer[str]
    needed_tokens: int
    loaded_tokens: int
    served_name: str
    digest: str
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., differs: _Optional[_Iterable[str]] = ..., needed_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., served_name: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("session", "instance", "rank", "world_size", "device", "pid", "imported_bytes", "jobs_running", "attached_seconds", "namespace", "idle", "stored_bytes", "loaded_bytes", "served_name")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOBS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAME_FIELD_NUMBER: _ClassVar[int]
    session: int
    instance: str
    rank: int
    world_size: int
    device: str
    pid: int
    imported_bytes: int
    jobs_running: int
    attached_seconds: float
    namespace: Namespace
    idle: bool
    stored_bytes: int
    loaded_bytes: int
    served_name: str
    def __init__(self, session: _Optional[int] = ..., instance: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., device: _Optional[str] = ..., pid: _Optional[int] = ..., imported_bytes: _Optional[int] = ..., jobs_running: _Optional[int] = ..., attached_seconds: _Optional[float] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., idle: bool = ..., stored_bytes: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., served_name: _Optional[str] = ...) -> None: ...

class JobsStatus(_message.Message):
    __slots__ = ("queued", "running", "oldest_inflight_seconds", "stores_done", "loads_done", "stored_bytes", "loaded_bytes", "loaded_tokens")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    OLDEST_INFLIGHT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STORES_DONE_FIELD_NUMBER: _ClassVar[int]
    LOADS_DONE_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queued: int
    running: int
    oldest_inflight_seconds: float
    stores_done: int
    loads_done: int
    stored_bytes: int
    loaded_bytes: int
    loaded_tokens: int
    def __init__(self, queued: _Optional[int] = ..., running: _Optional[int] = ..., oldest_inflight_seconds: _Optional[float] = ..., stores_done: _Optional[int] = ..., loads_done: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., loaded_tokens: _Optional[int] = ...) -> None: ...

class LookupsStatus(_message.Message):
    __slots__ = ("hits", "misses", "needed_tokens", "loaded_tokens")
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hits: int
    misses: int
    needed_tokens: int
    loaded_tokens: int
    def __init__(self, hits: _Optional[int] = ..., misses: _Optional[int] = ..., needed_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace", "all", "share", "groups", "unused_seconds")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    all: bool
    share: str
    groups: _containers.RepeatedCompositeFieldContainer[LookupGroup]
    unused_seconds: int
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., all: bool = ..., share: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[LookupGroup, _Mapping]]] = ..., unused_seconds: _Optional[int] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("name", "namespace", "groups", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    namespace: Namespace
    groups: _containers.RepeatedCompositeFieldContainer[LookupGroup]
    seconds: int
    def __init__(self, name: _Optional[str] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[LookupGroup, _Mapping]]] = ..., seconds: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("blocks", "bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: bool
    def __init__(self, unpinned: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelDrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelDrainReply(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: bool = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "num_fds", "client", "fence")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NUM_FDS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    num_fds: int
    client: str
    fence: bool
    def __init__(self, protocol: _Optional[int] = ..., num_fds: _Optional[int] = ..., client: _Optional[str] = ..., fence: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("token", "epoch", "error", "local_protocol", "num_pidfds", "fence")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NUM_PIDFDS_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    epoch: int
    error: str
    local_protocol: bool
    num_pidfds: int
    fence: bool
    def __init__(self, token: _Optional[bytes] = ..., epoch: _Optional[int] = ..., error: _Optional[str] = ..., local_protocol: bool = ..., num_pidfds: _Optional[int] = ..., fence: bool = ...) -> None: ...

class LocalRequest(_message.Message):
    __slots__ = ("call", "attach", "detach", "lookup", "release", "renew")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    call: int
    attach: AttachRequest
    detach: Detach
    lookup: LookupRequest
    release: ReleaseRequest
    renew: RenewRequest
    def __init__(self, call: _Optional[int] = ..., attach: _Optional[_Union[AttachRequest, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., renew: _Optional[_Union[RenewRequest, _Mapping]] = ...) -> None: ...

class LocalReply(_message.Message):
    __slots__ = ("call", "attach", "ended", "lookup", "release", "renew", "error")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call: int
    attach: AttachReply
    ended: Ended
    lookup: LookupReply
    release: ReleaseReply
    renew: RenewReply
    error: LocalError
    def __init__(self, call: _Optional[int] = ..., attach: _Optional[_Union[AttachReply, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., lookup: _Optional[_Union[LookupReply, _Mapping]] = ..., release: _Optional[_Union[ReleaseReply, _Mapping]] = ..., renew: _Optional[_Union[RenewReply, _Mapping]] = ..., error: _Optional[_Union[LocalError, _Mapping]] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ended(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: LocalError
    def __init__(self, error: _Optional[_Union[LocalError, _Mapping]] = ...) -> None: ...

class LocalError(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: int
    text: str
    def __init__(self, code: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...
