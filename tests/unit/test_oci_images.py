"""Images without an Engine: read from what `docker save` writes and from OCI layouts, unpacked, named, removed."""

from __future__ import annotations

import bz2
import errno
import fcntl
import gzip
import hashlib
import json
import lzma
import os
import stat
import tarfile
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from orchestrator.errors import EnvironmentUnusable, ImageUnusable
from orchestrator.launch.oci import layers as layers_module
from orchestrator.launch.oci.archive import Archive
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.oci.tree import Tree
from tests.fakes.archives import CONFIG, Entry, configured, file, folder, layer, layout, link, saved, tarred

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
    for name in ("etc/hosts", "etc/machine-id"):
        texts.pop(name, None)
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
        path = tarred(tmp_path / "image.tar", files)
    store = ImageStore(tmp_path / "store")
    image = store.put(path, "name:1")
    assert image.digest == hashlib.sha256(configured(*LAYERS)).hexdigest()
    assert image.config["Env"] == ["A=b"]
    assert image.config["Entrypoint"] == ["/run-me"]
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
    with pytest.raises(ImageUnusable, match="image"):
        ImageStore(place / "store").put(saved(place / "i.tar", layer(*entries)), "n")
    assert not list(tmp_path.rglob("outside"))
    assert Path("/etc").stat().st_mtime_ns == before[Path("/etc")]
    assert list((place / "store" / "images").iterdir()) == []


@pytest.mark.parametrize("place", ["tmp", "workspace", "run", "dev", "etc/hosts", "proc"])
def test_places_to_mount_on_that_lead_elsewhere_are_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "victim").mkdir(mode=0o700)
    way = folder("etc"), link(place, str(tmp_path / "victim"))
    with pytest.raises(ImageUnusable, match="link"):
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
    with pytest.raises(ImageUnusable) as refused:
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
    with pytest.raises(ImageUnusable) as refused:
        store.put(saved(tmp_path / "i.tar", bad), "n")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700
    assert store.find("n") is None
    assert store.remove_unused() == 0


def test_what_lies_under_a_digest_is_what_its_configuration_names(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    good, evil = layer(file("a", b"good")), layer(file("a", b"evil"))
    for number, layers in enumerate(([evil], [good, evil], [])):
        with pytest.raises(ImageUnusable, match=r"configuration (names|says)"):
            store.put(saved(tmp_path / f"{number}.tar", *layers, told=configured(good)), "trusted:1")
    damaged = bytearray(gzip.compress(good))
    damaged[len(damaged) // 2] ^= 0xFF
    with pytest.raises(ImageUnusable):
        store.put(saved(tmp_path / "d.tar", bytes(damaged), told=configured(good)), "trusted:1")
    assert store.find("trusted:1") is None
    image = store.put(saved(tmp_path / "g.tar", gzip.compress(good), told=configured(good)), "trusted:1")
    assert (image.folder / "rootfs" / "a").read_bytes() == b"good"


def test_an_image_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "i.tar", *LAYERS)
    for name, least in (("_IMAGE_BYTES", 1 << 10), ("_IMAGE_ENTRIES", 3)):
        with monkeypatch.context() as patched:
            patched.setattr(layers_module, name, least)
            with pytest.raises(ImageUnusable, match="more than"):
                ImageStore(tmp_path / "store").put(path)
    assert ImageStore(tmp_path / "store").put(path)


def test_an_index_that_names_itself_and_a_pipe_are_refused(tmp_path: Path) -> None:
    inner = b'{"manifests": [{"digest": "sha256:self"}]}'
    with (
        pytest.raises(ImageUnusable, match="without end"),
        Archive(tarred(tmp_path / "i.tar", {"index.json": inner, "blobs/sha256/self": inner})),
    ):
        pass
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ImageUnusable, match="neither a file nor a folder"), Archive(tmp_path / "pipe"):
        pass
    (tmp_path / "layout").mkdir()
    os.mkfifo(tmp_path / "layout" / "index.json")
    with pytest.raises(ImageUnusable, match="is not a file"), Archive(tmp_path / "layout"):
        pass
    nested = tarred(tmp_path / "n.tar", {"index.json": deep(100_000)})
    with pytest.raises(ImageUnusable), Archive(nested):
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
    with pytest.raises(ImageUnusable, match="No such file"), Archive(tmp_path / "nothing.tar"):
        pass


