"""What goes into the sandbox image, and what is said when it cannot be built. No Docker."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from orchestrator import __version__
from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.client import why_refused, why_unreachable
from orchestrator.launch.image import build, debian
from orchestrator.launch.image.base import DEFAULT_BASE, parse_probe
from orchestrator.launch.image.build import (
    LABEL_BASE,
    LABEL_CONTEXT,
    LABEL_VERSION,
    is_current,
    lines_of,
    why_failed,
)
from orchestrator.launch.image.context import (
    BUILD_REQUIREMENTS,
    DOCKERFILE,
    REQUIREMENTS,
    BuildContext,
    context_root,
    extra_requirements,
)
from orchestrator.launch.image.wheels import ImagePython, fetch_wheels, pip_reason
from orchestrator.launch.names import EXTRAS, PACKAGES, RUNTIME_MOUNT
from sandbox.boot import packed


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small source checkout."""
    for name, text in {
        DOCKERFILE: "FROM scratch\n",
        REQUIREMENTS: "a==1\n",
        BUILD_REQUIREMENTS: "b==1\n",
        "sandbox/__init__.py": "",
        "sandbox/worker/tools.py": "x = 1\n",
        "proto/rollout_api/v1/sandbox_pb2.py": "y = 2\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


# ---------------------------------------------------------------- context


def test_the_context_holds_python_files_of_two_packages_and_nothing_else(checkout: Path) -> None:
    for stray in (
        ".env",
        "sandbox/.env",
        "sandbox/__pycache__/files.cpython-313.pyc",
        "orchestrator/engine/orchestrator.py",
    ):
        (checkout / stray).parent.mkdir(parents=True, exist_ok=True)
        (checkout / stray).write_text("secret")
    (checkout / "sandbox/linked.py").symlink_to(checkout / ".env")
    assert [name for name, _ in BuildContext.read(checkout).files] == [
        DOCKERFILE,
        "proto/rollout_api/v1/sandbox_pb2.py",
        "sandbox/__init__.py",
        BUILD_REQUIREMENTS,
        REQUIREMENTS,
        "sandbox/worker/tools.py",
    ]


def test_the_digest_is_the_same_for_a_copy_elsewhere(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    shutil.copytree(checkout, copy)
    assert BuildContext.read(copy).digest == BuildContext.read(checkout).digest


@pytest.mark.parametrize("name", [DOCKERFILE, REQUIREMENTS, "sandbox/worker/tools.py", "sandbox/added.py"])
def test_the_digest_changes_with_every_file(checkout: Path, name: str) -> None:
    before = BuildContext.read(checkout).digest
    (checkout / name).write_text("changed\n")
    assert BuildContext.read(checkout).digest != before


def test_the_runtime_is_the_same_whatever_is_installed_on_top() -> None:
    plain, more = BuildContext.read(context_root()), BuildContext.read(context_root(), EXTRAS)
    assert plain.digest != more.digest
    assert plain.digest == plain.runtime_digest == more.runtime_digest


def test_a_moved_file_changes_the_digest(checkout: Path) -> None:
    before = BuildContext.read(checkout).digest
    (checkout / "sandbox/worker/tools.py").rename(checkout / "sandbox/worker/moved.py")
    assert BuildContext.read(checkout).digest != before


def test_an_incomplete_installation_is_named(checkout: Path) -> None:
    (checkout / REQUIREMENTS).unlink()
    with pytest.raises(EnvironmentUnusable, match=r"requirements\.txt: reinstall"):
        BuildContext.read(checkout)


def test_the_packed_context_has_the_files_and_the_wheels(checkout: Path) -> None:
    wheel = checkout / "a-1-py3-none-any.whl"
    wheel.write_bytes(b"zip")
    packed = io.BytesIO()
    context = BuildContext.read(checkout)
    context.pack([wheel], packed)
    with tarfile.open(fileobj=packed) as tar:
        members = {member.name: member for member in tar.getmembers()}
    assert set(members) == {name for name, _ in context.files} | {f"wheels/{wheel.name}"}
    assert {(m.mode, m.uid, m.gid, m.mtime) for m in members.values()} == {(0o644, 0, 0, 0)}


# ---------------------------------------------------------------- what the files of the project say


def test_dockerfile_and_code_agree() -> None:
    dockerfile = BuildContext.read(context_root())[DOCKERFILE].decode()
    assert f"\nARG BASE_IMAGE={DEFAULT_BASE}\n" in dockerfile
    assert f"'%s\\n' /opt/sandbox/libraries {PACKAGES}" in dockerfile
    assert f'"{PACKAGES}" if sys.prefix == "{RUNTIME_MOUNT}"' in Path(packed.__file__).read_text()
    assert not re.search(r"^RUN +--", dockerfile, re.MULTILINE), "only BuildKit knows RUN --mount and the like"


@pytest.mark.parametrize("name", [BUILD_REQUIREMENTS, REQUIREMENTS, *map(extra_requirements, EXTRAS)])
def test_requirements_are_pinned_hashed_and_the_same_for_every_machine(name: str) -> None:
    text = BuildContext.read(context_root(), EXTRAS)[name].decode()
    entries = [e for e in re.split(r"\n(?=\S)", text.replace("\\\n", "")) if not e.startswith("#")]
    assert len(entries) > (0 if name == BUILD_REQUIREMENTS else 10)
    for entry in entries:
        assert re.match(r"[a-z0-9-]+==\S+ +--hash=sha256:[0-9a-f]{64}", entry), entry[:60]
        assert ";" not in entry, "a marker: the host would evaluate it for its own Python"


# ---------------------------------------------------------------- up to date


def test_an_image_is_current_only_with_the_same_context_version_and_base() -> None:
    labels = {LABEL_CONTEXT: "c", LABEL_VERSION: __version__, LABEL_BASE: "mine:1"}
    assert is_current(labels, "c", None)
    assert is_current(labels, "c", "mine:1")
    assert not is_current(labels, "c", "other:1")
    assert not is_current(labels, "d", None)
    assert not is_current({**labels, LABEL_VERSION: "0"}, "c", None)
    assert not is_current({}, "c", None)


# ---------------------------------------------------------------- the Python of the base


def test_platforms_go_up_to_the_glibc_of_the_image() -> None:
    platforms = ImagePython((3, 13, 5), "aarch64", (2, 28)).platforms
    assert platforms[0] == "manylinux2014_aarch64"
    assert platforms[-1] == "manylinux_2_28_aarch64"
    assert "manylinux_2_29_aarch64" not in platforms


def test_a_usable_python_is_understood() -> None:
    assert parse_probe("b", b'[[3, 13, 5], "x86_64", "glibc", "2.41"]\n') == ImagePython(
        (3, 13, 5), "x86_64", (2, 41)
    )


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (b"", "no working python3"),
        (b"Traceback\n", "no working python3"),
        (b'{"a": 1}', "no working python3"),
        (b'[[3, 9, 2], "x86_64", "glibc", "2.31"]', r"has Python 3\.9; 3\.11 or later"),
        (b'[[3, 13, 5], "x86_64", "", ""]', "has no glibc"),
    ],
)
def test_an_unusable_base_image_is_refused_by_name(said: bytes, complaint: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=f"^base image mine:1 .*{complaint}"):
        parse_probe("mine:1", said)


