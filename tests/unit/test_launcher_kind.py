"""What `env.launcher auto` is: where Docker answers, where it does not, and where neither does."""

from __future__ import annotations

import pytest

from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.host import launcher_kind as module
from orchestrator.host.launcher_kind import launcher_kind
from orchestrator.launch import auto
from orchestrator.settings.sandbox import SandboxSettings


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/docker.sock")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"launcher": "docker"}, "docker"),
        ({"launcher": "oci"}, "oci"),
        ({"launcher": "process"}, "process"),
        ({"sandbox_root": "writable"}, "oci"),
        ({"sandbox_image": "./image.tar"}, "oci"),
        ({"docker_runtime": "kata"}, "auto"),
    ],
)
async def test_what_is_known_is_asked_of_nobody(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], kind: str
) -> None:
    monkeypatch.delattr(module, "no_docker")
    notes: list[str] = []
    assert await launcher_kind(SandboxSettings(**settings), notes) == kind  # type: ignore[arg-type]
    assert notes == []


async def test_without_docker_the_oci_runtime_takes_its_place_and_says_so(
    monkeypatch: pytest.MonkeyPatch, no_engine: None
) -> None:
    monkeypatch.setattr(auto, "why_not_here", lambda runtime, waived: None)
    notes: list[str] = []
    assert await launcher_kind(SandboxSettings(), notes) == "oci"
    assert len(notes) == 1
    assert notes[0].startswith("sandboxes are made by runc itself, as ")
    assert "Docker is not running here" in notes[0]


async def test_where_neither_works_both_reasons_are_told(monkeypatch: pytest.MonkeyPatch, no_engine: None) -> None:
    monkeypatch.setattr(auto, "why_not_here", lambda runtime, waived: f"there is no {runtime}")
    with pytest.raises(
        EnvironmentUnusable, match=r"^Docker is not running.*; the launcher oci cannot help here: there is no runc"
    ):
        await launcher_kind(SandboxSettings(), [])


@pytest.mark.parametrize("launcher", ["docker", "process"])
def test_a_root_that_the_launcher_cannot_bound_is_refused(launcher: str) -> None:
    with pytest.raises(ConfigError, match=rf"writable needs --env\.launcher oci, not {launcher}"):
        SandboxSettings(launcher=launcher, sandbox_root="writable")  # type: ignore[arg-type]
