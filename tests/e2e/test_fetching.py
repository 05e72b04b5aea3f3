"""git and npm as they are, in a sandbox without a network: what they fetch comes through the border, and is played
again where there is no network at all."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from orchestrator.launch.oci.store import ImageStore
from tests.e2e.endpoint import scripted_endpoint
from tests.fakes import git_server, oci_images
from tests.fakes.foreign_images import workshop
from tests.fakes.npm_registry import npm_registry
from tests.fakes.runs import flags, lines, place, run

IMAGE = "orchestrator-test-npm:1"  # in the store, where it stays: unpacked once per machine
CUT_OFF = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
TOOLS = ("git", "unshare", "ip")
_WHY_NOT = oci_images.why_not() or ("needs root" if os.geteuid() else None)


@pytest.mark.docker
@pytest.mark.full  # the image
@pytest.mark.timeout(1200)
@pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}")
async def test_a_repository_and_packages_are_fetched_and_played_again() -> None:
    oci_images.stored_image()
    with (
        place() as home,
        git_server.serving(home / "git", "127.0.0.2") as git,
        npm_registry({"left": {"right": "^1.0.0"}, "right": {}}, "127.0.0.3") as npm,
    ):
        git_server.repository(home / "git" / "thing.git", {"README": "It says 42.\n", "more": "more\n" * 50_000})
        if (store := ImageStore()).find(IMAGE) is None:
            store.put(workshop(home, "workshop-npm-1", "git,npm"), IMAGE)
        row = {"task_id": "t", "question": "What does the thing say?", "answer": "42", "image": IMAGE}
        (home / "tasks.jsonl").write_text(json.dumps({**row, "root": "writable", "user": "root"}) + "\n")
        commands = (
            f"git clone -q http://{git}/thing.git && cat thing/README",
            f"npm install --silent --registry http://{npm.address} left && node -p \"require('left')\"",
        )
        named = [address.split(":") for address in (git, npm.address)]
        egress = json.dumps([{"host": host, "ports": [int(port)], "private": True} for host, port in named])
        said = [*(f"Next.\n```bash\n{command}\n```" for command in commands), "42"]
        more = {"agent": "shell", "tool_call_format": "fenced", "group_size": 1, "sandbox_memory": "2GiB"}
        with scripted_endpoint({"What does": [said]}, "--dialect", "vllm") as endpoint:
            given = flags(home, endpoint.base_url, launcher="oci", egress=egress, **more)
            made = await run(*given, directory=home, environ=oci_images.CACHE)
        assert made.code == 0, made.stderr
        (line,) = lines(home / "run" / "rollouts.jsonl")
        for turn, says in zip(line["completions"][1:], ("It says 42.", "leftright"), strict=True):
            assert says in turn["messages"][-1]["content"]
        assert {crossing["source"] for crossing in line["crossings"]} == {"network"}

        given = [str(home / "run"), f"--env.run_dir={home / 'again'}"]
        again = await run(*given, directory=home, environ=oci_images.CACHE, command="replay", wrapper=CUT_OFF)
        assert again.code == 0, again.stdout + again.stderr
        (played,) = lines(home / "again" / "rollouts.jsonl")
        assert {crossing["source"] for crossing in played["crossings"]} == {"record"}
        for then, now in zip(line["completions"], played["completions"], strict=True):
            assert (now["prompt_ids"], now["token_ids"]) == (then["prompt_ids"], then["token_ids"])
