"""A collector of OpenTelemetry: the protocol's own service over gRPC, which keeps what it is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector(pb_grpc.TraceServiceServicer):
    """`spans` by their ids; `services`: the names of who sent them."""

    address: str = ""
    spans: dict[bytes, Span] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)

    async def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        for sent in request.resource_spans:
            told = {one.key: one.value.string_value for one in sent.resource.attributes}
            self.services.add(told["service.name"])
            for scope in sent.scope_spans:
                for span in scope.spans:
                    assert span.span_id not in self.spans, "a span was sent twice"
                    self.spans[span.span_id] = span
        return pb.ExportTraceServiceResponse()

    def named(self, prefix: str) -> list[Span]:
        return [span for span in self.spans.values() if span.name.startswith(prefix)]


def attributes(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [part.string_value for part in value.values] if kind == "array_value" else value
    return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector, server = Collector(), grpc.aio.server()
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
