"""The variables by which an agent's processes find what is outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.runner import relay as relay_module
from sandbox.runner import world as world_module
from sandbox.runner.world import world
from sandbox.types import AgentSettings, Assignment


def test_services_are_asked_without_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost pypi.org\n127.0.2.1\tdb database # of the task\n\n127.0.2.9 other\n#\n")
    monkeypatch.setattr(world_module, "_HOSTS", str(hosts))
    listeners = (pb.Listener(address="127.0.0.1", is_proxy=True), pb.Listener(address="127.0.2.1"))
    assignment = Assignment("?", AgentSettings(max_steps=1, step_timeout_s=1.0), listeners=listeners)

    def call(requests: Iterator[pb.RelayRequest]) -> Iterator[pb.RelayResponse]:
        return iter(())

    found = world(assignment, call, tmp_path).environment  # type: ignore[arg-type]
    assert found["no_proxy"].split(",") == ["localhost", "127.0.0.1", "::1", "127.0.2.1", "db", "database"]
    assert found["http_proxy"].startswith("http://127.0.0.1:")


def test_the_usual_port_is_taken_where_it_is_free() -> None:
    first = relay_module._listening("127.0.0.9", 0)
    second = relay_module._listening("127.0.0.9", 0)
    with first, second:
        assert first.getsockname() == ("127.0.0.9", 61_080)
        assert second.getsockname()[1] not in (0, 61_080)
        with pytest.raises(OSError):
            relay_module._listening("127.0.0.9", second.getsockname()[1])
