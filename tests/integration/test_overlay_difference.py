"""What a real overlay writes into its upper folder is read as it was meant, and is a layer of another one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.launch.difference import OPAQUE, OPAQUE_OF_USERS, walk
from orchestrator.types import Difference

# As root, and as a user of a namespace of its own: the two mark folders by other attributes.
MODES = {
    "root": (["unshare", "--mount"], "", OPAQUE),
    "user": (["unshare", "--user", "--map-root-user", "--mount"], "userxattr,", OPAQUE_OF_USERS),
}
FIXED = "redirect_dir=nofollow,metacopy=off,index=off"
CHANGES = """
echo new > app/new; echo changed > app/kept; rm app/gone; rm -r app/made-again; mkdir app/made-again
echo 2 > app/made-again/second; rm -r whole; mv app/moved app/elsewhere; ln -s kept app/link; chmod 700 private
touch .wh.app; setfattr -n user.overlay.opaque -v y private || true
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))  # an overlay's upper folder cannot be on an overlay
    for name in ("lower", "upper", "work", "merged", "upper2", "work2"):
        (place / name).mkdir()
    yield place
    shutil.rmtree(place)


def _mounted(folder: Path, mode: str, layers: str, number: str, script: str) -> str:
    command, option, _ = MODES[mode]
    options = f"{option}lowerdir={layers},upperdir=upper{number},workdir=work{number},{FIXED}"
    shell = f"mount -t overlay overlay -o {options} merged && cd merged"
    command = [*command, "sh", "-c", f"{shell} && {{ {script}\n}}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "mount: " in done.stderr or "unshare: " in done.stderr:
        pytest.skip(done.stderr.strip())
    return done.stdout


def _difference(folder: Path, mode: str) -> Difference:
    opened = [os.open(folder / name, os.O_RDONLY) for name in ("upper", "lower")]
    try:
        return walk(opened[0], lowers=opened[1:], opaque=MODES[mode][2])
    finally:
        for descriptor in opened:
            os.close(descriptor)


@pytest.mark.parametrize("mode", MODES)
def test_changes_of_an_overlay_are_read_as_they_were_made(folder: Path, mode: str) -> None:
    lower = folder / "lower"
    for name in ("app/made-again", "app/moved", "whole/inner", "private"):
        (lower / name).mkdir(parents=True)
    for name in ("app/kept", "app/gone", "app/made-again/first", "app/moved/file", "whole/inner/f", "private/f"):
        (lower / name).write_text("as it was\n")
    _mounted(folder, mode, "lower", "", CHANGES)
    result = _difference(folder, mode)
    assert [(change.kind, change.path) for change in result.changes] == [
        ("added", "/app/elsewhere/"),
        ("added", "/app/elsewhere/file"),
        ("removed", "/app/gone"),
        ("changed", "/app/kept"),
        ("added", "/app/link"),
        ("removed", "/app/made-again/"),
        ("added", "/app/made-again/"),
        ("added", "/app/made-again/second"),
        ("removed", "/app/moved"),
        ("added", "/app/new"),
        ("changed", "/private/"),
        ("removed", "/whole"),
    ]
    assert result.left_out == {"name": 1}
    # The folder itself is a layer of the next overlay, which shows the same files.
    shown = _mounted(folder, mode, "upper:lower", "2", "find . ! -name .wh.app | sort")
    assert shown.split() == [
        *(".", "./app", "./app/elsewhere", "./app/elsewhere/file", "./app/kept", "./app/link", "./app/made-again"),
        *("./app/made-again/second", "./app/new", "./private", "./private/f"),
    ]
