"""A registry of npm packages on this machine's loopback, as npm asks for them: a document of each package, which
names the tarballs of its versions and their digests."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.fakes.archives import file, layer
from tests.fakes.wheel_index import Index, serving

_VERSION = "1.0.0"


@contextmanager
def npm_registry(packages: Mapping[str, Mapping[str, str]], host: str) -> Iterator[Index]:
    """`packages`: by their names, those that each depends on, with the ranges of their versions. One exports its
    name and what those export."""
    files: dict[str, bytes] = {}
    with serving(files, host) as index:
        for name, needs in packages.items():
            described = {"name": name, "version": _VERSION, "main": "index.js", "dependencies": dict(needs)}
            exported = [json.dumps(name), *(f"require({json.dumps(need)})" for need in needs)]
            program = f"module.exports = {' + '.join(exported)};\n"
            texts = {"package.json": json.dumps(described), "index.js": program}
            packed = gzip.compress(layer(*(file(f"package/{one}", text.encode()) for one, text in texts.items())))
            place = f"/{name}/-/{name}-{_VERSION}.tgz"
            digest = base64.b64encode(hashlib.sha512(packed).digest()).decode()
            dist = {"tarball": f"http://{index.address}{place}", "integrity": f"sha512-{digest}"}
            versions = {_VERSION: {**described, "dist": dist}}
            document = {"name": name, "dist-tags": {"latest": _VERSION}, "versions": versions}
            files |= {f"/{name}": json.dumps(document).encode(), place: packed}
        yield index