def test_folders_keep_their_times_and_the_root_may_have_an_entry(tmp_path: Path) -> None:
    """The sandbox compares its packed modules with folders' times."""
    told = {"type": tarfile.DIRTYPE, "mode": 0o755, "mtime": 1_000}
    entries = (("./", told, b""), ("./d", told, b""), file("./d/f"), ("./d/e", told, b""), file("./d/e/f"))
    root = ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", layer(*entries))).root
    assert [(root / name).stat().st_mtime for name in ("d", "d/e")] == [1_000, 1_000]


def test_a_layout_does_not_read_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"manifests": []}')
    (path := tmp_path / "image").mkdir()
    (path / "index.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ImageUnusable, match="outside"), Archive(path):
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


# ---------------------------------------------------------------- what a hostile image would do to this machine


def left(store: ImageStore) -> list[Path]:
    """Of images that were refused."""
    return [path for part in ("images", "drafts") for path in (store.folder / part).iterdir()]


@pytest.mark.parametrize("target", ["absolute", "relative"])
@pytest.mark.parametrize("between", ["layers", "entries"])
def test_a_folder_that_becomes_a_link_changes_nothing_behind_it(tmp_path: Path, target: str, between: str) -> None:
    (victim := tmp_path / "victim").mkdir()
    (victim / "inner").mkdir(mode=0o700)
    os.utime(victim / "inner", (5, 5))
    to = str(victim) if target == "absolute" else "../../../../victim"
    first, then = [folder("a"), folder("a/inner", 0o755)], [file(".wh.a"), link("a", to)]
    layers = [layer(*first), layer(*then)] if between == "layers" else [layer(*first, link("a", to))]
    image = ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", *layers))
    assert (image.root / "a").is_symlink()
    assert stat.S_IMODE((victim / "inner").stat().st_mode) == 0o700
    assert (victim / "inner").stat().st_mtime == 5


@pytest.mark.parametrize(
    "entries",
    [
        [link("way", "/etc"), link("mine", "way/passwd", tarfile.LNKTYPE)],
        [link("way", "/etc/passwd"), link("mine", "way", tarfile.LNKTYPE)],
        [folder("a"), link("a/b", "../.."), file("a/b/outside", b"x")],
        [link("one", "two"), link("two", ".."), file("one/outside", b"x")],
        [link("way", "/etc"), file("way/.wh..wh..opq")],
        [file("plain"), file("plain/outside", b"x")],
        [link("loop", "loop/loop"), file("loop/outside", b"x")],
        [file("a\x00b/../../outside", b"x")],
    ],
)
def test_no_link_is_followed_out_of_an_image(tmp_path: Path, entries: list[Entry]) -> None:
    store, before = ImageStore(tmp_path / "store"), sorted(os.listdir("/etc"))
    try:
        image = store.put(saved(tmp_path / "i.tar", layer(*entries)))
    except ImageUnusable:
        assert left(store) == []
    else:  # what comes after a NUL is no part of the name
        assert (image.root / "a").is_file()
    assert not [path for path in tmp_path.rglob("outside") if path.exists()]
    assert sorted(os.listdir("/etc")) == before


def test_a_link_inside_is_followed_as_a_container_does(tmp_path: Path) -> None:
    layers = layer(folder("usr/bin"), link("bin", "usr/bin")), layer(file("./bin/new", b"x"), folder("bin/more"))
    root = ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", *layers)).root
    assert (root / "bin").is_symlink()
    assert (root / "usr/bin/new").read_bytes() == b"x"
    assert (root / "usr/bin/more").is_dir()


ZEROS = gzip.compress(bytes(1 << 20))  # what is put together of it unpacks to a gigabyte and more


def bomb(path: Path, name: str, kind: bytes = tarfile.REGTYPE, behind: bytes = b"") -> Path:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type = 1200 << 20, kind
    head = entry.tobuf(tarfile.GNU_FORMAT)
    path.write_bytes(gzip.compress(head) + 1200 * ZEROS + gzip.compress(behind))
    return path


@pytest.mark.long
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_small_file_that_unpacks_to_a_gigabyte_is_refused(tmp_path: Path, kind: bytes) -> None:
    good = saved(tmp_path / "good.tar", layer(file("a")))
    path = bomb(tmp_path / "i.tar.gz", "large", kind, good.read_bytes())
    assert path.stat().st_size < 1_400_000
    with pytest.raises(ImageUnusable, match="more than 100 times its size"):
        ImageStore(tmp_path / "store").find(str(path))


@pytest.mark.long
def test_a_layer_that_unpacks_to_a_gigabyte_is_refused(tmp_path: Path) -> None:
    packed = bomb(tmp_path / "layer.tar.gz", "large").read_bytes()
    ids = {"rootfs": {"diff_ids": [f"sha256:{'0' * 64}"]}}
    store = ImageStore(tmp_path / "store")
    with pytest.raises(ImageUnusable, match="more than 100 times its size"):
        store.put(saved(tmp_path / "i.tar", packed, told=json.dumps(ids).encode()))
    assert left(store) == []


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, lambda content: content])
def test_an_image_may_be_compressed_as_a_whole(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    plain = saved(tmp_path / "i.tar", *LAYERS)
    (packed := tmp_path / "packed").write_bytes(pack(plain.read_bytes()))
    check_tree(ImageStore(tmp_path / "store").put(packed).folder / "rootfs")


def test_zstd_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "i").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    with pytest.raises(ImageUnusable, match="zstd: save it with gzip"):
        ImageStore(tmp_path / "store").put(tmp_path / "i")
    with pytest.raises(ImageUnusable, match="zstd: save it with gzip"):
        ImageStore(tmp_path / "store").put(saved(tmp_path / "l", b"\x28\xb5\x2f\xfd" + bytes(100)))


