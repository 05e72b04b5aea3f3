"""Images without an Engine: read from what `docker save` writes and from OCI layouts, unpacked, named, removed."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Mapping
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.oci import archive as archive_module
from orchestrator.launch.oci.archive import Archive
from orchestrator.launch.oci.store import ImageStore

CONFIG: dict[str, Any] = {"config": {"Env": ["A=b"], "Entrypoint": ["/run-me"], "Labels": {"l": "v"}}}


def configured(*layers: bytes, config: Mapping[str, Any] = CONFIG) -> bytes:
    """An image's configuration, which names its layers."""
    ids = [f"sha256:{hashlib.sha256(content).hexdigest()}" for content in layers]
    return json.dumps({**config, "rootfs": {"type": "layers", "diff_ids": ids}}).encode()


Entry = tuple[str, dict[str, Any], bytes]


def file(name: str, content: bytes = b"", **more: Any) -> Entry:
    return name, {"mode": 0o644, **more}, content


def folder(name: str, mode: int = 0o755) -> Entry:
    return name, {"type": tarfile.DIRTYPE, "mode": mode}, b""


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> Entry:
    return name, {"type": kind, "linkname": target}, b""


def layer(*entries: Entry) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, fields, content in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for field, value in fields.items():
                setattr(entry, field, value)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def saved(
    path: Path, *layers: bytes, config: Mapping[str, Any] = CONFIG, told: bytes | None = None, **manifest: object
) -> Path:
    """As `docker save` writes it. `told`: another configuration than that of these layers."""
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    content = configured(*layers, config=config) if told is None else told
    named = {"Config": "config.json", "Layers": names, **manifest}
    files = {"config.json": content, "manifest.json": json.dumps([named]).encode()}
    return _tar(path, files | dict(zip(names, layers, strict=True)))


def _tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.write_bytes(layer(*(file(name, content) for name, content in files.items())))
    return path


def layout(*layers: bytes) -> dict[str, bytes]:
    """The files of an OCI layout."""
    files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return {
            "mediaType": f"application/vnd.oci.image.{kind}",
            "digest": f"sha256:{digest}",
            "size": len(content),
        }

    manifest = {
        "config": blob(configured(*layers), "config.v1+json"),
        "layers": [blob(gzip.compress(content), "layer.v1.tar+gzip") for content in layers],
    }
    told = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    files["index.json"] = json.dumps({"manifests": [told]}).encode()
    return files


LAYERS = (
    layer(
        folder("etc"),
        file("etc/kept", b"1"),
        file("etc/gone", b"2"),
        file("etc/replaced", b"old"),
        folder("opaque"),
        file("opaque/below", b"3"),
        folder("tree"),
        file("tree/leaf", b"4"),
        link("also", "etc/kept", tarfile.LNKTYPE),
        link("shortcut", "etc/kept"),
        folder("closed", 0o555),
        file("closed/inside", b"5"),
        file("bin", b"#!", mode=0o4755),
        ("device", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}, b""),
    ),
    layer(
        file("etc/.wh.gone"),
        file("etc/replaced", b"new"),
        file("opaque/above", b"6"),
        file("opaque/.wh..wh..opq"),
        file("tree", b"a file now"),
        file("closed/later", b"7"),
    ),
)


def check_tree(root: Path) -> None:
    texts = {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}
    texts.pop("etc/hosts", None)
    assert texts == {
        "etc/kept": "1",
        "also": "1",
        "shortcut": "1",
        "etc/replaced": "new",
        "opaque/above": "6",
        "tree": "a file now",
        "closed/inside": "5",
        "closed/later": "7",
        "bin": "#!",
    }
    assert stat.S_IMODE((root / "bin").stat().st_mode) == 0o755, "no set-uid"
    assert stat.S_IMODE((root / "closed").stat().st_mode) == 0o755, "its owner can remove it"


@pytest.mark.parametrize("form", ["saved", "layout tar", "layout folder", "index of an index"])
def test_layers_are_laid_over_each_other(tmp_path: Path, form: str) -> None:
    if form == "saved":
        path = saved(tmp_path / "image.tar", *LAYERS)
    elif form == "layout folder":
        path = tmp_path / "image"
        for name, content in layout(*LAYERS).items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    else:
        files = layout(*LAYERS)
        if form == "index of an index":
            inner = files["index.json"]
            digest = hashlib.sha256(inner).hexdigest()
            files[f"blobs/sha256/{digest}"] = inner
            files["index.json"] = json.dumps({"manifests": [{"digest": f"sha256:{digest}"}]}).encode()
        path = _tar(tmp_path / "image.tar", files)
    store = ImageStore(tmp_path / "store")
    image = store.put(path, "name:1")
    assert image.digest == hashlib.sha256(configured(*LAYERS)).hexdigest()
    assert image.root.environment == ("A=b",)
    assert image.root.entry_point == ("/run-me",)
    assert image.size_bytes == sum(
        len(text) for text in ("1", "2", "old", "3", "4", "5", "#!", "new", "6", "a file now", "7")
    )
    check_tree(image.folder / "rootfs")
    assert store.find("name:1") == store.find(str(path)) == image


