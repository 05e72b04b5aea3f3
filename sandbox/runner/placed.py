"""Files that the orchestrator sends, laid where model-written code can read them."""

import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.errors import EpisodeCrashed


def placed(files: Iterable[pb.ProgramFile], prefix: str, *, writable: bool = False) -> Path:
    """A new folder with these files, which model-written code cannot change. `writable`: it may change its copies.
    Raises EpisodeCrashed."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        folder.chmod(0o755)
        for file in files:
            path = PurePosixPath(file.path)
            if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in file.path:
                raise EpisodeCrashed(f"a file cannot be called {file.path[:80]!r}")
            target = folder.joinpath(*path.parts)
            target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            target.write_bytes(file.content)
            target.chmod((0o644 if writable else 0o444) | (0o111 if file.executable else 0))
    except OSError as error:
        raise EpisodeCrashed(f"files cannot be placed: {error.strerror}") from error
    return folder
