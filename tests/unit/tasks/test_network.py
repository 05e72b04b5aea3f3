"""The hosts that a task asks for, and who has them."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.tasks.rows import make_task
from orchestrator.types import BadTask, Task


def read(network: Any) -> Task | BadTask:
    return make_task({"question": "?", "answer": "1", "network": network}, source="s", place="line 1", root=None)


@pytest.mark.parametrize(
    ("network", "hosts"),
    [
        (None, ()),
        ("", ()),
        ("no-network", ()),
        ({"mode": "no-network", "allowed_hosts": ["pypi.org"]}, ()),
        ("public", ("*",)),
        ({"mode": "allowlist"}, ()),
        ({"allowed_hosts": ["pypi.org", "*.example.org:8443"]}, ("pypi.org", "*.example.org:8443")),
        ({"mode": "allowlist", "allowed_hosts": ("a.example",)}, ("a.example",)),
    ],
)
def test_what_a_row_asks_for(network: Any, hosts: tuple[str, ...]) -> None:
    task = read(network)
    assert isinstance(task, Task), task
    assert task.network == hosts


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (7, "network must be an object, not int"),
        ("open", "network has the mode 'open'; valid are no-network, allowlist, public"),
        ({"mode": ["public"]}, "network has the mode"),
        ({"hosts": []}, "network has the unknown 'hosts'"),
        ({"allowed_hosts": "pypi.org"}, "allowed_hosts must be a list of texts, not str"),
        ({"allowed_hosts": [{"host": "db", "private": True}]}, "allowed_hosts must be a list of texts, not of"),
        ({"allowed_hosts": ["127.0.0.1"]}, "allowed_hosts: 127.0.0.1 is a private address"),
        ({"allowed_hosts": ["0x7f.1"]}, "allowed_hosts: "),
        ({"allowed_hosts": ["a b"]}, "allowed_hosts: "),
        ({"allowed_hosts": ["x.example"] * 300}, "allowed_hosts has 300 entries, at most 256 are allowed"),
    ],
)
def test_what_no_row_can_ask_for(network: Any, reason: str) -> None:
    task = read(network)
    assert isinstance(task, BadTask), task
    assert reason in task.reason
