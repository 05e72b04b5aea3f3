"""A cluster without Ray, whose nodes are looked at often."""

from __future__ import annotations

import pytest

from orchestrator.cluster import members as members_module
from orchestrator.cluster import node as node_module


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are looked at often."""
    for module, name in ((members_module, "LOOK_S"), (members_module, "JOIN_AGAIN_S"), (node_module, "PULSE_S")):
        monkeypatch.setattr(module, name, 0.02)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent node is soon noticed. Long enough that a busy machine makes no node silent."""
    monkeypatch.setattr(node_module, "SILENT_S", 1.0)
    monkeypatch.setattr(node_module, "GRACE_S", 0.5)
