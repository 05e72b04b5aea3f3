"""A package index on this machine's loopback, with wheels of packages that this Python has. It notes what it is
asked."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution

PYTEST = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")


@dataclass
class Index:
    """`address`: HOST:PORT. `asked`: paths, in their order."""

    address: str
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving(files: Mapping[str, bytes], host: str = "127.0.0.1") -> Iterator[Index]:
    """Serves these files by their paths."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append(self.path)
            content = files.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header(
                "Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream"
            )
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        index = Index(f"{host}:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield index
        finally:
            server.shutdown()
            thread.join()


def packages(names: Sequence[str] = PYTEST) -> dict[str, bytes]:
    """The files of an index, whose pages are below /simple."""
    files = {}
    for name in names:
        wheel = f"{name}-{distribution(name).version}-py3-none-any.whl"
        files[f"/simple/{name}/"] = f'<a href="/{wheel}">{wheel}</a>'.encode()
        files[f"/{wheel}"] = _wheel(name)
    return files


def _wheel(name: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for file in distribution(name).files or ():
            if ".." not in file.parts and file.suffix != ".pyc" and file.name not in ("INSTALLER", "REQUESTED"):
                archive.writestr(str(file), file.read_binary())
    return packed.getvalue()
