"""The folder of the runtime: complete or not there, named by its content. No Engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch import runtime_folder
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.runtime_folder import find_runtime, put_runtime, remove_old_runtimes, stored_runtime
from tests.fakes.archives import file, layer, link, saved

MONTH_S = 31 * 86_400


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def a_runtime(target: Path) -> None:
    (target / "bin").mkdir(parents=True)
    (target / "bin" / "python3").write_text("elf")
    (target / "bin" / "python3").chmod(0o755)
    (target / "bin" / "python").symlink_to("python3")


def changed(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def fill(target: Path) -> None:
        a_runtime(target)
        change(target)

    return fill


def test_it_is_found_where_it_was_put_and_the_same_content_has_one_folder(store: ImageStore) -> None:
    assert find_runtime(store) is None
    first = put_runtime(store, a_runtime)
    assert find_runtime(store) == first == put_runtime(store, a_runtime)
    assert first.path.name == first.digest
    assert os.readlink(first.path / "bin" / "python") == "python3"
    assert not any((store.folder / "drafts").iterdir())


@pytest.mark.parametrize(
    "change",
    [
        lambda target: (target / "bin" / "python3").write_text("ELF"),
        lambda target: (target / "bin" / "python3").chmod(0o644),
        lambda target: (target / "bin" / "python3").rename(target / "bin" / "python4"),
        lambda target: (target / "empty").mkdir(),
        lambda target: [(target / "bin" / "python").unlink(), (target / "bin" / "python").symlink_to("other")],
    ],
    ids=["content", "mode", "name", "folder", "link"],
)
def test_its_name_says_all_that_is_in_it(store: ImageStore, change: Callable[[Path], object]) -> None:
    first = put_runtime(store, a_runtime)
    second = put_runtime(store, changed(change))
    assert first.digest != second.digest
    assert find_runtime(store) == second


def test_what_fails_half_way_leaves_nothing(store: ImageStore) -> None:
    def no_room(target: Path) -> None:
        a_runtime(target)
        raise OSError(28, "No space left on device")

    with pytest.raises(EnvironmentUnusable, match="No space left"):
        put_runtime(store, no_room)
    assert find_runtime(store) is None
    assert not any((store.folder / "drafts").iterdir())


def test_without_it_an_image_of_these_sources_gives_it(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_folder, "our_context", lambda: "c0ffee")
    with pytest.raises(EnvironmentUnusable, match="run `orchestrator image build --oci`"):
        stored_runtime(store)
    files = layer(file("opt/sandbox/bin/python3", b"elf", mode=0o755), link("opt/sandbox/bin/python", "python3"))
    for label in ("another", "c0ffee"):
        config = {"config": {"Labels": {"orchestrator.runtime": label}}}
        store.put(saved(tmp_path / "image.tar", files, config=config))
        if label == "another":
            with pytest.raises(EnvironmentUnusable):
                stored_runtime(store)
    assert stored_runtime(store) == put_runtime(store, a_runtime)


def test_those_of_other_sources_go_when_nobody_used_them_for_a_month(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(name: str) -> Path:
        monkeypatch.setattr(runtime_folder, "our_context", lambda: name)
        return put_runtime(store, changed(lambda target: (target / name).touch())).path

    old, late, ours = put("old"), put("late"), put("ours")
    for place in (old, ours):
        os.utime(place, (time.time() - MONTH_S,) * 2)
    assert remove_old_runtimes(store) == 1
    assert (old.exists(), late.exists(), ours.exists()) == (False, True, True)
    assert remove_old_runtimes(store) == 0
    assert len(list(old.parent.iterdir())) == 4, "two, and what leads to them"
