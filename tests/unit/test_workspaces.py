"""Workspaces of tasks: what becomes a layer, what is refused, and that nothing of a hostile one gets out."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.launch import workspaces
from orchestrator.launch.workspaces import WorkspaceError, Workspaces


@pytest.fixture
def store(tmp_path: Path) -> Workspaces:
    return Workspaces(tmp_path / "store")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "src/inner").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "src/größe.txt").write_text("1")
    (folder / "src/größe.txt").chmod(0o4600)
    (folder / "src/link").symlink_to("../run.sh")
    return folder


def packed(repo: Path, to: Path) -> Path:
    if to.suffix == ".zip":
        subprocess.run([sys.executable, "-c", ZIPS, str(repo), str(to)], check=True)
    else:
        with tarfile.open(to, "w:gz" if to.suffix == ".gz" else "w") as tar:
            tar.add(repo, ".")
    return to


ZIPS = """
import os, sys, zipfile
repo, to = sys.argv[1:]
with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
    for folder, names, files in os.walk(repo):
        for name in (*names, *files):
            place = os.path.join(folder, name)
            entry = zipfile.ZipInfo(os.path.relpath(place, repo) + "/" * os.path.isdir(place))
            entry.external_attr = os.lstat(place).st_mode << 16
            content = os.readlink(place) if os.path.islink(place) else b"" if os.path.isdir(place) else open(place, "rb").read()
            archive.writestr(entry, content)
