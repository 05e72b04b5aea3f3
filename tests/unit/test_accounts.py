"""Whom an image's USER names, in accounts that may be hostile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.errors import ImageUnusable
from orchestrator.launch.oci.accounts import account

PASSWD = "root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/app:/bin/sh\n1234:x:77:78::/:/bin/sh\nbad:x:99999999:1::/\n"
GROUP = "root:x:0:\nstaff:x:50:app\n"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (etc := tmp_path / "image" / "etc").mkdir(parents=True)
    (etc / "passwd").write_text(PASSWD)
    (etc / "group").write_text(GROUP)
    return tmp_path / "image"


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("", (0, 0)),
        ("root", (0, 0)),
        ("app", (1000, 1001)),
        ("1000", (1000, 1001)),
        ("1234", (77, 78)),  # a name first, as for Docker
        ("5", (5, 0)),
        ("5:6", (5, 6)),
        ("app:staff", (1000, 50)),
        ("app:7", (1000, 7)),
        (":staff", (0, 50)),
        ("65535", (65535, 0)),
    ],
)
def test_a_user_is_looked_up_as_docker_does(image: Path, user: str, ids: tuple[int, int]) -> None:
    assert account(user, [image]) == ids


@pytest.mark.parametrize("user", ["ghost", "app:ghosts", "65536", "-1", "bad", "5:65536", "²"])
def test_a_user_that_no_sandbox_can_have_is_named(image: Path, user: str) -> None:
    with pytest.raises(ImageUnusable, match="no user"):
        account(user, [image])


def test_the_topmost_accounts_count(image: Path, tmp_path: Path) -> None:
    (etc := tmp_path / "layer" / "etc").mkdir(parents=True)
    (etc / "passwd").write_text("app:x:5:6::/:\n")
    assert account("app:staff", [tmp_path / "layer", image]) == (5, 50)


@pytest.mark.parametrize("kind", ["link", "linked folder", "pipe", "folder"])
def test_no_other_file_of_this_machine_is_read(image: Path, tmp_path: Path, kind: str) -> None:
    (outside := tmp_path / "outside").mkdir()
    (outside / "passwd").write_text("ghost:x:1:1::/:\n")
    passwd = image / "etc" / "passwd"
    passwd.unlink()
    if kind == "link":
        passwd.symlink_to(outside / "passwd")
    elif kind == "linked folder":
        (image / "etc" / "group").unlink()
        (image / "etc").rmdir()
        (image / "etc").symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(passwd)
    else:
        passwd.mkdir()
    with pytest.raises(ImageUnusable, match="no user 'ghost'"):
        account("ghost", [image])