DEEP = "/".join(1450 * ["n"])


@pytest.mark.slow
@pytest.mark.parametrize("then", [[], [file(".wh..wh..opq")]])
def test_an_image_of_any_depth_can_be_replaced_and_removed(tmp_path: Path, then: list[Entry]) -> None:
    store = ImageStore(tmp_path / "store")
    layers = [layer(folder(DEEP), file(f"{DEEP}/leaf")), *([layer(*then)] if then else [])]
    image = store.put(saved(tmp_path / "i.tar", *layers), "n")
    assert (image.root / "n").is_dir() == (not then)
    store.put(saved(tmp_path / "2.tar", layer(file("a"))), "n")
    assert store.remove_unused() == 1
    assert not image.folder.exists()
    assert len(list((store.folder / "images").iterdir())) == 1


@pytest.mark.slow
def test_links_that_make_names_longer_cost_no_more_than_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each link leads to the end of the one before: 40 of them make 80,000 folders of a short name."""
    entries = [link("l0", "x/" * 60)]
    entries += [link(f"l{number}", f"l{number - 1}/{'x/' * 60}") for number in range(1, 10)]
    path = saved(tmp_path / "i.tar", layer(*entries, *(file(f"l9/{number}") for number in range(5))))
    monkeypatch.setattr(layers_module, "_MOVES", 1_000)
    store = ImageStore(tmp_path / "store")
    with pytest.raises(ImageUnusable, match="more than"):
        store.put(path)
    assert left(store) == []
    monkeypatch.undo()
    image = store.put(path)
    (image.folder / "image.json").unlink()
    assert store.remove_unused() == 1


def test_folders_without_an_entry_count_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "_IMAGE_ENTRIES", 100)
    with pytest.raises(ImageUnusable, match="more than"):
        ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", layer(file("x/" * 200 + "y"))))


def sized(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type = size, kind
    return entry.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, b"Z"])
@pytest.mark.parametrize("size", [-512, -1024, 1 << 60])
def test_an_impossible_size_is_refused(tmp_path: Path, kind: bytes, size: int) -> None:
    bad = sized("x", size, kind)
    (tmp_path / "outer.tar").write_bytes(bad)
    saved(tmp_path / "inner.tar", layer(file("a"))[:512] + bad)
    for number, path in enumerate((tmp_path / "outer.tar", tmp_path / "inner.tar")):
        with pytest.raises(ImageUnusable) as refused:
            ImageStore(tmp_path / f"store{number}").put(path)
        assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_headers_of_one_entry_are_bounded_together(tmp_path: Path) -> None:
    """A map of a sparse file is read until it ends, whatever its entry's size."""
    numbers = b"900000\n" + b"1\n" * 900_000
    packed = tarfile.TarInfo("sparse")
    packed.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    packed.size = len(numbers)
    head = packed.tobuf(tarfile.PAX_FORMAT)
    with pytest.raises(ImageUnusable, match="too long"):
        ImageStore(tmp_path / "store").put(
            saved(tmp_path / "i.tar", head + numbers + bytes(-len(numbers) % 512 + 1024))
        )


