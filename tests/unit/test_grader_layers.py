"""Which hosts may be named for dry runs, what no grader layer has, and how long layers are kept."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

import pytest

from orchestrator.cluster.layers import packed
from orchestrator.errors import ConfigError
from orchestrator.grading.dry_run import left_out
from orchestrator.launch.base import SavedLayer, TooMuch
from orchestrator.launch.difference import OPAQUE, OPAQUE_OF_USERS
from orchestrator.launch.oci.saved_layer import LayerRules, save_layer
from orchestrator.launch.oci.tree import remove
from orchestrator.launch.uses import unwanted
from orchestrator.launch.workspaces import WorkspaceError, Workspaces
from orchestrator.settings.config import Config
from orchestrator.settings.sources import load_config

DIGEST = "a" * 64


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ("packages.example, files.example", ("packages.example", "files.example")),
        ('["[::1]:8080", "127.0.0.1:80"]', ("[::1]:8080", "127.0.0.1:80")),
        ("*", ("*",)),
        ("none", ()),
        ([], ()),
    ],
)
def test_hosts_are_named_with_commas_or_as_a_list(given: object, hosts: tuple[str, ...]) -> None:
    assert load_config(env={"grader_network": given}, environ={}).env.grader_network == hosts


@pytest.mark.parametrize(
    "given",
    ["https://packages.example", "a b", "*.org", "packages.example:", "packages.example/simple", "a,,b", {"a": 1}],
)
def test_what_is_no_host_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"env\.grader_network: must be HOST,HOST or a JSON list"):
        load_config(env={"grader_network": given}, environ={})


def test_no_dry_run_is_the_default() -> None:
    assert Config().env.grader_network == ()


@pytest.mark.parametrize(
    ("places", "kept", "gone"),
    [
        (
            ["/app"],
            ["/application", "/root/.cache/uv/", "/usr/bin/curl", "/root/", "/var/lib/apt/lists/", "/opt/tmp/"],
            ["/app/", "/app/.venv/", "/tests/", "/logs/", "/tmp/", "/var/tmp/x", "/run/", "/output/", "/a+b"],
        ),
        (["/root"], ["/root/", "/root/.local/bin/uv", "/root/.cache/"], ["/root/x", "/root/work/"]),
        (["/home/me"], ["/home/", "/home/me/", "/home/me/.cache/"], ["/home/me/x"]),
        (["/"], ["/app/", "/root/x"], ["/tests/", "/output/x"]),
    ],
)
def test_what_a_layer_has_not(places: list[str], kept: list[str], gone: list[str]) -> None:
    dropped = re.compile(left_out(places, ["/output", "/a+b"])[0])
    assert [path for path in (*kept, *gone) if dropped.match(path)] == gone


def test_folders_on_the_way_to_what_agents_leave_hide_nothing() -> None:
    merged = re.compile(left_out(["/srv/app"], ["/output/deep/file"])[1])
    assert [bool(merged.match(path)) for path in ("/srv/", "/srv/app/", "/output/", "/output/deep/")] == [True] * 4
    assert [bool(merged.match(path)) for path in ("/srv/other/", "/opt/", "/")] == [False] * 3


def filled(folder: Path) -> SavedLayer:
    (folder / "usr").mkdir()
    (folder / "usr/tool").write_text("x")
    return SavedLayer(DIGEST, 1000)


def too_much(folder: Path) -> SavedLayer:
    raise TooMuch("it has more than 2 GiB")


def test_a_layer_stays_until_no_run_has_used_it_for_long(tmp_path: Path) -> None:
    store = Workspaces(tmp_path / "store")
    assert store.missing([DIGEST]) == (DIGEST,)
    with pytest.raises(WorkspaceError, match="is not on this machine: run check-tasks again here"):
        store.named(DIGEST)
    with pytest.raises(TooMuch):
        store.keep(too_much)
    assert store.keep(filled) == store.keep(filled) == SavedLayer(DIGEST, 1000)
    assert list((store.folder / "drafts").iterdir()) == []
    assert (store.named(DIGEST) / "usr/tool").read_text() == "x"
    (layer,) = store.kept()
    assert (layer.tag, layer.size_bytes) == (DIGEST, 1000)
    os.utime(store.folder / "kept" / DIGEST, (1, 1))
    store.named(DIGEST)  # it is used
    assert time.time() - store.kept()[0].used_at < 3600
    cleaner = Workspaces(store.folder)
    assert cleaner.remove_kept([layer]) == 0  # `store` still uses it
    store.close()
    assert cleaner.remove_unused() == 0
    assert (store.layers / DIGEST).is_dir()
    assert unwanted(store.kept(), used_before=0, keep_bytes=None, in_use=set()) == []
    assert cleaner.remove_kept(unwanted(store.kept(), used_before=0, keep_bytes=999, in_use=set())) == 1
    assert [*(store.folder / "kept").iterdir(), *store.layers.iterdir()] == []


def test_names_that_no_folder_here_takes_are_too_much(tmp_path: Path) -> None:
    (folder := tmp_path / "layer").mkdir()
    (wrote := tmp_path / "wrote").mkdir()
    top = at = os.open(wrote, os.O_RDONLY)
    for _ in range(25):
        os.mkdir("d" * 250, dir_fd=at)
        at = os.open("d" * 250, os.O_RDONLY, dir_fd=at)
    rules = LayerRules(re.compile("(?!)"), re.compile("/"), OPAQUE, None)
    with pytest.raises(TooMuch, match="names are too long"):
        save_layer(top, folder, (), rules)
    remove(wrote)


def test_a_layer_gets_to_a_node_as_it_is(tmp_path: Path) -> None:
    mark = OPAQUE if os.geteuid() == 0 else OPAQUE_OF_USERS

    def fill(folder: Path) -> SavedLayer:
        (folder / "opt").mkdir()
        os.setxattr(folder / "opt", mark, b"y")
        (folder / "link").symlink_to("/usr/bin/env")
        os.mknod(folder / "gone", stat.S_IFCHR)
        if os.geteuid() == 0:
            os.chown(folder / "opt", 33, 34)
        return SavedLayer(DIGEST, 10)

    here, node = Workspaces(tmp_path / "here"), Workspaces(tmp_path / "node")
    here.keep(fill)
    with packed(str(here.named(DIGEST))) as tar:
        (tmp_path / "tar").write_bytes(tar.read())
    node.take(DIGEST, tmp_path / "tar")
    there = node.layers / DIGEST
    assert os.getxattr(there / "opt", mark) == b"y"
    assert (there / "link").readlink() == Path("/usr/bin/env")
    assert stat.S_ISCHR((there / "gone").stat().st_mode)
    assert ((there / "opt").stat().st_uid, (there / "opt").stat().st_gid) == (
        (33, 34) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    )
