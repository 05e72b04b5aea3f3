"""The body of a request, in the codings that clients send: counted or in chunks, plain or compressed. Bounded."""

import zlib
from email.message import Message
from io import BufferedIOBase

from sandbox.runner.endpoint.checks import BadRequest, shown

MAX_BODY_BYTES = 4 << 20
_MAX_LINE_BYTES, _MAX_TRAILERS = 8 * 1024, 100
_EITHER = zlib.MAX_WBITS | 32  # zlib finds out which of its two containers it is
_WINDOWS = {"gzip": _EITHER, "x-gzip": _EITHER, "deflate": _EITHER}


def read_body(headers: Message, file: BufferedIOBase) -> bytes:
    """The bytes that the client meant. Raises BadRequest; then some of the body may be unread."""
    coding = headers.get("Transfer-Encoding", "").strip().lower()
    if coding and coding != "chunked":
        raise BadRequest(f"the transfer coding {shown(coding)} is not taken: send chunked", status=501)
    content = _chunked(file) if coding else _counted(headers.get("Content-Length", ""), file)
    for name in reversed(headers.get("Content-Encoding", "").lower().replace(" ", "").split(",")):
        if name not in ("", "identity"):
            content = _decompressed(name, content)
    return content


def _counted(length: str, file: BufferedIOBase) -> bytes:
    if not length.isdecimal() or len(length) > 9:
        raise BadRequest("a request needs a Content-Length, or the transfer coding chunked", status=411)
    _demand_room(int(length))
    return _exactly(int(length), file)


def _chunked(file: BufferedIOBase) -> bytes:
    content = bytearray()
    while size := _chunk_size(file):
        _demand_room(len(content) + size)
        content += _exactly(size, file)
        if _line(file):
            raise BadRequest("a chunk of the request is longer than it says")
    for _ in range(_MAX_TRAILERS):
        if not _line(file):
            return bytes(content)
    raise BadRequest("a request with too many trailers")


def _chunk_size(file: BufferedIOBase) -> int:
    digits = _line(file).partition(b";")[0].strip()
    if not 1 <= len(digits) <= 8 or digits.strip(b"0123456789abcdefABCDEF"):
        raise BadRequest("a chunk of the request has no size")
    return int(digits, 16)


def _line(file: BufferedIOBase) -> bytes:
    line = file.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise BadRequest("a request whose chunks break off")
    return line.rstrip(b"\r\n")


def _exactly(size: int, file: BufferedIOBase) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise BadRequest("a request whose body breaks off")
    return content


def _decompressed(name: str, content: bytes) -> bytes:
    window = _WINDOWS.get(name)
    if window is None:
        raise BadRequest(f"the content coding {shown(name)} is not taken: send identity or gzip", status=415)
    for tried in (
        (window, -zlib.MAX_WBITS) if name == "deflate" else (window,)
    ):  # some send deflate without a header
        reader = zlib.decompressobj(tried)
        try:
            plain = reader.decompress(content, MAX_BODY_BYTES + 1)
        except zlib.error:
            continue
        _demand_room(len(plain))
        if reader.eof:
            return plain
    raise BadRequest(f"the request is not valid {name}")


def _demand_room(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise BadRequest(f"a request of more than {MAX_BODY_BYTES} bytes", status=413)