@pytest.mark.parametrize(
    "config",
    [
        {"Env": 5}, {"Env": {"a": "b"}}, {"Env": [5]}, {"Env": "A=b"}, {"Entrypoint": "/run-me"},
        {"Entrypoint": [None]}, {"Labels": ["a"]}, {"Labels": {"a": 5}}, {"Volumes": 5}, {"Volumes": ["/x"]},
        {"User": 5}, {"User": ["app"]}, 5,
    ],
)  # fmt: skip
def test_a_configuration_of_other_types_is_refused(tmp_path: Path, config: object) -> None:
    """Else it would be this process that trips over it, in a run."""
    with pytest.raises(ImageUnusable, match="was expected"):
        ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", LAYERS[0], config={"config": config}))


def test_an_image_s_user_and_folder_are_kept_as_they_are(tmp_path: Path) -> None:
    config = {"config": {"User": "app:50", "WorkingDir": "/srv/app", "StopSignal": "SIGTERM"}}
    image = ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", LAYERS[0], config=config))
    assert (image.config["User"], image.config["WorkingDir"]) == ("app:50", "/srv/app")
    assert image.config["StopSignal"] is True
    with pytest.raises(EnvironmentUnusable):
        ImageStore(tmp_path / "store").put(saved(tmp_path / "j.tar", LAYERS[0], config={"config": {"User": [3]}}))


def test_what_sandboxes_do_not_use_of_a_configuration_is_left_out(tmp_path: Path) -> None:
    config = {"config": {"Env": ["A=b"], "Entrypoint": None, "Labels": None, "Cmd": json.loads(deep(300))}}
    image = ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", LAYERS[0], config=config))
    assert image.config == {
        "Env": ["A=b"],
        "Entrypoint": [],
        "Labels": {},
        "Volumes": {},
        "Cmd": True,
        "Serving": {"Cmd": [], "ExposedPorts": [], "Healthcheck": {"Test": []}},
    }


def test_what_makes_a_service_of_an_image_is_kept_for_it(tmp_path: Path) -> None:
    check = {"Test": ["CMD", "true"], "Interval": 5, "Odd": [[]]}
    config = {"config": {"Cmd": ["serve"], "ExposedPorts": {"80/tcp": {}}, "Healthcheck": check}}
    store, path = ImageStore(tmp_path / "store"), saved(tmp_path / "i.tar", LAYERS[0], config=config)
    kept = {"Test": ["CMD", "true"], "Interval": 5}
    wanted = {"Cmd": ["serve"], "ExposedPorts": ["80/tcp"], "Healthcheck": kept}
    image = store.put(path)
    assert image.config["Serving"] == wanted
    note = image.folder / "image.json"
    earlier = json.loads(note.read_text())
    del earlier["config"]["Serving"]
    note.write_text(json.dumps(earlier))
    assert store.put(path).config["Serving"] == wanted


def test_whom_an_image_runs_as_is_kept(tmp_path: Path) -> None:
    config = {"config": {"User": "app:staff"}}
    image = ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", LAYERS[0], config=config))
    assert image.config["User"] == "app:staff"


@pytest.mark.parametrize(
    "error",
    [OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EPERM)]
    + [MemoryError()],
    ids=repr,
)
def test_what_this_machine_lacks_is_not_the_image_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object) -> int:
        raise error

    path = saved(tmp_path / "i.tar", *LAYERS)
    monkeypatch.setattr(Tree, "folder", fails)
    with pytest.raises(EnvironmentUnusable) as refused:
        ImageStore(tmp_path / "store").put(path)
    assert not isinstance(refused.value, ImageUnusable)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"architecture": "s390x"}, "is for linux/s390x, this machine is linux/"),
        ({"os": "windows"}, "is for windows/"),
        ({"rootfs": {"diff_ids": []}}, "has no root file system"),
        ({"rootfs": {"diff_ids": ["sha256:1"] * 10_000}}, "has 10000 layers, at most 256"),
    ],
)
def test_an_image_that_no_sandbox_can_have_is_refused_in_one_line(
    tmp_path: Path, more: dict[str, object], words: str
) -> None:
    store = ImageStore(tmp_path / "store")
    told = json.dumps(json.loads(configured(LAYERS[0])) | more).encode()
    with pytest.raises(ImageUnusable, match=words) as refused:
        store.put(saved(tmp_path / "i.tar", LAYERS[0], told=told))
    assert str(refused.value).isprintable()
    assert not (tmp_path / "store").exists(), "nothing is left"


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31mb", "a\udcff", "a\u202eb", "n" * 300])
def test_any_name_is_kept_or_refused_in_one_plain_line(tmp_path: Path, name: str) -> None:
    store = ImageStore(tmp_path / "store")
    if len(name) < 256:
        root = store.put(saved(tmp_path / "i.tar", layer(file(name, b"x")))).root
        assert (root / name).read_bytes() == b"x"
    with pytest.raises(ImageUnusable) as refused:
        store.put(saved(tmp_path / "2.tar", layer(file(name), file(f"{name}/b"), file(f"../{name}"))))
    assert str(refused.value).isprintable()
    str(refused.value).encode()


