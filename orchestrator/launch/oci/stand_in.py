"""Images that stand in for those of the store while a task's Dockerfile is built, so that none is copied.

A stand-in has the image's configuration, and one layer with a file that nobody sees: `Buildah` mounts the image's
own files over it. What is built has this layer at the bottom, and in the store the image's layers in its place.
"""

import hashlib
import io
import json
import tarfile
from pathlib import Path

from orchestrator.launch.image.facts import architecture
from orchestrator.launch.names import LABEL_TASK
from orchestrator.launch.oci.store import StoredImage

_MADE = "1970-01-01T00:00:00Z"


def write_stand_in(image: StoredImage, name: str, out: Path) -> str:
    """Writes what `docker save` would of the stand-in, called `name`. Returns the id of its layer, which no other
    image's has. Blocks. Raises OSError."""
    layer = _tar({f".stands-for-{image.digest}": b""})
    layer_id = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    labels = image.config.get("Labels") or {}
    own = {key: image.config[key] for key in ("Env", "Entrypoint", "User", "WorkingDir") if image.config.get(key)}
    serving = image.config.get("Serving") or {}
    own |= {"Cmd": serving["Cmd"]} if serving.get("Cmd") else {}
    own |= {"ExposedPorts": {port: {} for port in serving["ExposedPorts"]}} if serving.get("ExposedPorts") else {}
    config = {
        "architecture": architecture(),
        "os": "linux",
        "created": _MADE,
        "config": {**own, "Labels": {key: value for key, value in labels.items() if key != LABEL_TASK}},
        "rootfs": {"type": "layers", "diff_ids": [layer_id]},
        "history": [{"created": _MADE, "created_by": "base"}],  # buildah counts layers without a history wrongly
    }
    manifest = [{"Config": "config.json", "RepoTags": [f"{name}:latest"], "Layers": ["layer.tar"]}]
    files = {"layer.tar": layer, "config.json": json.dumps(config).encode()}
    out.write_bytes(_tar({**files, "manifest.json": json.dumps(manifest).encode()}))
    return layer_id


def _tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
