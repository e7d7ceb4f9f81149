"""Options of every gRPC channel of a client."""

CHANNEL_OPTIONS = [
    # By default the channels of a process share connections and their backoff: a channel to a new daemon would wait up
    # to two minutes because of the old one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