"""  # noqa: E501


def content_of(layer: Path) -> dict[str, tuple[str, str]]:
    """By name: permissions, and the text of a file or link."""
    found = {}
    for folder, names, files in os.walk(layer):
        for name in (*names, *files):
            place = Path(folder, name)
            text = os.readlink(place) if place.is_symlink() else "" if place.is_dir() else place.read_text()
            found[str(place.relative_to(layer))] = (stat.filemode(place.lstat().st_mode), text)
    return found


@pytest.mark.parametrize("kind", ["folder", ".tar", ".tar.gz", ".zip"])
def test_a_folder_or_archive_lies_at_the_working_directory(
    store: Workspaces, repo: Path, tmp_path: Path, kind: str
) -> None:
    source = repo if kind == "folder" else packed(repo, tmp_path / f"repo{kind}")
    layer = store.layer(source, "/tmp/app")
    assert content_of(layer) == {
        "tmp": ("drwxrwxrwt", ""),
        "tmp/app": ("drwxrwxrwx", ""),
        "tmp/app/run.sh": ("-rwxrwxrwx", "#!/bin/sh\n"),
        "tmp/app/src": ("drwxrwxrwx", ""),
        "tmp/app/src/inner": ("drwxrwxrwx", ""),
        "tmp/app/src/größe.txt": ("-rw-rw-rw-", "1"),
        "tmp/app/src/link": ("lrwxrwxrwx", "../run.sh"),
    }
    assert {place.lstat().st_mtime for place in (layer, *layer.rglob("*"))} == {946_684_800}
    assert stat.S_IMODE(layer.stat().st_mode) == 0o755
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_equal_content_is_unpacked_once(store: Workspaces, repo: Path, tmp_path: Path) -> None:
    first = store.layer(repo, "/app")
    again = Workspaces(store.folder)
    assert again.layer(repo, "/app") == first
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", repo, copy], check=True)
    (copy / "run.sh").touch()
    assert again.layer(copy, "/app") == first
    assert again.layer(copy, "/srv/app") != first
    (copy / "run.sh").write_text("other")
    other = Workspaces(store.folder).layer(copy, "/app")
    assert other != first
    assert again.layer(copy, "/app") == first, "a run takes a workspace as it was at first"
    assert list((store.folder / "drafts").iterdir()) == []


def test_layers_are_removed_when_no_run_uses_any(store: Workspaces, repo: Path) -> None:
    layer = store.layer(repo, "/app")
    (store.folder / "drafts/left").mkdir()  # by a killed process
    cleaner = Workspaces(store.folder)
    assert cleaner.remove_unused() == 0
    assert layer.exists()
    store.close()
    assert cleaner.remove_unused() == 1
    assert not layer.exists()
    assert list((store.folder / "drafts").iterdir()) == []
    assert store.layer(repo, "/app") == layer
    assert layer.exists()


def a_tar(*entries: tarfile.TarInfo, content: bytes = b"x") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for entry in entries:
            entry.size = len(content) if entry.isreg() else 0
            tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()


def an_entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, link
    return entry


def a_zip(name: str, content: bytes = b"x", mode: int = 0) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = mode << 16
        archive.writestr(entry, content)
    return file.getvalue()


HOSTILE = {
    "up": (a_tar(an_entry("../x")), "../x lies outside"),
    "up in a zip": (a_zip("a/../../x"), "a/../../x lies outside"),
    "link up": (a_tar(an_entry("a/l", tarfile.SYMTYPE, "../../x")), "the link a/l leads out of it"),
    "absolute link": (a_tar(an_entry("l", tarfile.SYMTYPE, "/etc")), "the link l leads out of it"),
    "link in a zip": (a_zip("l", b"/etc", stat.S_IFLNK | 0o777), "the link l leads out of it"),
    "through a link": (
        a_tar(an_entry("d", tarfile.DIRTYPE), an_entry("l", tarfile.SYMTYPE, "d"), an_entry("l/x")),
        "behind l, which is not a folder",
    ),
    "hard link out": (a_tar(an_entry("h", tarfile.LNKTYPE, "/etc/passwd")), "No such file"),
    "hard link up": (a_tar(an_entry("h", tarfile.LNKTYPE, "../../x")), "../../x lies outside"),
    "device": (a_tar(an_entry("null", tarfile.CHRTYPE)), "null is no file, folder or link"),
    "pipe": (a_tar(an_entry("p", tarfile.FIFOTYPE)), "p is no file, folder or link"),
    "pipe in a zip": (a_zip("p", b"", stat.S_IFIFO), "p is no file, folder or link"),
    "deep": (a_tar(an_entry("/".join("d" * 100))), "lies too deep"),
    "folder of a file": (a_tar(an_entry("a"), an_entry("a", tarfile.DIRTYPE)), "it is there twice"),
    "no archive": (b"hello", "hello.tar: "),
    "broken": (a_tar(an_entry("a"), content=b"x" * 5000)[:3000], "hello.tar: "),
    "not whole": (a_zip("a")[:-10], "hello.tar: "),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused_and_leave_nothing(store: Workspaces, tmp_path: Path, case: str) -> None:
    content, reason = HOSTILE[case]
    (tmp_path / "hello.tar").write_bytes(content)
    with pytest.raises(WorkspaceError) as refusal:
        store.layer(tmp_path / "hello.tar", "/app")
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert list((store.folder / "drafts").iterdir()) == []
    assert not (store.folder / "layers").exists()


@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_what_is_too_large_is_refused(
    store: Workspaces, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = repo if kind == "folder" else packed(repo, tmp_path / f"a.{kind}")
    for limit, value in (("MAX_BYTES", 5), ("MAX_FILES", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(workspaces, limit, value)
            with pytest.raises(WorkspaceError, match=r"it has more than|more 1|size 1"):
                store.layer(source, "/app")
    assert store.layer(source, "/app").exists()


@pytest.mark.parametrize(
    "plant",
    [
        lambda folder: os.mkfifo(folder / "pipe"),
        lambda folder: (folder / "out").symlink_to("/etc/passwd"),
        lambda folder: (folder / os.fsdecode(b"\xff")).touch(),
    ],
    ids=["pipe", "link", "name"],
)
def test_hostile_folders_are_refused(
    store: Workspaces, repo: Path, plant: Callable[[Path], None], request: pytest.FixtureRequest
) -> None:
    plant(repo)
    kind = request.node.callspec.id
    with pytest.raises(WorkspaceError, match=f"repo: it holds what no workspace may: {kind} 1 "):
        store.layer(repo, "/app")


@pytest.mark.parametrize("cwd", ["/", "/proc", "/dev/shm/x", "/opt/sandbox", "/run/channel", "/attachments/a"])
def test_nothing_is_laid_over_what_sandboxes_need(store: Workspaces, repo: Path, cwd: str) -> None:
    with pytest.raises(WorkspaceError, match=f"nothing can be laid at {cwd}"):
        store.layer(repo, cwd)


@pytest.mark.parametrize("target", [None, "nowhere", "sandbox"])
def test_nothing_stands_where_sandboxes_have_files(store: Workspaces, tmp_path: Path, target: str | None) -> None:
    (work := tmp_path / "work").mkdir()
    (work / "sandbox").write_text("") if target is None else (work / "sandbox").symlink_to(target)
    with pytest.raises(WorkspaceError, match="/opt/sandbox must be a folder"):
        store.layer(work, "/opt")
    assert store.layer(work, "/srv")
    (work / "sandbox").unlink()
    (work / "sandbox" / "app").mkdir(parents=True)
    assert store.layer(work, "/opt")


def test_a_zip_whose_list_of_files_is_huge_is_not_read(store: Workspaces, tmp_path: Path) -> None:
    content = bytearray(a_zip("a"))
    end = content.rfind(b"PK\5\6")
    content[end + 12 : end + 16] = (1 << 30).to_bytes(4, "little")
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(WorkspaceError, match="more than 100000 files"):
        store.layer(tmp_path / "a.zip", "/app")
    content[end:end] = b"PK\6\7" + bytes(16)
    (tmp_path / "b.zip").write_bytes(content)
    with pytest.raises(WorkspaceError, match="very large ones"):
        store.layer(tmp_path / "b.zip", "/app")
