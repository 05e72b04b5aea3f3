"""Files of hostile names and kinds, on a real file system."""

import os
import socket
from pathlib import Path

import pytest

from orchestrator.tasks import attachments
from orchestrator.tasks.attachments import attach, open_attachment
from orchestrator.tasks.base import BadRow


@pytest.mark.parametrize(
    ("name", "visible"),
    [
        ("table.csv", "table.csv"),
        ("two words.txt", "two words.txt"),
        ("-rf", "-rf"),
        (".hidden", ".hidden"),
        ("größe 東京.xlsx", "größe 東京.xlsx"),
        ("sub/folder/a.txt", "a.txt"),
        ("./a.txt", "a.txt"),
        ("line\nbreak.txt", "attachment-1.txt"),
        ("bell\a", "attachment-1"),
        ("right\u202eleft.pdf", "attachment-1.pdf"),
        (b"caf\xe9.txt", "attachment-1.txt"),
        ("x" * 201, "attachment-1"),
        ("é" * 101 + ".py", "attachment-1.py"),
    ],
)
def test_any_file_name_works_and_the_agent_sees_a_safe_one(
    tmp_path: Path, name: str | bytes, visible: str
) -> None:
    path = tmp_path / os.fsdecode(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"content")
    (found,) = attach(tmp_path, [name])
    assert (found.name, found.size_bytes) == (visible, 7)
    with open_attachment(found) as file:
        assert file.read() == b"content"


def test_two_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.tar.gz").write_text(folder)
    (tmp_path / "data.tar-2.gz").write_text("d")
    names = ["a/data.tar.gz", "data.tar-2.gz", "b/data.tar.gz", "c/data.tar.gz"]
    found = attach(tmp_path, names)
    assert [f.name for f in found] == ["data.tar.gz", "data.tar-2.gz", "data.tar-3.gz", "data.tar-4.gz"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../secret", "leaves"),
        ("a/../../secret", "leaves"),
        ("..", "leaves"),
        (".", "leaves"),
        ("/etc/passwd", "absolute"),
        ("a\0b", "NUL"),
        ("", "empty"),
        ("missing.txt", "does not exist"),
        ("link", "link"),
        ("dangling", "link"),
        ("folder_link/inside.txt", "link"),
        ("folder", "no regular file"),
        ("pipe", "no regular file"),
        ("socket", "no regular file"),
        ("inside.txt/x", "lies behind"),
        ("n" * 300, "too long"),
        ("\ud800", "cannot be a file name"),
    ],
)
def test_what_is_no_file_inside_the_folder_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    root = tmp_path / "root"
    (root / "folder").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (root / "inside.txt").write_text("x")
    (root / "folder" / "inside.txt").write_text("x")
    (root / "link").symlink_to(root / "inside.txt")
    (root / "dangling").symlink_to("nowhere")
    (root / "folder_link").symlink_to(root / "folder")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(root / "socket"))
        with pytest.raises(BadRow, match=reason) as refused:
            attach(root, [name])
    assert "\n" not in str(refused.value)


def test_a_device_is_refused() -> None:
    with pytest.raises(BadRow, match="no regular file"):
        attach(Path("/dev"), ["null"])


def test_the_folder_itself_may_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("x")
    (tmp_path / "data").symlink_to(tmp_path / "real")
    (found,) = attach(tmp_path / "data", ["a.txt"])
    with open_attachment(found) as file:
        assert file.read() == b"x"


def test_sizes_and_their_sum_are_bounded(tmp_path: Path) -> None:
    for name, size in [("big", attachments.MAX_FILE_BYTES + 1), ("full", attachments.MAX_FILE_BYTES)]:
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)  # sparse: costs no disk
    assert attach(tmp_path, ["full"])[0].size_bytes == 64 << 20
    with pytest.raises(BadRow, match="at most 67108864"):
        attach(tmp_path, ["big"])
    with pytest.raises(BadRow, match="together"):
        attach(tmp_path, ["full"] * 5)
    with pytest.raises(BadRow, match="files"):
        attach(tmp_path, ["full"] * 65)


@pytest.mark.parametrize("swap", ["link", "folder_link", "longer", "pipe", "gone"])
def test_a_file_swapped_after_planning_is_not_opened(tmp_path: Path, swap: str) -> None:
    folder = tmp_path / "root" / "folder"
    folder.mkdir(parents=True)
    path = folder / "a.txt"
    path.write_text("12345")
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("54321")
    (found,) = attach(tmp_path / "root", ["folder/a.txt"])
    path.unlink()
    if swap == "link":
        path.symlink_to(other / "a.txt")
    elif swap == "folder_link":
        folder.rmdir()
        folder.symlink_to(other)
    elif swap == "longer":
        path.write_text("123456")
    elif swap == "pipe":
        os.mkfifo(path)
    with pytest.raises(OSError) as refused:
        open_attachment(found)
    assert refused.value.strerror


def test_opening_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (found,) = attach(tmp_path, ["a.txt"])
    before = len(os.listdir("/proc/self/fd"))
    open_attachment(found).close()
    for bad in ("missing", "../x"):
        with pytest.raises(BadRow):
            attach(tmp_path, [bad])
    assert len(os.listdir("/proc/self/fd")) == before
