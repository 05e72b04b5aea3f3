"""What an image or a wheel is built from reaches whoever builds it."""

from __future__ import annotations

import re
import tomllib
from pathlib import PurePosixPath

from tests.fakes.runs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]


def kept(name: str) -> bool:
    """Whether .dockerignore lets it through to the Engine."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    return any(PurePosixPath(name).is_relative_to(line[1:]) for line in lines if line.startswith("!"))


def test_docker_is_sent_what_the_orchestrator_is_installed_from() -> None:
    """examples/docker/Dockerfile copies the whole context and installs it."""
    needed = {"pyproject.toml", "constraints.txt", PROJECT["project"]["readme"], *WHEEL["packages"]}
    needed |= set(PROJECT["project"]["license-files"]) | set(WHEEL["force-include"])
    assert {name for name in needed if not kept(name)} == set()
    assert all((ROOT / name).exists() for name in needed)


def test_docker_is_sent_what_the_sandbox_image_copies() -> None:
    lines = (ROOT / "Dockerfile.sandbox").read_text().splitlines()
    copied = [re.split(r"\s+", line)[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    names = [name for names in copied for name in names if name != "wheel[s]"]  # brought along, or absent
    assert names
    assert {name for name in names if not kept(name.removesuffix("requirements*.txt").rstrip("/"))} == set()


def test_docker_is_sent_nothing_else_than_that() -> None:
    assert not any(
        kept(name) for name in (".env", ".git/config", "runs/1/run.json", "data/gaia", ".venv/bin/python")
    )