# ---------------------------------------------------------------- the mirror

HOST_SOURCES = """\
# a comment
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
  contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""


def mirror_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> str | None:
    """What is found on a host with these files of apt's sources."""
    if shutil.which("apt-get") is None:
        pytest.skip("needs apt")
    for part in ("sources.list.d", "apt.conf.d"):
        (folder / part).mkdir(exist_ok=True)
    for suffix, text in sources.items():
        (folder / f"sources.list.d/host.{suffix}").write_text(text)
    (folder / "apt.conf").write_text(f'Dir::Etc "{folder}";\n')
    monkeypatch.setenv("APT_CONFIG", str(folder / "apt.conf"))
    return asyncio.run(debian.find_mirror())


def test_the_mirror_is_read_from_stanzas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mirror_of(tmp_path, monkeypatch, sources=HOST_SOURCES) == "http://mirror.example/debian"


@pytest.mark.parametrize("change", [("# a comment", "Enabled: no"), ("deb deb-src", "deb-src")])
def test_disabled_and_source_only_stanzas_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: tuple[str, str]
) -> None:
    assert mirror_of(tmp_path, monkeypatch, sources=HOST_SOURCES.replace(*change)) is None


def test_the_mirror_is_read_from_lines_and_may_be_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "deb-src https://a.example/debian trixie main\n"
        "deb [arch=amd64 trusted=yes] https://m.example/debian/ trixie main\n"
    )
    assert mirror_of(tmp_path, monkeypatch, list=lines) == "https://m.example/debian"


@pytest.mark.parametrize(
    "lines",
    [
        "deb https://dl.example/chrome/deb stable main\ndeb https://apt.example bookworm main # tools\n",
        "deb http://archive.example/ubuntu noble main\n",
    ],
)
def test_other_vendors_repositories_are_no_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    assert mirror_of(tmp_path, monkeypatch, list=lines) is None


def test_a_mirror_under_another_name_is_known_by_its_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "deb http://cache.corp/apt/d bookworm main\ndeb http://cache.corp/apt/d bookworm-updates main\n"
    assert mirror_of(tmp_path, monkeypatch, list=lines) == "http://cache.corp/apt/d"


