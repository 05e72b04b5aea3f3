"""What a run's agents fetch from the outside is on record, and plays again without it."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.e2e.leftovers import run_cleanly
from tests.fakes.runs import flags, lines, place, run
from tests.fakes.wheel_index import serving

pytestmark = pytest.mark.docker

WHEEL = b"PK" + b"w" * 100_000
FETCH = """import urllib.request, urllib.error
def get(path, host={address!r}):
    try:
        return urllib.request.urlopen(f"http://{{host}}{{path}}", timeout=60).read()
    except urllib.error.HTTPError as error:
        return error.read()
print(get("/word"), len(get("/thing-1.0-py3-none-any.whl")), get("/", "elsewhere.example"))"""


@pytest.mark.slow
async def test_what_was_fetched_is_on_record_and_is_answered_from_there() -> None:
    with place() as home:
        row = {"task_id": "fetch", "question": "The fetch one: what does it say?", "answer": "42"}
        (home / "tasks.jsonl").write_text(f"{json.dumps(row)}\n")
        with serving({"/word": b"forty-two", "/thing-1.0-py3-none-any.whl": WHEEL}, "127.0.0.2") as index:
            port = int(index.address.rpartition(":")[2])
            script = {"fetch": [[says("I ask.", FETCH.format(address=index.address)), answers("42")]]}
            egress = json.dumps([{"host": "127.0.0.2", "ports": [port], "private": True}])
            with scripted_endpoint(script, "--dialect", "vllm") as endpoint:
                made = await run_cleanly(
                    *flags(home, endpoint.base_url, launcher="docker", max_concurrent_sandboxes=1),
                    f"--env.egress={egress}",
                    "--env.egress_cache",
                    "--env.request_price=2",
                    directory=home,
                )
            assert made.code == 0, made.stderr
            assert sorted(index.asked) == ["/thing-1.0-py3-none-any.whl", "/word", "/word"]  # the file once
        assert json.loads((home / "run" / "end.json").read_text())["cost"] == 6, "what left, and nothing else"
        recorded = {line["rollout_id"]: line for line in lines(home / "run" / "rollouts.jsonl")}
        sources = []
        for line in recorded.values():
            word, wheel, refused = line["crossings"]
            assert (word["status"], word["received_sha256"]) == (200, sha256(b"forty-two").hexdigest())
            assert (refused["status"], refused["host"]) == (403, "elsewhere.example")
            assert "elsewhere.example:80 is not in env.egress" in str(line["completions"][1]["messages"])
            assert "forty-two" in str(line["completions"][1]["messages"])
            sources.append(wheel["source"])
        assert sorted(sources) == ["cache", "network"]
        assert (home / "run" / "egress" / sha256(WHEEL).hexdigest()).read_bytes() == WHEEL
        checked = await run(str(home / "run"), directory=home, command="verify")
        assert checked.code == 0, checked.stdout

        again = await run_cleanly(
            str(home / "run"), f"--env.run_dir={home}/again", directory=home, command="replay"
        )
        assert again.code == 0, again.stdout + again.stderr
        assert "2 of 2 rollouts as recorded" in again.stdout
        for line in lines(home / "again" / "rollouts.jsonl"):
            assert [one["source"] for one in line["crossings"]] == ["record", "record", "border"]
            for then, now in zip(recorded[line["rollout_id"]]["completions"], line["completions"], strict=True):
                assert now["token_ids"] == then["token_ids"]

        (home / "run" / "egress" / sha256(WHEEL).hexdigest()).write_bytes(b"another")
        checked = await run(str(home / "run"), directory=home, command="verify")
        assert checked.code == 1
        assert "egress" in checked.stdout
