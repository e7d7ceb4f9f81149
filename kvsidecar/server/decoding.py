"""Answers requests that do not parse with a clear error. gRPC itself answers UNKNOWN and logs a stack trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvsidecar.errors import InvalidRequest
from kvsidecar.server.status_codes import code_of


class TolerantRegistrar:
    """Takes the server's place when a service is added, and wraps its methods to handle requests that do not parse.

    A unary method is not called for such a request. A streaming method reads an `InvalidRequest` instead of the
    message, and must raise it. Wrapping costs nothing per call, unlike an interceptor.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, _handlers: object) -> None:
        """Do nothing: `add_registered_method_handlers` gets the same methods."""

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        tolerant = {name: _tolerant(method) for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, tolerant),))


def _tolerant(method: Any) -> Any:
    def decode(data: bytes) -> Any:
        try:
            return method.request_deserializer(data)
        except DecodeError as error:
            return InvalidRequest(f"a message of {len(data)} bytes does not parse: {error}")

    if method.request_streaming:
        return grpc.stream_stream_rpc_method_handler(method.stream_stream, decode, method.response_serializer)

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, InvalidRequest):
            await context.abort(code_of(request), str(request))
        return await method.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(call, decode, method.response_serializer)
