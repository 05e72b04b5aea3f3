"""Which part of a sandbox's state another one sees: with what was removed and replaced, following nothing."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from orchestrator.grading.scope import MERGED, in_scope
from orchestrator.launch.base import Command, State
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.machine import why_no_forks
from orchestrator.types import Checked, Grader, SandboxSpec
from tests.fakes import oci_images
from tests.fakes.plans import WAIVED_WITHOUT_ROOT, a_writable_sandbox

_WHY_NOT = oci_images.why_not()
pytestmark = [pytest.mark.docker, pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")]

_AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
async def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OciLauncher]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    oci_images.stored_image()
    made = OciLauncher("scopes", max_sandboxes=1, waived=WAIVED_WITHOUT_ROOT)
    yield made
    await made.aclose()


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    """With /app/image, /app/sub/image and a link /linked to /app below what agents write."""
    (sub := tmp_path / "base" / "app" / "sub").mkdir(parents=True)
    for folder in (sub, sub.parent):
        (folder / "image").write_text("image")
        folder.chmod(0o755)
    (tmp_path / "base" / "linked").symlink_to("app")
    (tmp_path / "base").chmod(0o755)
    return a_writable_sandbox(DEFAULT_IMAGE, layers=(str(tmp_path / "base"),))


async def seen(
    launcher: OciLauncher,
    spec: SandboxSpec,
    wrote: str,
    look: str,
    kept: tuple[str, ...] | None,
    dropped: str = "/logs/",
    merged: str = "",
) -> str:
    """What `look` prints in a sandbox with that part of the state that `wrote` leaves."""
    async with launcher.run(spec, Command(("/bin/sh", "-ec", wrote), 30, "/")) as box:
        end = await box.command_end()
        assert end.status == 0, box.last_words
        await box.kill()
        state = State((box,), kept, dropped, merged)
        async with launcher.run(spec, Command(("/bin/sh", "-c", look), 30, "/"), state) as other:
            await other.command_end()
            with other.written() as top:
                log = os.open("logs/verifier/test-stdout.txt", os.O_RDONLY, dir_fd=top)
                with open(log) as file:
                    return file.read().strip()


LIST = "cd /app && find . | sort | tr '\\n' ' '"
REPLACED = "rm -r /app; mkdir -p /app/sub; echo new > /app/sub/new; echo new > /app/new"
CASES = {
    "all": ("echo x > /app/x", LIST, None, ". ./image ./sub ./sub/image ./x"),
    "one file": ("echo x > /app/x; echo y > /app/y", LIST, ("/app/x",), ". ./image ./sub ./sub/image ./x"),
    "one folder": (
        "echo x > /app/sub/x; echo y > /app/y",
        LIST,
        ("/app/sub",),
        ". ./image ./sub ./sub/image ./sub/x",
    ),
    "a removed file": ("rm /app/image /app/sub/image", LIST, ("/app/image",), ". ./sub ./sub/image"),
    "a folder that was removed and made again": (REPLACED, LIST, ("/app",), ". ./new ./sub ./sub/new"),
    "a folder in one that was": (REPLACED, LIST, ("/app/sub",), ". ./image ./sub ./sub/new"),
    "what is not in one that was": (REPLACED, LIST, ("/app/image",), ". ./sub ./sub/image"),
    "what is in a folder that was removed": ("rm -r /app/sub", LIST, ("/app/sub/image",), ". ./image ./sub"),
    "what lies behind a link of the agent's": (
        "mv /app /other; ln -s /other /app; echo x > /other/x",
        LIST,
        ("/app/x", "/app/image"),
        ". ./sub ./sub/image",
    ),
    "what lies in a folder in the place of a link": (
        "rm /linked; mkdir /linked; echo x > /linked/x",
        "readlink /linked; ls /linked | sort | tr '\\n' ' '",
        ("/linked/x",),
        "app\nimage sub",
    ),
    "a link": ("ln -s /etc/passwd /app/x", "readlink /app/x", ("/app/x",), "/etc/passwd"),
    "new folders on the way": (
        "mkdir -m 700 /data; mkdir /data/a; echo x > /data/a/x; echo y > /data/y",
        "stat -c %a /data; find /data | sort | tr '\\n' ' '",
        ("/data/a/x",),
        "700\n/data /data/a /data/a/x",
    ),
    "the image's modes on the way": (
        "chmod 700 /app; echo x > /app/x",
        "stat -c %a /app; cat /app/x",
        ("/app/x",),
        "755\nx",
    ),
    "what nobody made": ("true", LIST, ("/app/x", "/nowhere/x"), ". ./image ./sub ./sub/image"),
}


@pytest.mark.parametrize("name", CASES)
async def test_what_is_kept_is_seen_and_nothing_else(name: str, launcher: OciLauncher, spec: SandboxSpec) -> None:
    wrote, look, kept, expected = CASES[name]
    assert await seen(launcher, spec, wrote, look, kept) == expected


async def test_owners_stay_who_they_were(launcher: OciLauncher, spec: SandboxSpec) -> None:
    wrote = "echo x > /app/x; chown 1000:1001 /app/x; chown 7 /app"
    assert await seen(launcher, spec, wrote, "stat -c %u:%g /app/x /app", ("/app/x",)) == "1000:1001\n0:0"


async def test_folders_deeper_than_anybody_looks_are_not_kept(launcher: OciLauncher, spec: SandboxSpec) -> None:
    deep = "cd /app; i=0; while [ $i -lt 200 ]; do mkdir d; cd d; i=$((i+1)); done; echo x > a.pth"
    look = "find /app -name a.pth; find /app -name d | wc -l"
    assert int(await seen(launcher, spec, deep, look, None)) < 70


async def test_in_the_whole_the_systems_own_folders_are_the_images(
    launcher: OciLauncher, spec: SandboxSpec
) -> None:
    scope = in_scope(Grader("harbor"))
    wrote = (
        "rm -r /etc; mkdir /etc; echo mine > /etc/profile; echo mine > /etc/app.conf; mkdir -p /usr/local/bin;"
        " echo mine > /usr/local/bin/x; echo x > /app/x; mkdir -p /app/site-packages;"
        " echo x > /app/site-packages/a.pth"
    )
    look = (
        "cat /etc/app.conf; grep -c mine /etc/profile; ls /etc/passwd /usr/local/bin/x /app/x /app/site-packages/*"
    )
    told = await seen(launcher, spec, wrote, f"({look}) 2>&1", scope.kept, scope.dropped, MERGED)
    lines = told.splitlines()
    assert lines[:2] == ["mine", "0"]
    assert [line for line in lines[2:] if "cannot" not in line] == ["/app/x", "/etc/passwd"]


async def test_what_the_solution_itself_leaves_is_kept_where_it_would_be_a_takeover(
    launcher: OciLauncher, spec: SandboxSpec
) -> None:
    scope = in_scope(Grader("harbor", checked=Checked(scope=("/usr/local",), takeovers=("/usr/local/bin/tool",))))
    wrote = (
        "mkdir -p /usr/local/bin; echo x > /usr/local/bin/tool; echo x > /usr/local/bin/pytest; echo x > /app/x"
    )
    look = "ls /usr/local/bin; ls /app"
    assert await seen(launcher, spec, wrote, look, scope.kept, scope.dropped) == "tool\nimage\nsub"


@pytest.mark.parametrize("on_disk", [False, pytest.param(True, marks=_AS_ROOT)])
async def test_a_root_without_room_can_be_graded(launcher: OciLauncher, spec: SandboxSpec, on_disk: bool) -> None:
    size_bytes = (300 if on_disk else 16) << 20
    spec = replace(spec, memory_bytes=256 << 20, storage_bytes=size_bytes, storage_inodes=1000)
    assert spec.is_on_disk == on_disk
    fill = "import os\nos.mkdir('/app/full')\nwhile True: os.mkdir(f'/app/full/{os.urandom(100).hex()}')"
    wrote = "echo x > /app/x; dd if=/dev/zero of=/app/zeros bs=64k 2> /dev/null || :; "
    wrote += f'python3 -c "{fill}" 2> /dev/null || :'
    assert await seen(launcher, spec, wrote, "ls /app", ("/app/x", "/new/way/to/y")) == "image\nsub\nx"


async def test_a_sandbox_that_still_runs_has_no_state_yet(launcher: OciLauncher, spec: SandboxSpec) -> None:
    from orchestrator.errors import LaunchError

    async with launcher.run(spec, Command(("sleep", "60"), 60, "/")) as box:
        with pytest.raises(LaunchError, match="has not ended"):
            async with launcher.run(spec, Command(("true",), 10, "/"), State((box,))):
                pass


OBSTACLES = {
    "folders that are closed": "chmod 0 /run /opt",
    "a link": "cd /; mv opt opt2; ln -s /nowhere opt",
    "a link to a folder": "cd /; mv opt opt2; ln -s /etc opt",
    "a file": "cd /; mv run run2; mkdir run; echo x > run/channel",
}


@_AS_ROOT
@pytest.mark.parametrize("start", ["run", "fork"])
@pytest.mark.parametrize("name", OBSTACLES)
async def test_an_agent_cannot_close_the_way_to_what_a_grader_has_mounted(
    name: str, start: Literal["run", "fork"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links can be put there where the image has no such folders: they are made in the agent's root."""
    if start == "fork" and (why_not := why_no_forks("runc")):
        pytest.skip(why_not)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (base := tmp_path / "base").mkdir()
    base.chmod(0o755)
    if "closed" not in name:
        for folder in ("run", "opt"):
            os.mknod(base / folder, stat.S_IFCHR)  # as overlayfs writes that there is none
    spec = a_writable_sandbox(DEFAULT_IMAGE, layers=(str(base),))
    launcher = OciLauncher("scopes", max_sandboxes=1, start=start, waived=WAIVED_WITHOUT_ROOT)
    try:
        assert await seen(launcher, spec, OBSTACLES[name], "echo seen", None) == "seen"
    finally:
        await launcher.aclose()