ESCAPES = [
    file("../outside", b"x"),
    file("/../../outside", b"x"),
    link("up", "../../../outside", tarfile.LNKTYPE),
]


@pytest.mark.parametrize("entries", [[entry] for entry in ESCAPES] + [
    [link("way", ".."), file("way/outside", b"x")],
    [link("way", "/tmp"), file("way/outside", b"x")],
    [folder("a"), link("a/way", "../.."), folder("a/way/outside")],
    [link("way", "/etc"), file("way/.wh.passwd")],
    [file(".wh...")], [folder("a"), file("a/.wh...")], [file(".wh.")],
])  # fmt: skip
def test_nothing_gets_outside(tmp_path: Path, entries: list[Entry]) -> None:
    (place := tmp_path / "deep" / "deeper").mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in (Path("/tmp"), Path("/etc"))}
    with pytest.raises(EnvironmentUnusable, match="image"):
        ImageStore(place / "store").put(saved(place / "i.tar", layer(*entries)), "n")
    assert not list(tmp_path.rglob("outside"))
    assert Path("/etc").stat().st_mtime_ns == before[Path("/etc")]
    assert list((place / "store" / "images").iterdir()) == []


@pytest.mark.parametrize("place", ["tmp", "workspace", "run", "dev", "etc/hosts", "proc"])
def test_places_to_mount_on_that_lead_elsewhere_are_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "victim").mkdir(mode=0o700)
    way = folder("etc"), link(place, str(tmp_path / "victim"))
    with pytest.raises(EnvironmentUnusable, match="link"):
        ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", layer(*way)))
    assert stat.S_IMODE((tmp_path / "victim").stat().st_mode) == 0o700
    assert list((tmp_path / "victim").iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no tar",
        layer(file("manifest.json", b"no json")),
        layer(file("manifest.json", b"[]")),
        layer(file("manifest.json", b'[{"Config": "c", "Layers": []}]')),
        layer(file("manifest.json", b'[{"Config": "c", "Layers": ["l"]}]'), file("c", b"[1]")),
        layer(file("index.json", b'{"manifests": []}')),
        layer(file("index.json", b'{"manifests": [{}, {}]}')),
        layer(file("index.json", b'{"manifests": [{"digest": "sha256:../../etc/passwd"}]}')),
        layer(file("index.json", b'{"manifests": [{"digest": 7, "mediaType": "x.tar+zstd"}]}')),
        layer(
            file("manifest.json", b'[{"Config": "c", "Layers": ["l"]}]'), file("c", b"{}"), file("l", b"no tar")
        ),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "image.tar").write_bytes(content)
    with pytest.raises(EnvironmentUnusable) as refused:
        ImageStore(tmp_path / "store").put(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    "bad",
    [
        layer(link("a", "a"), file("a/b")),
        layer(("t", {"type": tarfile.DIRTYPE, "mtime": 1e300}, b"")),
        layer(file("n" * 3_000_000)),
        layer(("s", {"type": tarfile.GNUTYPE_SPARSE}, b"")),
        layer(file("cut"))[:300],
    ],
)
def test_a_layer_of_no_use_is_refused_in_one_line_and_leaves_nothing(tmp_path: Path, bad: bytes) -> None:
    store = ImageStore(tmp_path / "store")
    with pytest.raises(EnvironmentUnusable) as refused:
        store.put(saved(tmp_path / "i.tar", bad), "n")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700
    assert store.find("n") is None
    assert store.remove_unused() == 0


