"""Control groups of a forked sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.launch.oci import groups


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cgroup.freeze": "0", "cgroup.events": "populated 1\nfrozen 0"}, "0"),
        ({"freezer.state": "THAWED"}, "THAWED"),
    ],
)
def test_what_does_not_stand_still_in_time_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: str
) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"cgroup_paths": {"": str(tmp_path)}}))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(groups, "_FREEZING_S", 0.0)
    if "freezer.state" in files:  # the kernel has it say FREEZING
        monkeypatch.setattr(
            groups,
            "_FREEZER_V1",
            ("freezer.state", "freezer.state", "FREEZING", "FROZEN", "THAWED", "THAWED"),
        )
    assert not groups.freeze(str(tmp_path), still=True)
    assert (tmp_path / next(iter(files))).read_text() == expected
