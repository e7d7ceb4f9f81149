"""The gRPC status code of each exception. A test ensures that every error has one."""

from __future__ import annotations

import grpc

from kvsidecar import errors

CODES: dict[type[errors.KVSidecarError], grpc.StatusCode] = {
    errors.KVSidecarError: grpc.StatusCode.INTERNAL,
    # requests
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NamespaceMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownPeer: grpc.StatusCode.UNAUTHENTICATED,
    errors.AccessDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unfinished: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    # devices
    errors.DeviceError: grpc.StatusCode.INTERNAL,
    errors.DriverUnusable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeviceNotFound: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ImportRefused: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DeviceLost: grpc.StatusCode.UNAVAILABLE,
    errors.CopyFailed: grpc.StatusCode.INTERNAL,
    # startup: these end the daemon or make it not ready, and never reach a client
    errors.ConfigError: grpc.StatusCode.INTERNAL,
    errors.KernelRefuses: grpc.StatusCode.INTERNAL,
    errors.SocketInUse: grpc.StatusCode.INTERNAL,
    errors.AddressUnavailable: grpc.StatusCode.INTERNAL,
    errors.TooManyProcesses: grpc.StatusCode.INTERNAL,
    errors.PoolRefused: grpc.StatusCode.UNAVAILABLE,
    errors.PinFailed: grpc.StatusCode.UNAVAILABLE,
    errors.PinStopped: grpc.StatusCode.UNAVAILABLE,
    errors.KeptRefused: grpc.StatusCode.UNAVAILABLE,
    # between the daemon and a tier's process
    errors.TierFailed: grpc.StatusCode.INTERNAL,
    # raised by the client library
    errors.ClientError: grpc.StatusCode.INTERNAL,
    errors.DaemonUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.SocketDenied: grpc.StatusCode.UNAVAILABLE,
    errors.AttachRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.RequestDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotExportable: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(error: errors.KVSidecarError) -> grpc.StatusCode:
    return CODES[type(error)]
