"""Control groups of a forked sandbox."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from orchestrator.launch.oci import groups


def test_on_a_full_disk_nothing_is_left_that_could_not_be_cleared(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OSError, match=r"no place for what is remembered of it in .*box: File too large"):
            groups.make_groups({"linux": {"resources": {}}}, str(tmp_path / "box"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


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
