"""The share of the settings that are right; nothing where the file is no JSON or has other settings too."""

import json

import judge

SETTINGS = {
    "name": "corner shop",
    "currency": "EUR",
    "port": 8080,
    "debug": False,
    "tax_rate": 0.19,
    "logo": None,
    "home": "http://shop.example//start",
    "tags": ["bread", "milk", "tea"],
    "opening": {"monday": "08:00-18:00", "sunday": None},
    "limits": {"items": 250, "weights": [0.5, 1, 2.5]},
    "motto": "fresh, 'fair' and \"near\"",
}


def once(pairs):
    settings = dict(pairs)
    if len(settings) != len(pairs):
        raise ValueError("a setting is there twice")
    return settings


def settings():
    try:
        value = json.loads(judge.text("/app/config.json") or "", object_pairs_hook=once)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and value.keys() <= SETTINGS.keys() else {}


found = settings()
judge.finish({name: judge.same(found.get(name, judge.FAILED), value) for name, value in SETTINGS.items()})
