"""What the page shows of a rollout's requests to the outside, and of the services beside its agent."""

from typing import Any

from orchestrator.run.lenient import count, number, objects, text
from orchestrator.types import count_crossings

MAX_REQUESTS = 200  # shown of one rollout; the record has all of them
MAX_SERVICES = 16
_MOST_URL_CHARS = 2000
_MOST_LOG_CHARS = 4000


def outside_counts(line: dict[str, Any]) -> dict[str, int]:
    """Of a line: its requests and what became of them, and its services. What there was none of is left out.
    Requests as `count_crossings` counts them; `ended`: services that ended by themselves."""
    crossings, services = objects(line.get("crossings")), objects(line.get("services"))
    counts = {
        **count_crossings((one.get("refusal"), one.get("source")) for one in crossings),
        **{way: sum(count(one.get(way)) for one in crossings) for way in ("sent", "received")},
        "services": len(services),
        "ended": sum(bool(one.get("ended")) for one in services),
    }
    return {name: number for name, number in counts.items() if number}


def requests_shown(crossings: object) -> dict[str, Any]:
    """The first requests of a line, and how many there are in all, refused ones, and ones beyond those shown."""
    each = objects(crossings)
    return {
        "count": len(each),
        "refused": sum(bool(one.get("refusal")) for one in each),
        "shown": [_request(one) for one in each[:MAX_REQUESTS]],
    }


def _request(one: dict[str, Any]) -> dict[str, Any]:
    host = text(one.get("host"), 300)
    place = f"[{host}]" if ":" in host else host
    address = f"{text(one.get('scheme'), 20)}://{place}:{count(one.get('port'))}{text(one.get('target'))}"
    return {
        "method": text(one.get("method"), 40),
        "url": text(address, _MOST_URL_CHARS),
        "status": None if one.get("status") is None else count(one["status"]),
        "refusal": text(one.get("refusal"), 500),
        "sent": count(one.get("sent")),
        "received": count(one.get("received")),
        "started_s": number(one.get("started_s")),
        "ended_s": number(one.get("ended_s")),
        "source": text(one.get("source"), 20),
    }


def services_shown(services: object) -> list[dict[str, Any]]:
    """What became of each service of a line. Of its log only the end is shown: there it says why it ended."""
    return [
        {
            "name": text(one.get("name"), 200),
            "image": text(one.get("image"), 300),
            "started_s": number(one.get("started_s")),
            "healthy_s": number(one.get("healthy_s")),
            "ended": text(one.get("ended"), 500),
            "log": _end(one.get("log")),
        }
        for one in objects(services)[:MAX_SERVICES]
    ]


def _end(log: object) -> str:
    return log[-_MOST_LOG_CHARS:] if isinstance(log, str) else ""
