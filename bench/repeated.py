"""Makes a long run of a short one, for what reads runs: its lines again and again, as other groups.

python -m bench.repeated RUN_DIR NEW_RUN_DIR ROLLOUTS
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

_ID = re.compile(rb'"rollout_id":"g\d{6}(-r\d+-a\d+)"')
_GROUP = re.compile(rb'"group":(\d+)')


def repeat(run: Path, new: Path, rollouts: int) -> int:
    """How many lines of rollouts `new` has: at least so many."""
    new.mkdir(parents=True)
    shutil.copy(run / "run.json", new)
    lines = {
        name: (run / name).read_bytes().splitlines(keepends=True) for name in ("rollouts.jsonl", "groups.jsonl")
    }
    size = 1 + max(int(_GROUP.findall(line)[0]) for line in lines["rollouts.jsonl"])
    written = 0
    with (new / "rollouts.jsonl").open("wb") as record, (new / "groups.jsonl").open("wb") as groups:
        for turn in range(-(-rollouts // len(lines["rollouts.jsonl"]))):
            record.writelines(_moved(line, turn * size) for line in lines["rollouts.jsonl"])
            groups.writelines(_moved(line, turn * size) for line in lines["groups.jsonl"])
            written += len(lines["rollouts.jsonl"])
    return written


def _moved(line: bytes, by: int) -> bytes:
    """The line as one of a group whose number is greater."""
    line = _GROUP.sub(lambda it: b'"group":%d' % (int(it[1]) + by), line, count=1)
    return _ID.sub(lambda it: b'"rollout_id":"g%06d%s"' % (int(it[0][15:21]) + by, it[1]), line)


if __name__ == "__main__":
    print(repeat(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])), "rollouts")
