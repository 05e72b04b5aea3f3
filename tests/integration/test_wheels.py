"""Wheels for an image, fetched by the real pip."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.image.wheels import ImagePython, fetch_wheels


async def test_a_failed_download_leaves_nothing_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    pinned = b"nothing-of-the-kind==1 --hash=sha256:" + b"0" * 64 + b"\n"
    with pytest.raises(EnvironmentUnusable, match="cannot be downloaded: No matching distribution"):
        await fetch_wheels(
            pinned,
            ImagePython((3, 13, 5), "x86_64", (2, 41)),
            cache=tmp_path / "cache",
            progress=lambda line: None,
        )
    assert list((tmp_path / "cache").iterdir()) == []
