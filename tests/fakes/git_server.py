"""A git server on this machine's loopback: git's own `http-backend`, which speaks its smart protocol."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.parser import BytesHeaderParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


def repository(place: Path, files: Mapping[str, str]) -> None:
    """A bare one with one commit of these files, always the same."""
    who = {f"GIT_{one}_{what}": value for one in ("AUTHOR", "COMMITTER") for what, value in _WHO.items()}

    def git(*words: str, at: Path = place) -> None:
        subprocess.run(["git", *words], cwd=at, check=True, capture_output=True, env={**os.environ, **who})

    work = place.with_suffix(".work")
    work.mkdir(parents=True)
    for name, text in files.items():
        (work / name).write_text(text)
    git("init", "-q", "-b", "main", at=work)
    git("add", ".", at=work)
    git("commit", "-q", "-m", "All of it", at=work)
    git("clone", "-q", "--bare", str(work), str(place), at=work)


_WHO = {"NAME": "a", "EMAIL": "a@example.org", "DATE": "2026-01-01T00:00:00Z"}


@contextmanager
def serving(folder: Path, host: str) -> Iterator[str]:
    """The address of a server of the repositories in this folder."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            given = {
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(folder),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": url.path,
                "QUERY_STRING": url.query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            }
            ended = subprocess.run(["git", "http-backend"], input=body, capture_output=True, env=given)
            head, _, content = ended.stdout.partition(b"\r\n\r\n")
            fields = BytesHeaderParser().parsebytes(head)
            self.send_response(int(fields.get("Status", "200").split()[0]))
            for name, value in fields.items():
                if name != "Status":
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"{host}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