def test_what_can_change_who_one_is_does_not_come_along(tmp_path: Path) -> None:
    entries = [
        file("setuid", mode=0o6755),
        folder("sticky", 0o3777),
        ("pipe", {"type": tarfile.FIFOTYPE}, b""),
        ("disk", {"type": tarfile.BLKTYPE, "devmajor": 8, "devminor": 0, "mode": 0o666}, b""),
        ("able", {"mode": 0o755, "pax_headers": {"SCHILY.xattr.security.capability": "\1\0\0\2"}}, b"x"),
        ("noted", {"mode": 0o755, "pax_headers": {"SCHILY.xattr.user.a": "b"}}, b"x"),
        file("twice", b"1"),
        file("./twice", b"2"),
        file("//twice", b"3"),
        file("TWICE", b"4"),
    ]
    root = ImageStore(tmp_path / "store").put(saved(tmp_path / "i.tar", layer(*entries))).root
    assert stat.S_IMODE((root / "setuid").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "sticky").stat().st_mode) == 0o755
    assert not (root / "pipe").exists()
    assert not (root / "disk").exists()
    assert os.listxattr(root / "able") == os.listxattr(root / "noted") == []
    assert (root / "twice").read_bytes() == b"3"
    assert (root / "TWICE").read_bytes() == b"4"


@pytest.mark.parametrize("broken", ["manifest", "config"])
def test_what_is_not_what_its_digest_says_is_refused(tmp_path: Path, broken: str) -> None:
    files = layout(LAYERS[0])
    (described,) = json.loads(files["index.json"])["manifests"]
    name = f"blobs/sha256/{described['digest'].partition(':')[2]}"
    if broken == "config":
        name = f"blobs/sha256/{json.loads(files[name])['config']['digest'].partition(':')[2]}"
    files[name] += b" "
    with pytest.raises(ImageUnusable, match="is something else"):
        ImageStore(tmp_path / "store").put(tarred(tmp_path / "i.tar", files))


@pytest.mark.long
def test_an_outer_tar_of_too_many_files_is_refused(tmp_path: Path) -> None:
    path = tarred(tmp_path / "i.tar", {str(number): b"" for number in range(10_001)})
    with pytest.raises(ImageUnusable, match="more than 10000 files"):
        ImageStore(tmp_path / "store").put(path)


def test_a_layer_that_docker_saved_as_a_link_is_found(tmp_path: Path) -> None:
    content = layer(file("a", b"x"))
    names = ["one/layer.tar", "two/layer.tar"]
    entries = [
        file("config.json", configured(content, content)),
        file("manifest.json", json.dumps([{"Config": "config.json", "Layers": names}]).encode()),
        file("one/layer.tar", content),
        link("two/layer.tar", "../one/layer.tar"),
    ]
    (path := tmp_path / "i.tar").write_bytes(layer(*entries))
    assert (ImageStore(tmp_path / "store").put(path).root / "a").read_bytes() == b"x"
    entries[2] = link("one/layer.tar", "../two/layer.tar")
    path.write_bytes(layer(*entries))
    with pytest.raises(ImageUnusable, match="is not a file"):
        ImageStore(tmp_path / "other").put(path)


# ---------------------------------------------------------------- layers that images share


def test_images_share_the_files_of_their_common_layers(tmp_path: Path) -> None:
    store, common = ImageStore(tmp_path / "store"), layer(file("a", b"common"), file("gone", b"common"))
    one = store.put(saved(tmp_path / "1.tar", common, layer(file("b", b"one"))), "one")
    # Of a layer that is kept already not even the content is read: here it is not in the archive any more.
    two = store.put(
        saved(tmp_path / "2.tar", b"", layer(file(".wh.gone")), told=configured(common, layer(file(".wh.gone"))))
    )
    assert (one.root / "a").samefile(two.root / "a")
    assert (one.root / "gone").read_bytes() == b"common"
    assert not (two.root / "gone").exists()
    assert not (two.root / "b").exists()
    assert two.size_bytes == 12