def test_what_lies_under_a_digest_is_what_its_configuration_names(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    good, evil = layer(file("a", b"good")), layer(file("a", b"evil"))
    for number, layers in enumerate(([evil], [good, evil], [])):
        with pytest.raises(EnvironmentUnusable, match="configuration names"):
            store.put(saved(tmp_path / f"{number}.tar", *layers, told=configured(good)), "trusted:1")
    damaged = bytearray(gzip.compress(good))
    damaged[len(damaged) // 2] ^= 0xFF
    with pytest.raises(EnvironmentUnusable):
        store.put(saved(tmp_path / "d.tar", bytes(damaged), told=configured(good)), "trusted:1")
    assert store.find("trusted:1") is None
    image = store.put(saved(tmp_path / "g.tar", gzip.compress(good), told=configured(good)), "trusted:1")
    assert (image.folder / "rootfs" / "a").read_bytes() == b"good"


def test_an_image_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "i.tar", *LAYERS)
    for name, least in (("_IMAGE_BYTES", 1 << 10), ("_IMAGE_ENTRIES", 3)):
        with monkeypatch.context() as patched:
            patched.setattr(archive_module, name, least)
            with pytest.raises(EnvironmentUnusable, match="more than"):
                ImageStore(tmp_path / "store").put(path)
    assert ImageStore(tmp_path / "store").put(path)


def test_an_index_that_names_itself_and_a_pipe_are_refused(tmp_path: Path) -> None:
    inner = b'{"manifests": [{"digest": "sha256:self"}]}'
    with (
        pytest.raises(EnvironmentUnusable, match="without end"),
        Archive(_tar(tmp_path / "i.tar", {"index.json": inner, "blobs/sha256/self": inner})),
    ):
        pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EnvironmentUnusable, match="neither a file nor a folder"), Archive(tmp_path / "pipe"):
        pass
    (tmp_path / "layout").mkdir()
    os.mkfifo(tmp_path / "layout" / "index.json")
    with pytest.raises(EnvironmentUnusable, match="is no file"), Archive(tmp_path / "layout"):
        pass
    nested = _tar(tmp_path / "n.tar", {"index.json": deep(100_000)})
    with pytest.raises(EnvironmentUnusable), Archive(nested):
        pass


def test_an_image_that_somebody_is_just_removing_is_told(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    image = store.put(saved(tmp_path / "i.tar", LAYERS[0]), "n")
    with (image.folder / "image.json").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EnvironmentUnusable, match="removed meanwhile"), store.using(image):
            pass
    (image.folder / "image.json").unlink()
    with pytest.raises(EnvironmentUnusable, match="removed meanwhile"), store.using(image):
        pass


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match="No such file"), Archive(tmp_path / "nothing.tar"):
        pass


def test_folders_keep_their_times_and_the_root_may_have_an_entry(tmp_path: Path) -> None:
    """The sandbox compares its packed modules with folders' times."""
    told = {"type": tarfile.DIRTYPE, "mode": 0o755, "mtime": 1_000}
    entries = (("./", told, b""), ("./d", told, b""), file("./d/f"), ("./d/e", told, b""), file("./d/e/f"))
    root = ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", layer(*entries))).root.folder
    assert [(root / name).stat().st_mtime for name in ("d", "d/e")] == [1_000, 1_000]


def test_a_layout_does_not_read_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"manifests": []}')
    (path := tmp_path / "image").mkdir()
    (path / "index.json").symlink_to(tmp_path / "secret")
    with pytest.raises(EnvironmentUnusable, match="outside"), Archive(path):
        pass


def test_a_newer_image_takes_the_name_and_the_old_one_goes_unless_used(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    old = store.put(saved(tmp_path / "1.tar", LAYERS[0]), "n")
    other = {"config": {**CONFIG["config"], "Env": []}}
    new = store.put(saved(tmp_path / "2.tar", LAYERS[0], config=other), "n")
    assert store.find("n") == new != old
    with store.using(old):
        assert store.remove_unused() == 0
    assert store.remove_unused() == 1
    assert not old.folder.exists()
    assert store.find("n") == new
    assert store.remove_unused() == 0


def test_two_processes_may_put_the_same_image(tmp_path: Path) -> None:
    path = saved(tmp_path / "i.tar", *LAYERS)
    with ThreadPool(4) as pool:
        images = pool.map(lambda _: ImageStore(tmp_path / "store").put(path, "n"), range(4))
    assert len(set(map(str, images))) == 1
    check_tree(images[0].folder / "rootfs")
    assert len(list((tmp_path / "store" / "images").iterdir())) == 1


def test_what_a_killed_process_was_unpacking_is_put_again(tmp_path: Path) -> None:
    path, store = saved(tmp_path / "i.tar", *LAYERS), ImageStore(tmp_path / "store")
    image = store.put(path, "n")
    (image.folder / "image.json").unlink()
    (image.folder / "rootfs" / "tree").unlink()
    assert store.find("n") is None
    check_tree(store.put(path, "n").folder / "rootfs")


@pytest.mark.parametrize("name", ["a:1", "registry.example/a/b@sha256:00", "x" * 200, "..", "."])
def test_any_name_is_kept_inside_the_store(tmp_path: Path, name: str) -> None:
    store = ImageStore(tmp_path / "store")
    image = store.put(saved(tmp_path / "i.tar", *LAYERS), name)
    assert store.find(name) == image
    assert {path.name for path in tmp_path.iterdir()} == {"store", "i.tar"}
    assert store.find("another") is None
