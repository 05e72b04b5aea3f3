"""Images in files, as `docker save` and the OCI layout have them: made by hand, so that they can be hostile."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    return tarred(path, files | dict(zip(names, layers, strict=True)))


def tarred(path: Path, files: Mapping[str, bytes]) -> Path:
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
