"""Takes the operator's file of authorities out of an image that was built with it.

Docker's classic builder can show steps a file only as a layer. Here that layer goes, with the variables that name
the file and what the history tells of both: in the image as `docker save` writes it, before it gets a name.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from typing import IO, Any

from orchestrator.launch.image.site import CA_PLACE

_NAME = CA_PLACE.removeprefix("/")
_MANIFEST = "manifest.json"
_OTHER_LISTS = ("repositories", "index.json", "oci-layout")  # they would name the image as it was


def without_ca(saved: IO[bytes], out: IO[bytes], tag: str) -> None:
    """Writes the saved image to `out` without the file, called `tag`, for `docker load`. Both are rewound. Blocks.
    Raises OSError, and ValueError or KeyError if it is no saved image."""
    with tarfile.open(fileobj=saved, mode="r:") as source, tarfile.open(fileobj=out, mode="w") as target:
        manifest = _json(source, _MANIFEST)[0]
        gone = [number for number, layer in enumerate(manifest["Layers"]) if _is_ours(source, layer)]
        config = json.dumps(_cleaned(_json(source, manifest["Config"]), gone)).encode()
        name = f"{hashlib.sha256(config).hexdigest()}.json"
        layers = [layer for number, layer in enumerate(manifest["Layers"]) if number not in gone]
        left_out = {_MANIFEST, manifest["Config"], *_OTHER_LISTS, *(set(manifest["Layers"]) - set(layers))}
        for entry in source:
            if entry.name not in left_out:
                target.addfile(entry, source.extractfile(entry) if entry.isreg() else None)
        new = json.dumps([{"Config": name, "RepoTags": [tag], "Layers": layers}]).encode()
        for path, content in ((name, config), (_MANIFEST, new)):
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            target.addfile(entry, io.BytesIO(content))
    saved.seek(0)
    out.seek(0)


def _json(source: tarfile.TarFile, name: str) -> Any:
    content = source.extractfile(name)
    if content is None:
        raise ValueError(f"{name} is not a file")
    return json.load(content)


def _is_ours(source: tarfile.TarFile, layer: str) -> bool:
    """Whether the layer has the file, and nothing else."""
    content = source.extractfile(layer)
    if content is None:
        raise ValueError(f"{layer} is not a file")
    found = False
    with tarfile.open(fileobj=content, mode="r:*") as tar:
        for entry in tar:
            name = entry.name.removeprefix("./").strip("/")
            if name not in ("", ".", _NAME):
                return False
            found |= name == _NAME
    return found


def _cleaned(image: Mapping[str, Any], gone: list[int]) -> dict[str, Any]:
    """The image's configuration without these layers, our variables, and what made them."""
    rest = {key: value for key, value in image.items() if key not in ("container", "container_config")}
    history = [step for step in image.get("history") or () if CA_PLACE not in str(step.get("created_by"))]
    ids = [layer for number, layer in enumerate(image["rootfs"]["diff_ids"]) if number not in gone]
    own = dict(image["config"])
    own["Env"] = [entry for entry in own.get("Env") or () if not entry.endswith(f"={CA_PLACE}")]
    return {**rest, "config": own, "history": history, "rootfs": {**image["rootfs"], "diff_ids": ids}}