def test_a_list_of_mirrors_gives_its_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "debian.list"
    listed.write_text("# by priority\nhttps://near.example/debian priority:1\nhttps://far.example/debian\n")
    uri = f"mirror+{listed.as_uri()}"
    lines = f"deb {uri} bookworm main\ndeb {uri} bookworm-updates main\n"
    assert mirror_of(tmp_path, monkeypatch, list=lines) == "https://near.example/debian"


@pytest.mark.parametrize(
    ("installed", "root", "command"),
    [
        (False, True, "`sudo apt-get install -y mmdebstrap debian-archive-keyring`"),
        (True, False, '`sudo "$(command -v orchestrator)" image build`'),
        (False, False, 'debian-archive-keyring && sudo "$(command -v orchestrator)" image build`'),
    ],
)
def test_without_means_for_a_base_one_command_is_given(installed: bool, root: bool, command: str) -> None:
    with pytest.raises(EnvironmentUnusable) as caught:
        debian.require_means(installed=installed, root=root)
    assert str(caught.value).endswith(command)


# ---------------------------------------------------------------- failures in one line


def test_no_permission_and_no_engine_are_told_apart() -> None:
    assert "usermod -aG docker" in why_unreachable(
        OSError("('Connection aborted.', PermissionError(13, 'Permission denied'))")
    )
    assert "systemctl start docker" in why_unreachable(
        OSError("('Connection aborted.', FileNotFoundError(2, 'No such file'))")
    )
    assert "systemctl start docker" in why_unreachable(
        OSError("ConnectionRefusedError(111, 'Connection refused')")
    )
    assert why_unreachable(OSError("two\nlines")) == "Docker cannot be used: two lines"


def test_a_full_disk_says_to_make_room() -> None:
    assert "docker system prune" in why_refused("write /x: no space left on device")


def test_a_failed_step_reports_its_last_words_instead_of_its_script() -> None:
    error = {"error": "The command '/bin/sh -c set -eu; a; b' returned a non-zero code: 1"}
    assert why_failed(error, "ERROR: hashes do not match") == "ERROR: hashes do not match"
    assert why_failed({"error": "pull access denied"}, "Step 1/9") == "pull access denied"


def test_progress_is_free_of_ids_colours_and_scripts() -> None:
    lines = [
        {"stream": "Step 7/20 : RUN set -eu;     rm -rf x"},
        {"stream": " ---> Running in 0123\n"},
        {"stream": "Removing intermediate container 0123\n"},
        {"stream": "\x1b[91mwarning\n\x1b[0m"},
        {"aux": {"ID": "sha256:1"}},
    ]
    assert [text for line in lines for text in lines_of(line)] == ["Step 7/20 : RUN set -eu", "warning"]


def test_pips_own_reason_is_taken() -> None:
    assert pip_reason(("Collecting a==1", "ERROR: first", "ERROR: No matching distribution for a==1", "hint")) == (
        "No matching distribution for a==1"
    )
    assert pip_reason(()) == "pip said nothing"


# ---------------------------------------------------------------- wheels


async def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentUnusable, match=r"cannot keep wheels in .*set XDG_CACHE_HOME"):
        await fetch_wheels(
            b"", ImagePython((3, 13, 5), "x86_64", (2, 41)), cache=tmp_path / "file" / "wheels", progress=print
        )


@pytest.mark.parametrize(("lost", "tries"), [(1, 2), (2, 3), (3, 3)])
async def test_an_image_that_lost_a_file_is_built_again(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, lost: int, tries: int
) -> None:
    asked: list[dict[str, str]] = []
    said: list[str] = []

    async def built(*given: Any) -> None:
        asked.append(given[4])
        if len(asked) <= lost:
            raise EnvironmentUnusable(
                f"the image could not be built: {build.LOST} /usr/x.pyc on the way into the image"
            )

    async def base(*_: Any) -> str:
        return "base"

    async def wheels(*_: Any, **__: Any) -> list[Path]:
        return []

    monkeypatch.setattr(build, "_build_once", built)
    monkeypatch.setattr(build, "choose_base", base)
    monkeypatch.setattr(build, "probe_python", lambda *_: ImagePython((3, 13, 5), "x86_64", (2, 41)))
    monkeypatch.setattr(build, "fetch_wheels", wheels)
    engine: Any = object()
    making = build._build(engine, "tag", BuildContext.read(checkout), None, (), said.append)
    if lost < build.TRIES:
        await making
    else:
        with pytest.raises(EnvironmentUnusable, match=build.LOST):
            await making
    assert len(asked) == tries
    assert sum("it is built again" in line for line in said) == tries - 1
    assert build.LOST in BuildContext.read(context_root())[DOCKERFILE].decode()
