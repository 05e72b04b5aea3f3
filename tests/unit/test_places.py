"""Folders that are made in an image to mount something at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.launch.oci.mounts import make_places


def test_what_is_missing_is_made(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    make_places(str(tmp_path), ["/run/channel/box", "/run/channel", "/dev"])
    assert (tmp_path / "run" / "channel" / "box").is_dir()
    assert (tmp_path / "dev").is_dir()


@pytest.mark.parametrize("obstacle", ["/", "..", "nowhere", "channel", "other", None])
@pytest.mark.parametrize("where", ["run", "run/channel", "run/channel/box"])
def test_what_cannot_be_made_leaves_no_descriptor(tmp_path: Path, obstacle: str | None, where: str) -> None:
    (tmp_path / "run" / "channel" / "other").mkdir(parents=True)
    (at := tmp_path / "deep" / where).parent.mkdir(parents=True)
    at.write_text("") if obstacle is None else at.symlink_to(obstacle)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="/run/channel/box is or lies behind a link or a file"):
        make_places(str(tmp_path / "deep"), ["/run/channel/box"])
    assert os.listdir("/proc/self/fd") == before
