"""`orchestrator doctor` on a machine that can run rollouts, and on one without Docker."""

from __future__ import annotations

import pytest

from tests.e2e.endpoint import answers, scripted_endpoint
from tests.e2e.leftovers import run_cleanly
from tests.fakes.runs import place
from tests.fakes.tokenizer import tokenizer_folder

pytestmark = pytest.mark.docker

KEY = "sk-canary-0123456789abcdef"


async def test_every_line_says_how_it_stands_and_the_exit_code_whether_a_run_can_work() -> None:
    with place() as home, scripted_endpoint({"": [[answers("1")]]}, "--dialect", "vllm") as endpoint:
        arguments = [
            f"--openai.base_url={endpoint.base_url}",
            "--openai.model_name=scripted",
            f"--env.tokenizer_name={tokenizer_folder()}",
        ]
        environ = {"OPENAI_API_KEY": KEY}
        well = await run_cleanly(*arguments, directory=home, command="doctor", environ=environ)
        environ |= {"DOCKER_HOST": f"unix://{home}/no.sock"}
        ill = await run_cleanly(
            *arguments, "--env.launcher=docker", directory=home, command="doctor", environ=environ
        )
        assert endpoint.completions() == []
        assert not (home / "runs").exists()
    for ended in (well, ill):
        assert all(line.split()[0] in ("ok", "warn", "fail") for line in ended.stdout.splitlines())
        assert KEY not in ended.stdout + ended.stderr
    found = {line.split()[1]: line for line in well.stdout.splitlines()}
    assert {"output", "TMPDIR", "docker", "limits", "image", "sandbox", "keys", "tokenizer", "endpoint"} <= set(
        found
    )
    assert "confined as it must be, and removed" in found["sandbox"]
    assert found["endpoint"].startswith("ok")
    assert well.code == 0, well.stdout
    assert ill.code == 3, ill.stdout
    assert "fail  docker" in ill.stdout
    assert "systemctl start docker" in ill.stdout
    assert "sandbox " not in ill.stdout


async def test_forked_sandboxes_are_tried_with_their_parent_and_named_where_they_would_work() -> None:
    with place() as home:
        oci = ("--env.launcher=oci",)
        forked = await run_cleanly(*oci, "--env.start=fork", directory=home, command="doctor")
        usual = await run_cleanly(*oci, directory=home, command="doctor")
    assert "forked from a parent, confined as it must be, and removed; ready in " in forked.stdout
    assert " s, the next in " in forked.stdout
    assert "sandboxes can be forked here" in usual.stdout
    assert "forks" not in forked.stdout
