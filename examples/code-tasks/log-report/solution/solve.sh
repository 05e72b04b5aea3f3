#!/bin/sh
set -eu
python3 - <<'END'
import json
import re
from collections import Counter

MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
FORM = r'(\S+) - - \[(\d\d)/(\w{3})/(\d{4}):(\d\d):\d\d:\d\d \+0000\] "\w+ (\S+) HTTP/1\.1" (\d+) \d+ (\d+)ms'
clients, hours, count, time, errors = set(), Counter(), Counter(), Counter(), 0
for line in open("/app/access.log"):
    match = re.fullmatch(FORM, line.rstrip("\n"))
    if match:
        client, day, month, year, hour, path, status, took = match.groups()
        clients.add(client)
        hours[f"{year}-{MONTHS.index(month) + 1:02}-{day} {hour}"] += 1
        path = path.split("?")[0]
        count[path] += 1
        time[path] += int(took)
        errors += status.startswith("5")
report = {
    "requests": hours.total(),
    "clients": len(clients),
    "errors": errors,
    "busiest_hour": hours.most_common(1)[0][0],
    "slowest_path": max(count, key=lambda path: time[path] / count[path]),
}
json.dump(report, open("/app/report.json", "w"))
END
