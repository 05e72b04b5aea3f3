"""Making images without an Engine: what needs neither a runtime nor root."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.image.base import DEBIAN_BASE
from orchestrator.launch.oci import build
from orchestrator.launch.oci.build import ensure_stored, fingerprint
from orchestrator.launch.oci.recipe import Recipe, Stage
from orchestrator.launch.oci.steps import step_bundle
from orchestrator.launch.oci.store import ROOT, ImageStore
from orchestrator.launch.oci.user_namespace import IdRange, UserNamespace

FILES = {"sandbox/__init__.py": b"", "sandbox/worker/tools.py": b"x", "sandbox/requirements.txt": b"r"}


class Shell:
    """Stands in for the runtime: notes what it is asked to run, and where."""

    def __init__(self, code: int = 0, said: str = "") -> None:
        self.ran: list[tuple[Path, str, Mapping[str, str]]] = []
        self._answer = code, said

    async def run(self, root: Path, argv: Any, environment: Mapping[str, str]) -> tuple[int, str]:
        self.ran.append((root, argv[-1], environment))
        return self._answer


async def carried_out(
    folder: Path, dockerfile: str, shell: Shell | None = None, base: Stage | None = None, **given: str
) -> Stage:
    steps: Any = shell or Shell()
    (folder / "base").mkdir()
    (folder / "base" / "of-the-base").touch()
    arguments = {"BASE_IMAGE": "the-base", **given}
    recipe = Recipe(steps, folder, base or Stage(folder / "base"), FILES, arguments)
    return await recipe.carry_out(f"ARG BASE_IMAGE=other\n{dockerfile}", lambda line: None)


def below(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- steps


async def test_arguments_reach_only_the_stage_that_declares_them(tmp_path: Path) -> None:
    shell = Shell()
    stage = await carried_out(
        tmp_path,
        "FROM ${BASE_IMAGE}\nARG A=1 C=3\nRUN one\n"
        "FROM scratch\nARG BASE_IMAGE B\nENV C=${B}${A}c\nLABEL l=${BASE_IMAGE}\nRUN two\n",
        shell,
        A="2",
        B="b",
    )
    (_, _, first), (_, _, second) = shell.ran
    assert {name: first.get(name) for name in "ABC"} == {"A": "2", "B": None, "C": "3"}
    assert {name: second.get(name) for name in "ABC"} == {"A": None, "B": "b", "C": "bc"}
    assert first["PATH"].endswith("/bin")
    assert stage.config == {"Env": ["C=bc"], "Entrypoint": [], "Labels": {"l": "the-base"}}


async def test_a_stage_on_the_base_has_its_files_environment_and_labels(tmp_path: Path) -> None:
    base = Stage.of(tmp_path / "base", {"Env": ["PATH=/b", "E=1"], "Labels": {"of": "base"}, "Entrypoint": ["no"]})
    stage = await carried_out(tmp_path, 'FROM ${BASE_IMAGE}\nENV E=2\nENTRYPOINT ["/x"]\n', base=base)
    assert below(stage.root) == {"of-the-base": b""}
    assert stage.config == {"Env": ["PATH=/b", "E=2"], "Entrypoint": ["/x"], "Labels": {"of": "base"}}


async def test_copy_takes_files_by_name_and_folders_by_what_is_in_them(tmp_path: Path) -> None:
    stage = await carried_out(
        tmp_path, "FROM scratch\nCOPY sandbox/requirements*.txt wheel[s] /w/\nCOPY sandbox/ /app/sandbox/\n"
    )
    assert below(stage.root) == {"w/requirements.txt": b"r", **{f"app/{name}": it for name, it in FILES.items()}}
    assert {path.stat().st_mode & 0o777 for path in stage.root.rglob("*") if path.is_dir()} == {0o755}


async def test_a_stage_is_taken_over_whole(tmp_path: Path) -> None:
    stage = await carried_out(
        tmp_path, "FROM ${BASE_IMAGE} AS one\nCOPY sandbox/ /s/\nFROM scratch\nCOPY --from=one / /\n"
    )
    assert set(below(stage.root)) == {"of-the-base", *(name.replace("sandbox", "s", 1) for name in FILES)}


@pytest.mark.parametrize(
    ("dockerfile", "complaint"),
    [
        ("FROM debian\n", "FROM debian: only"),
        ("FROM ${BASE_IMAGE}\nFROM ${BASE_IMAGE}\n", "once the base image"),
        ("FROM scratch\nCOPY absent.txt /x/\n", "COPY absent.txt: there is no such file"),
        ("FROM scratch AS one\nCOPY --from=one / /\n", "only once, from an earlier stage"),
        ("FROM scratch\nCOPY --from=one / /\n", "only once, from an earlier stage"),
        ("FROM scratch AS one\nFROM scratch\nCOPY sandbox/ /s/\nCOPY --from=one / /\n", "into an empty one"),
    ],
)
async def test_what_cannot_be_done_is_refused(tmp_path: Path, dockerfile: str, complaint: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=complaint):
        await carried_out(tmp_path, dockerfile)


async def test_copy_does_not_follow_a_link_of_the_base_to_this_machine(tmp_path: Path) -> None:
    (outside := tmp_path / "outside").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "app").symlink_to(outside)
    with pytest.raises(EnvironmentUnusable, match="behind a link"):
        await carried_out(
            tmp_path, "FROM ${BASE_IMAGE}\nCOPY sandbox/ /app/sandbox/\n", base=Stage(tmp_path / "linked")
        )
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(("said", "told"), [("first\nlast words\n", "last words"), ("", "exit code 3")])
async def test_a_failed_step_reports_its_last_words(tmp_path: Path, said: str, told: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=f"^the image could not be built: {told}$"):
        await carried_out(tmp_path, "FROM scratch\nRUN false\n", Shell(3, said))


def test_a_step_has_no_network_and_few_privileges() -> None:
    asked = step_bundle(Path("/r"), ["/p"], {"A": "b"}, "name")
    assert {"network", "pid", "mount", "ipc"} <= {it["type"] for it in asked["linux"]["namespaces"]}
    assert all("path" not in it for it in asked["linux"]["namespaces"])
    assert asked["process"]["env"] == ["A=b"]
    assert asked["process"]["noNewPrivileges"]
    assert not {"CAP_SYS_ADMIN", "CAP_MKNOD", "CAP_SYS_CHROOT"} & set(asked["process"]["capabilities"]["bounding"])
    assert all(mount["type"] != "bind" for mount in asked["mounts"])
    assert "uidMappings" not in asked["linux"]


def test_an_ordinary_user_s_step_has_its_own_users_and_needs_no_control_group() -> None:
    users = UserNamespace((IdRange(0, 1000, 1), IdRange(1, 200_000, 65_536)), (IdRange(0, 1000, 1),))
    linux = step_bundle(Path("/r"), ["/p"], {}, "name", users=users)["linux"]
    assert {"type": "user"} in linux["namespaces"]
    assert linux["uidMappings"][1] == {"containerID": 1, "hostID": 200_000, "size": 65_536}
    assert "cgroupsPath" not in linux


# ---------------------------------------------------------------- what an image is called


def test_the_fingerprint_changes_with_what_matters_and_not_with_times(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    file.write_bytes(b"content")
    link.symlink_to("folder")
    seen = {fingerprint(tmp_path, {})[0]}

    def changed() -> bool:
        before = len(seen)
        seen.add(fingerprint(tmp_path, {})[0])
        return len(seen) > before

    os.utime(file, (1, 1))
    assert not changed()
    file.chmod(0o600)
    assert changed()
    file.write_bytes(b"CONTENT")
    assert changed()
    file.rename(tmp_path / "folder" / "other")
    assert changed()
    link.unlink()
    link.symlink_to("elsewhere")
    assert changed()
    (tmp_path / "empty").mkdir()
    assert changed()
    assert fingerprint(tmp_path, {"Env": ["A=b"]})[0] not in seen


def test_a_file_with_two_names_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert fingerprint(tmp_path, {})[1] == 5


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


def test_a_draft_becomes_an_image(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    with store.draft() as draft:
        (draft / ROOT).mkdir(mode=0o700)
        kept = store.keep(draft, "0" * 64, {"Env": ["A=b"]}, 5, "mine:1")
    assert store.find("mine:1") == kept
    assert kept.root.environment == ("A=b",)
    assert kept.root.folder.stat().st_mode & 0o777 == 0o755
    assert [place.name for place in (tmp_path / "images").iterdir()] == ["0" * 64]


def test_no_room_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentUnusable, match=r"^no room for an image in .*: Not a directory$"):
        with ImageStore(tmp_path / "file").draft():
            pass


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
    pulled = await refused(tmp_path, monkeypatch, base_image="debian:13")
    assert "docker save -o base.tar debian:13" in pulled
    assert "is a path" in await refused(tmp_path, monkeypatch, tag="./t")
    asked: list[str] = []
    monkeypatch.setattr(build, "find_runtime", lambda name: asked.append(name) or "/runc")
    assert "/none.tar: No such file" in await refused(tmp_path, monkeypatch, base_image="/none.tar")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt-get install -y mmdebstrap" in await refused(tmp_path, monkeypatch, runtime="/opt/runsc")
    assert asked == ["runc", "runc"], "gVisor would lose what steps write"


def test_the_base_is_kept_beside_the_images(tmp_path: Path) -> None:
    assert ImageStore(tmp_path).base(DEBIAN_BASE).parent == tmp_path / "bases"
