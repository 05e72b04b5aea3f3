"""A fifth for each figure."""

import json
import re
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path
from statistics import mean

import judge

LINE = re.compile(r'(\S+) - - \[(\S+ \+0000)\] "[A-Z]+ (\S+) HTTP/1\.1" (\d{3}) \d+ (\d+)ms')


def figures(log):
    requests = [match.groups() for line in log.splitlines() if (match := LINE.fullmatch(line))]
    hours = Counter(f"{datetime.strptime(time, '%d/%b/%Y:%H:%M:%S %z'):%Y-%m-%d %H}" for _, time, *_ in requests)
    took = defaultdict(list)
    for _, _, path, _, milliseconds in requests:
        took[path.partition("?")[0]].append(int(milliseconds))
    return {
        "requests": len(requests),
        "clients": len({client for client, *_ in requests}),
        "errors": sum(500 <= int(status) <= 599 for *_, status, _ in requests),
        "busiest_hour": max(hours, key=hours.__getitem__),
        "slowest_path": max(took, key=lambda path: mean(took[path])),
    }


def report():
    try:
        value = json.loads(judge.text("/app/report.json") or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


given = report()
expected = figures(Path("/tests/access.log").read_text())
judge.finish({name: judge.same(given.get(name, judge.FAILED), value) for name, value in expected.items()})
