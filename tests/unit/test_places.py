"""Folders that are made in an image to mount something at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.launch.oci.mounts import make_places


@pytest.mark.parametrize(
    ("link", "target", "made"),
    [
        ("run", "/var/run", "var/run/channel/box"),
        ("run", "var/run", "var/run/channel/box"),
        ("run", "../../outside", "outside/channel/box"),
        ("run/channel", "../elsewhere", "elsewhere/box"),
        ("run/channel/box", "/a/b", "a/b"),
    ],
)
def test_where_a_link_leads_nowhere_its_target_is_made_in_the_image(
    tmp_path: Path, link: str, target: str, made: str
) -> None:
    root = tmp_path / "deep" / "root"
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(target)
    make_places(str(root), ["/run/channel/box", "/run/channel"])
    assert (root / made).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["root"]


@pytest.mark.parametrize("obstacle", ["file", "loop", "chain"])
def test_what_cannot_be_made_leaves_no_descriptor(tmp_path: Path, obstacle: str) -> None:
    (tmp_path / "run").mkdir()
    if obstacle == "file":
        (tmp_path / "run" / "channel").write_text("")
    elif obstacle == "loop":
        (tmp_path / "run" / "channel").symlink_to("channel")
    else:
        (tmp_path / "run" / "channel").symlink_to("0")
        for number in range(30):
            (tmp_path / "run" / str(number)).symlink_to(str(number + 1))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"channel|\d"):
        make_places(str(tmp_path), ["/run/channel/box"])
    assert os.listdir("/proc/self/fd") == before
