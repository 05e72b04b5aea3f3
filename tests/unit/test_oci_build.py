"""Making images without an Engine: what needs neither a runtime nor root."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.image.base import DEBIAN_BASE
from orchestrator.launch.oci import build
from orchestrator.launch.oci.build import ensure_stored
from orchestrator.launch.oci.buildah import why_failed
from orchestrator.launch.oci.store import ROOT, ImageStore
from tests.fakes.archives import file, layer, saved

# ---------------------------------------------------------------- the store


def test_a_draft_that_was_not_kept_is_gone(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    with store.draft() as draft:
        (draft / "file").touch()
    assert list((tmp_path / "drafts").iterdir()) == []


def test_the_draft_of_a_killed_process_goes_with_what_is_unused(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    (left := tmp_path / "drafts" / "of-a-killed-process" / ROOT).mkdir(parents=True)
    with store.draft() as draft:
        assert store.remove_unused() == 1
        assert draft.exists()
    assert not left.exists()


def test_no_room_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentUnusable, match=r"^no room for an image in .*: Not a directory$"):
        with ImageStore(tmp_path / "file").draft():
            pass


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_only_this_user_enters_the_store_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = ImageStore(tmp_path / "cache" / "ours" / "oci")
        image = store.put(saved(tmp_path / "i.tar", layer(file("a/b/c", b"x"))), "n")
        with store.draft() as draft:
            made = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
            folders = [path for path in made if path.is_dir() and not path.is_relative_to(image.root)]
            assert draft in folders
            assert {oct(stat.S_IMODE(path.stat().st_mode)) for path in folders} == {"0o700"}
    finally:
        os.umask(before)
    # But all that an image has is for all users of its sandboxes.
    modes = {str(path.relative_to(image.root)): path.stat().st_mode for path in image.root.rglob("*")}
    assert {oct(stat.S_IMODE(modes[name])) for name in ("a", "a/b", "etc", "run", "proc")} == {"0o755"}
    assert {oct(stat.S_IMODE(modes[name])) for name in ("a/b/c", "etc/hosts")} == {"0o644"}


def test_a_store_that_was_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "store" / "images").mkdir(parents=True)
    (tmp_path / "store").chmod(0o777)
    with ImageStore(tmp_path / "store").draft():
        assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


# ---------------------------------------------------------------- refusals that say what to do


async def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str = "t:1", **asked: Any) -> str:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    asked = {"runtime": "runc", **asked}
    with pytest.raises(EnvironmentUnusable) as caught:
        await ensure_stored(tag, store=ImageStore(tmp_path), progress=lambda line: None, **asked)
    assert not [*(tmp_path / "images").glob("*"), *(tmp_path / "drafts").glob("*")]
    return str(caught.value)


async def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "install runc or crun" in await refused(tmp_path, monkeypatch, runtime="no-such-runtime")
    assert "is a path" in await refused(tmp_path, monkeypatch, tag="./t")
    asked: list[str] = []
    monkeypatch.setattr(build, "find_oci_runtime", lambda name: asked.append(name) or "/runc")
    monkeypatch.setenv("PATH", str(tmp_path))
    needed = "buildah mount util-linux`"
    assert needed in await refused(tmp_path, monkeypatch, base_image="/base.tar")
    told = await refused(tmp_path, monkeypatch, runtime="/opt/runsc")
    assert f"`sudo apt-get install -y mmdebstrap debian-archive-keyring {needed}" in told
    assert asked == ["runc", "runc"], "gVisor would lose what steps write"
    monkeypatch.setattr(build, "missing_packages", list)
    assert "/none.tar: No such file" in await refused(tmp_path, monkeypatch, base_image="/none.tar")


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (
            ("first", "last words", 'Error: building at STEP "RUN a; b": while running runtime: exit status 3'),
            "last words",
        ),
        (
            (
                "STEP 2/2: RUN exit 3",
                'time="…" level=error msg="exit status 3"',
                'Error: building at STEP "RUN exit 3": while running runtime: exit status 3',
            ),
            "exit code 3",
        ),
        (
            ("STEP 2/2: COPY a /x", 'Error: building at STEP "COPY a /x": copier: stat: "/a": no such file'),
            'copier: stat: "/a": no such file',
        ),
        (
            ('Error: committing container for step {Env:[A={}] Args:["}: "]}: copying: too few',),
            "copying: too few",
        ),
        (("Error: creating build container: x: image not known",), "creating build container: x: image not known"),
        (
            ("said \x1b[31mred", 'Error: building at STEP "RUN a": while running runtime: exit status 1'),
            "said  [31mred",
        ),
        ((), ""),
    ],
)
def test_a_failed_build_says_why(tail: tuple[str, ...], reason: str) -> None:
    assert why_failed(tail) == reason


def test_the_base_is_kept_beside_the_images(tmp_path: Path) -> None:
    assert ImageStore(tmp_path).base(DEBIAN_BASE).parent == tmp_path / "bases"