def test_a_layer_goes_with_the_last_image_that_is_made_of_it(tmp_path: Path) -> None:
    store, common, own = ImageStore(tmp_path / "store"), layer(file("a", b"x")), layer(file("b", b"y"))
    store.put(saved(tmp_path / "1.tar", common, own), "n")
    last = store.put(saved(tmp_path / "2.tar", common), "n")
    assert len(list((store.folder / "layers").iterdir())) == 2
    assert store.remove_unused() == 1
    (kept,) = (store.folder / "layers").iterdir()
    assert kept.name == hashlib.sha256(common).hexdigest()
    assert (last.root / "a").samefile(kept / "0")
    (store.folder / "names" / "n").unlink()
    assert store.remove_unused() == 1
    assert list((store.folder / "layers").iterdir()) == []


def test_a_layer_that_was_cut_off_is_unpacked_anew(tmp_path: Path) -> None:
    store, content = ImageStore(tmp_path / "store"), layer(file("a", b"whole"))
    torn = store.folder / "layers" / hashlib.sha256(content).hexdigest()
    torn.mkdir(parents=True)
    (torn / "0").write_bytes(b"ha")
    image = store.put(saved(tmp_path / "i.tar", content), "n")
    assert (image.root / "a").read_bytes() == b"whole"


def test_where_a_file_can_have_no_more_names_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.EMLINK, "Too many links")

    monkeypatch.setattr(os, "link", refused)
    store = ImageStore(tmp_path / "store")
    image = store.put(saved(tmp_path / "i.tar", layer(file("a", b"x" * 9, mode=0o640))), "n")
    assert (image.root / "a").read_bytes() == b"x" * 9
    assert stat.S_IMODE((image.root / "a").stat().st_mode) == 0o640
    assert image.size_bytes == 9


@pytest.mark.parametrize("name", ["sha256:../../victim", "sha256:", "md5:00", f"sha256:{'A' * 64}"])
def test_layers_are_named_by_nothing_but_a_digest(tmp_path: Path, name: str) -> None:
    ids = json.dumps({"rootfs": {"diff_ids": [name]}}).encode()
    store = ImageStore(tmp_path / "store")
    with pytest.raises(ImageUnusable, match="no SHA-256"):
        store.put(saved(tmp_path / "i.tar", layer(file("a")), told=ids))
    assert left(store) == []


# ---------------------------------------------------------------- layers that stand for an image's


def test_a_layer_that_stands_for_an_image_brings_its_files_and_is_not_there_itself(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    base = store.put(saved(tmp_path / "base.tar", *LAYERS), "base")
    marker, added = layer(file("marker")), layer(file("etc/.wh.kept"), file("new", b"9"))
    built = saved(tmp_path / "built.tar", marker, added)
    stand_ins = {f"sha256:{hashlib.sha256(marker).hexdigest()}": base.layers}
    image = store.put(built, "built", stand_ins)
    assert image.layers == (*base.layers, f"sha256:{hashlib.sha256(added).hexdigest()}")
    assert sorted(path.name for path in (store.folder / "layers").iterdir()) == sorted(
        layer_id.removeprefix("sha256:") for layer_id in image.layers
    )
    assert (image.root / "new").read_text() == "9"
    assert (image.root / "bin").samefile(base.root / "bin")
    assert not (image.root / "etc" / "kept").exists()
    assert not (image.root / "marker").exists()
    assert image.digest != store.put(built).digest
    assert (store.put(built).root / "marker").exists(), "for nobody else it stands for anything"
    check_tree(base.root)


def test_what_stands_for_a_removed_image_is_refused(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "store")
    marker = layer(file("marker"))
    stand_ins = {f"sha256:{hashlib.sha256(marker).hexdigest()}": [f"sha256:{'0' * 64}"]}
    with pytest.raises(ImageUnusable, match="the image that it was built on was removed meanwhile"):
        store.put(saved(tmp_path / "built.tar", marker), "built", stand_ins)
    assert store.images() == []


def test_a_small_addition_to_a_large_image_is_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "_FREE_BYTES", 1 << 10)
    store = ImageStore(tmp_path / "store")
    base = store.put(saved(tmp_path / "base.tar", layer(file("large", bytes(1 << 20)))), "base")
    marker, added = layer(file("marker")), layer(file("new", b"9"))
    stand_ins = {f"sha256:{hashlib.sha256(marker).hexdigest()}": base.layers}
    image = store.put(saved(tmp_path / "built.tar", marker, added), None, stand_ins)
    assert (image.root / "large").stat().st_size == 1 << 20
