"""One run over the nodes of a real Ray cluster on this machine: the same groups, whatever becomes of the nodes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import docker
import pytest

from orchestrator.launch.names import LABEL_OWNER
from orchestrator.launch.oci.machine import why_no_forks
from tests.e2e.endpoint import answers as answers_with
from tests.e2e.endpoint import says
from tests.fakes import oci_images, ray_cluster
from tests.fakes.inference import Reply, ScriptedServer, by_task
from tests.fakes.ray_cluster import RayCluster
from tests.fakes.runs import (
    ROOT,
    Running,
    answers,
    essence,
    flags,
    lines,
    outcomes,
    place,
    run,
    running,
    until,
    whole_lines,
    write_tasks,
)
from tests.fakes.trainers import Trainer, free_port, run_api, sampled, trained
from tests.fakes.upstream import answer, upstream
from tests.integration.services.test_life import ECHO
from tests.integration.test_live_page import fetched, page_url

pytestmark = [
    pytest.mark.full,
    pytest.mark.docker,
    pytest.mark.skipif(ray_cluster.why_not() is not None, reason=ray_cluster.why_not() or ""),
    pytest.mark.timeout(600),
]
TASKS = 6
HEAD_AWAY = "RAY_gcs_rpc_server_reconnect_timeout_s"


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[Path, RayCluster]]:
    with place() as home:
        async with RayCluster(home / "c") as started:
            yield home, started
        # What has ended on a killed node stays until its deadline, as nobody of its PID namespace comes back.
        client = docker.from_env(timeout=120)
        for node in started.nodes:
            for container in states_of(node):
                client.api.remove_container(container, force=True)
        client.close()


def on(cluster: RayCluster, home: Path, base_url: str, **env: object) -> list[str]:
    """The command line of a run on that cluster."""
    where: dict[str, object] = {"cluster": "ray", "ray_address": cluster.address, "launcher": "docker"}
    return flags(home, base_url, **{**where, "max_concurrent_sandboxes": 2, **env})


def metrics(port: int) -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()  # type: ignore[no-any-return]


def nodes_of(home: Path) -> Counter[str]:
    return Counter(line["node"] for line in lines(home / "run" / "rollouts.jsonl"))


@pytest.mark.parametrize("launcher", ["docker", "oci"])
async def test_the_groups_are_those_of_one_machine_and_say_which_node(
    cluster: tuple[Path, RayCluster], launcher: str
) -> None:
    home, ray = cluster
    if launcher == "oci":
        if (reason := oci_images.why_not()) is not None:
            pytest.skip(reason)
        oci_images.stored_image()
    write_tasks(home / "tasks.jsonl", TASKS)
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.2)) as server:
        await ray.join("a", environ=oci_images.CACHE)
        await ray.join("b", environ=oci_images.CACHE)
        given = on(ray, home, server.base_url, launcher=launcher)
        ended = await run(*given, directory=home, environ=oci_images.CACHE)
        assert ended.code == 0, ended.stderr
        assert "at most 4 sandboxes on 2 nodes" in ended.stderr
        assert set(nodes_of(home)) == {"a", "b"}
        told = [line["reason"] for line in lines(home / "run" / "rollouts.jsonl")]
        assert outcomes(home / "run") == {"finished": 2 * TASKS}, told
        here = home / "here"
        here.mkdir()
        write_tasks(here / "tasks.jsonl", TASKS)
        assert (await run(*flags(here, server.base_url), directory=here)).code == 0
    assert essence(home / "run" / "groups.jsonl") == essence(here / "run" / "groups.jsonl")
    assert nodes_of(here) == {None: 2 * TASKS}
    (group,) = {facts["node"] for g in lines(here / "run" / "groups.jsonl") for facts in g["overrides"]}
    assert group is None


async def test_the_live_page_shows_the_turns_of_nodes_as_they_come(cluster: tuple[Path, RayCluster]) -> None:
    home, ray = cluster
    write_tasks(home / "tasks.jsonl", 1)
    turns = [Reply(f"Thought: {n}.\n<code>\nprint('turn {n}')\n</code>", delay_s=3.0) for n in range(4)]
    turns.append(Reply("<code>\nfinal_answer(1)\n</code>", delay_s=3.0))
    async with ScriptedServer("vllm", by_task({"of q0!": [turns]})) as server:
        await ray.join("a")
        async with running(*on(ray, home, server.base_url, view_port=0, group_size=2), directory=home) as started:
            origin, _, token = (await page_url(started)).partition("?token=")

            async def asked(path: str, **query: str) -> Any:
                url = f"{origin}{path}?{urlencode({'token': token, **query})}"
                return json.loads((await asyncio.to_thread(fetched, url))[1])

            async def of_two_turns() -> str:
                while True:
                    for one in (await asked("update"))["running"]:
                        if one["turns"] >= 2:
                            return str(one["id"])
                    await asyncio.sleep(0.2)

            name = await asyncio.wait_for(of_two_turns(), 120)
            told = await asked("rollout", id=name)
            assert whole_lines(home / "run" / "rollouts.jsonl") == 0, "it has not ended"
            texts = [one["text"].split("\n")[0] for one in told["completions"]]
            assert texts[:2] == ["Thought: 0.", "Thought: 1."]
            (row,) = (await asked("group", rollout=name))["rollouts"]
            assert (row["id"], row["outcome"]) == (name, "under way")
            ended = await started.ended()
    assert ended.code in (0, 1), ended.stderr
    assert outcomes(home / "run") == {"finished": 2}


async def test_workspaces_and_graders_go_to_nodes_that_have_never_seen_them(
    cluster: tuple[Path, RayCluster],
) -> None:
    """The run's cache is its own, as on another machine: the nodes have layers only from what it sends."""
    if (reason := oci_images.why_not()) is not None:
        pytest.skip(reason)
    oci_images.stored_image()
    home, ray = cluster
    (home / "repo" / "deep").mkdir(parents=True)
    (home / "repo" / "deep" / "given.txt").write_text("given")
    (home / "tests").mkdir()
    (home / "tests" / "wanted.txt").write_text("given")
    command = "cmp /tests/wanted.txt copy.txt && test -w deep && test ! -w /tests"
    grader = {"kind": "command", "command": command, "tests": "tests", "user": "1000"}
    rows = [
        {"task_id": f"q{n}", "question": f"Copy (of q{n}!)", "workspace": "repo", "cwd": "/app", "grader": grader}
        for n in range(2)
    ]
    (home / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    copied, not_copied = (
        f"Thought.\n<code>\nopen('copy.txt', 'w').write({what})\nfinal_answer('done')\n</code>"
        for what in ("open('deep/given.txt').read()", "'guessed'")
    )
    script = by_task({f"of q{n}!": [[Reply(copied)], [Reply(not_copied)]] for n in range(2)}, by="seed")
    async with ScriptedServer("vllm", script) as server:
        await ray.join("a", environ=oci_images.CACHE)
        await ray.join("b", environ=oci_images.CACHE)
        given = on(ray, home, server.base_url, launcher="oci", scoring_strategy="grader", group_size=4, seed=3)
        ended = await run(*given, directory=home, environ={"XDG_CACHE_HOME": str(home / "cache")})
    assert ended.code == 0, ended.stderr
    written = lines(home / "run" / "rollouts.jsonl")
    assert {line["outcome"] for line in written} == {"finished"}, [line["reason"] for line in written]
    assert set(nodes_of(home)) == {"a", "b"}
    scores = {line["score"] == 1.0: "deep/given.txt" in line["steps"][0]["code"] for line in written}
    assert scores == {True: True, False: False}
    assert {line["grade"]["rewards"]["reward"] for line in written} == {0.0, 1.0}


@pytest.mark.parametrize("start", ["run", "fork"])
async def test_services_run_on_the_node_of_their_rollout(cluster: tuple[Path, RayCluster], start: str) -> None:
    """Also the file that names them is sent: the run's layers are its own, as on another machine."""
    if (reason := oci_images.why_not() or ("needs root" if os.geteuid() else None)) is not None:
        pytest.skip(reason)
    if start == "fork" and (reason := why_no_forks("runc")) is not None:
        pytest.skip(reason)
    oci_images.stored_image()
    home, ray = cluster
    (home / "cache" / "rollout-orchestrator").mkdir(parents=True)
    (home / "cache" / "rollout-orchestrator" / "oci").symlink_to(
        Path(oci_images.CACHE["XDG_CACHE_HOME"], "rollout-orchestrator", "oci")
    )
    keeps = ECHO.replace('print("asked", word, flush=True)', 'open("/srv/last", "w").write(word)')
    check = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 7000))'"
    service = {
        "image": "rollout-orchestrator-sandbox:0.1.0",
        "entrypoint": ["python3", "-c", keeps, "db", "7000"],
        "expose": [7000],
        "healthcheck": {"test": check, "interval": "1s", "retries": 60},
        "mem_limit": "256m",
    }
    grader = {
        "kind": "command",
        "collect": [{"service": "db", "command": "cat /srv/last"}],
        "command": "grep -qx solved /logs/services/db/0.txt",
    }
    rows = [
        {"task_id": f"q{n}", "question": f"Tell (of q{n}!)", "services": {"db": service}, "grader": grader}
        for n in range(2)
    ]
    (home / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    talk = "import socket; s = socket.create_connection(('db', 7000)); s.sendall(b'{word}\\\\n'); s.recv(9)"
    tell = (
        f'Thought.\n<code>\nimport subprocess\ntalk = "{talk}"\n'
        "subprocess.run(['python3', '-c', talk], check=True)\nfinal_answer('told')\n</code>"
    )
    turns = [[Reply(tell.format(word=word))] for word in ("solved", "nothing")]
    script = by_task({f"of q{n}!": turns for n in range(2)}, by="seed")
    async with ScriptedServer("vllm", script) as server:
        await ray.join("a", environ=oci_images.CACHE)
        await ray.join("b", environ=oci_images.CACHE)
        words = {"launcher": "oci", "start": start, "scoring_strategy": "grader", "group_size": 4, "seed": 3}
        given = on(ray, home, server.base_url, **words, authorized_imports='["subprocess"]')
        ended = await run(*given, directory=home, environ={"XDG_CACHE_HOME": str(home / "cache")})
    assert ended.code == 0, ended.stderr
    written = lines(home / "run" / "rollouts.jsonl")
    assert {line["outcome"] for line in written} == {"finished"}, [line["reason"] for line in written]
    assert set(nodes_of(home)) == {"a", "b"}
    assert {line["score"] == 1.0: "b'solved" in line["steps"][0]["code"] for line in written} == {
        True: True,
        False: False,
    }
    assert {line["services"][0]["name"] for line in written} == {"db"}


FETCH = """import os, urllib.request
os.environ["no_proxy"] = os.environ["NO_PROXY"] = ""  # the place of this test is a loopback address
print(urllib.request.urlopen("https://127.0.0.1:{port}/of-{name}", timeout=60).read()[:9])"""


async def test_what_nodes_ask_of_the_outside_has_the_keys_of_the_run_and_comes_to_its_folder(
    cluster: tuple[Path, RayCluster],
) -> None:
    """The key is in the environment of the command alone. The bodies of a run over nodes play again without."""
    home, ray = cluster
    key = "a-key-of-the-run-1"
    write_tasks(home / "tasks.jsonl", TASKS)
    async with upstream(lambda got: answer(got.target.encode() * 100_000), host="127.0.0.1") as outside:
        script = by_task(
            {
                f"of q{n}!": [[says("I ask.", FETCH.format(port=outside.tls_port, name=n)), answers_with("42")]]
                for n in range(TASKS)
            }
        )
        (trusted := home / "trusted.pem").write_bytes(outside.authority.certificate)
        place = {"host": "127.0.0.1", "ports": [outside.tls_port], "private": True}
        secret = {"host": "127.0.0.1", "header": "X-Key", "from": "env:OF_THE_RUN"}
        more = {"egress": json.dumps([place]), "secrets": json.dumps([secret])}
        async with ScriptedServer("vllm", script) as server:
            for name in ("a", "b"):
                await ray.join(name, environ={"SSL_CERT_FILE": str(trusted)})
            given = on(ray, home, server.base_url, authorized_imports='["os", "urllib.request"]', **more)
            ended = await run(*given, directory=home, environ={"OF_THE_RUN": key})
        assert ended.code == 0, ended.stderr
        assert {got.header("x-key") for got in outside.got} == {key}
    assert set(nodes_of(home)) == {"a", "b"}
    written = lines(home / "run" / "rollouts.jsonl")
    for line in written:
        (crossing,) = line["crossings"]
        assert (crossing["status"], crossing["source"], crossing["keys"], crossing["kept"]) == (
            200,
            "network",
            1,
            True,
        )
        body = (home / "run" / "egress" / crossing["received_sha256"]).read_bytes()
        assert sha256(body).hexdigest() == crossing["received_sha256"]
        assert body[:4] == b"/of-"
    assert len(list((home / "run" / "egress").iterdir())) == TASKS, "each once"
    assert not any(key.encode() in path.read_bytes() for path in home.rglob("run/**/*") if path.is_file())
    again = await run(
        str(home / "run"), f"--env.run_dir={home}/again", "--env.cluster=none", directory=home, command="replay"
    )
    assert again.code == 0, again.stdout + again.stderr
    assert f"{2 * TASKS} of {2 * TASKS} rollouts as recorded" in again.stdout


async def test_the_other_commands_know_nothing_of_nodes(cluster: tuple[Path, RayCluster], endpoint: str) -> None:
    """A trainer is fed and measured from nodes, what was recorded there is played again there, and a model is
    evaluated. No group waits beside another one, so that a step comes between the two."""
    home, ray = cluster
    await ray.join("a")
    await ray.join("b")
    async with run_api() as api:
        evaluating = {"steps_per_eval": 1, "eval_split": "hash:0.3"}
        told = on(ray, home, endpoint, total_steps=2, max_batches_offpolicy=1, **evaluating)
        trainer = await Trainer.registered(api.url, batch_size=2)
        async with running(*told, f"--env.rollout_server_url={api.url}", directory=home, command="serve") as serve:
            await trainer.take(2, serve)
            served = await serve.ended()
    assert served.code == 0, served.stderr
    assert len(set(trainer.rollouts)) == 4
    assert list((home / "run" / "evals").glob("step-*"))
    assert {name for name in nodes_of(home) if name} <= {"a", "b"}

    played = await run("run", f"--env.run_dir={home}/again", directory=home, command="replay")
    assert played.code == 0, played.stdout + played.stderr

    (home / "e").mkdir()
    write_tasks(home / "e" / "tasks.jsonl", TASKS)
    measured = await run(*on(ray, home / "e", endpoint, group_size=None), directory=home / "e", command="evaluate")
    assert measured.code == 0, measured.stderr
    assert outcomes(home / "e" / "run") == {"finished": TASKS}
    assert set(nodes_of(home / "e")) == {"a", "b"}


async def test_trees_of_nodes_reach_the_trainer_with_each_token_once(cluster: tuple[Path, RayCluster]) -> None:
    home, ray = cluster
    write_tasks(home / "tasks.jsonl", TASKS)
    for name in ("a", "b"):
        await ray.join(name)
    async with ScriptedServer("vllm", answers(TASKS, delay_s=0.2)) as server, run_api() as api:
        trees = {"branch": "turns:2 width:3", "group_size": 4, "total_steps": TASKS}
        given = on(ray, home, server.base_url, rollout_server_url=api.url, **trees)
        trainer = await Trainer.registered(api.url, batch_size=4)
        async with running(*given, directory=home, command="serve") as serve:
            await trainer.take(TASKS, serve)
            ended = await serve.ended()
    assert ended.code == 0, ended.stderr
    assert {name for name in nodes_of(home) if name} == {"a", "b"}
    told = Counter(sampled(served) for served in server.log.completions)
    assert told == Counter(run for group in trainer.groups for run in trained(group))
    assert any(facts["parent"] for group in trainer.groups for facts in group["overrides"])


@asynccontextmanager
async def midway(
    ray: RayCluster,
    home: Path,
    base_url: str,
    *nodes: str,
    environ: Mapping[str, str] | None = None,
    **env: object,
) -> AsyncIterator[Running]:
    """A run on these nodes that has finished a few rollouts. `environ`: of the run."""
    for node in nodes:
        await ray.join(node, environ={"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "120"})
    async with running(*on(ray, home, base_url, **env), directory=home, environ=environ) as started:
        await until(lambda: whole_lines(home / "run" / "rollouts.jsonl") >= 3, "it runs")
        yield started


@pytest.fixture
async def endpoint(cluster: tuple[Path, RayCluster]) -> AsyncIterator[str]:
    write_tasks(cluster[0] / "tasks.jsonl", TASKS)
    async with ScriptedServer("vllm", answers(TASKS, delay_s=1.0)) as server:
        yield server.base_url


def demand_whole(home: Path) -> Counter[str]:
    """Every rollout is there, and none twice. Returns the outcomes."""
    counts = outcomes(home / "run")
    assert counts["finished"] == 2 * TASKS, counts
    assert max(Counter(line["rollout_id"] for line in lines(home / "run" / "rollouts.jsonl")).values()) == 1
    return counts


async def test_a_node_that_is_killed_costs_time_and_nothing_else(
    cluster: tuple[Path, RayCluster], endpoint: str
) -> None:
    home, ray = cluster
    async with midway(ray, home, endpoint, "a", "b") as started:
        await ray.nodes["a"].kill()
        ended = await started.ended()
    assert ended.code == 0, ended.stderr
    assert set(demand_whole(home)) <= {"finished", "sandbox_lost"}
    assert "node a is lost" in ended.stderr
    await until(lambda: "running" not in states_of("a").values(), "its sandboxes end by themselves")


async def test_a_node_that_is_told_to_end_ends_its_rollouts_first(
    cluster: tuple[Path, RayCluster], endpoint: str
) -> None:
    home, ray = cluster
    port = free_port()
    async with midway(ray, home, endpoint, "a", "b", metrics_port=port) as started:
        wanted = [
            line.format(node)
            for node in "ab"
            for line in (
                'orchestrator_slots{{node="{}"}} 2.0',
                'orchestrator_node_up{{node="{}"}} 1.0',
                'orchestrator_sandboxes{{node="{}",state="leased"}} ',
            )
        ]
        told = ""
        while not all(line in told for line in wanted):
            assert whole_lines(home / "run" / "rollouts.jsonl") < 2 * TASKS, told
            told = await asyncio.to_thread(metrics, port)
        ray.nodes["a"].terminate()
        ended = await started.ended()
    assert ended.code == 0, ended.stderr
    assert set(demand_whole(home)) == {"finished"}, "its rollouts came to their ends"
    assert "node a is leaving the cluster" in ended.stderr
    assert states_of("a") == {}


async def test_a_driver_that_is_killed_leaves_nothing_and_resumes(
    cluster: tuple[Path, RayCluster], endpoint: str
) -> None:
    home, ray = cluster
    async with midway(ray, home, endpoint, "a") as started:
        assert "running" in states_of("a").values()
        started.signal(signal.SIGKILL)
        await started.ended()
        await until(lambda: "running" not in states_of("a").values(), "the sandboxes end by themselves")
    again = await run("--env.resume", "run", directory=home)
    assert again.code == 0, again.stderr
    assert set(demand_whole(home)) == {"finished"}
    assert states_of("a") == {}, "the next actor on the node has removed what was left"


async def test_a_head_that_is_gone_ends_the_run_in_order_and_another_cluster_goes_on(
    cluster: tuple[Path, RayCluster], endpoint: str
) -> None:
    home, ray = cluster
    more = 10 * TASKS  # than can be done until the run ends
    async with midway(ray, home, endpoint, "a", environ={HEAD_AWAY: "30"}, total_steps=more) as started:
        await ray.kill_head()
        ended = await started.ended()
    assert ended.code == 1
    assert "the cluster's head is away, no node can join meanwhile" in ended.stderr
    assert "orchestrator: the cluster's head has been away for" in ended.stderr
    assert not ended.traceback
    # Those that wait for a node to go on with them are cancelled when the run ends.
    assert {"finished"} < set(outcomes(home / "run")) <= {"finished", "sandbox_lost", "cancelled"}
    await until(lambda: "running" not in states_of("a").values(), "the sandboxes end by themselves")
    groups = whole_lines(home / "run" / "groups.jsonl") + 2
    async with RayCluster(home / "d") as other:
        await other.join("b")
        elsewhere = (f"--env.ray_address={other.address}", f"--env.total_steps={groups}")
        again = await run("--env.resume", "run", *elsewhere, directory=home)
    assert again.code == 0, again.stderr
    assert whole_lines(home / "run" / "groups.jsonl") == groups


def package_with(line: str, directory: Path) -> dict[str, str]:
    """The environment of a node whose package has this line more."""
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "orchestrator", directory / "orchestrator", ignore=compiled)
    with (directory / "orchestrator" / "__init__.py").open("a") as file:
        file.write(f"{line}\n")
    return {"PYTHONPATH": f"{directory}:{ROOT / 'proto'}"}


async def test_the_doctor_says_of_every_node_how_it_stands(cluster: tuple[Path, RayCluster]) -> None:
    home, ray = cluster
    key = "sk-canary-0123456789abcdef"
    await ray.join("a")
    await ray.join("b", environ=package_with("# an older one", home / "older"))
    await ray.join("c", environ=package_with("import nothing_of_this_name", home / "broken"))
    async with ScriptedServer("vllm", answers(TASKS), api_key=key) as server:
        given = flags(home, server.base_url, launcher="docker")
        ended = await run(
            *("--ray_address", ray.address, *given),
            directory=home,
            command="doctor",
            environ={"OPENAI_API_KEY": key, "DOCKER_HOST": f"unix://{home}/no.sock"},
        )
    told = {
        name: {line[6:16].rstrip(): line for line in ended.stdout.splitlines() if f"node {name}: " in line}
        for name in ("a", "b", "c")
    }
    assert not ended.traceback, ended.stderr
    assert ended.code == 3
    assert key not in ended.stdout + ended.stderr
    assert "this machine has none" in told["a"]["image id"], "no Docker is needed where nothing is carried out"
    assert "confined as it must be, and removed" in told["a"]["sandbox"]
    assert told["a"]["endpoint"].startswith("ok")
    assert told["a"]["tokenizer"].startswith("ok")
    assert not any(line.startswith("fail") for line in told["a"].values()), ended.stdout
    assert list(told["b"]) == ["software"]
    assert "it has source " in told["b"]["software"]
    assert list(told["c"]) == ["node"]
    assert "nothing_of_this_name" in told["c"]["node"]


async def test_a_head_that_does_not_answer_is_told_of_in_time() -> None:
    with place() as home, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        ended = await run("--ray_address", address, directory=home, command="doctor")
    assert ended.code == 3
    assert f"no Ray cluster at {address}: no answer within 60 s" in ended.stdout


def states_of(node: str) -> dict[str, str]:
    """The sandboxes that a host actor of this node has made, and whether they run."""
    client = docker.from_env(timeout=120)
    try:
        found = client.api.containers(all=True, filters={"label": LABEL_OWNER})
        mine = (f"{node}:", f"{node}.pid-")
        return {c["Id"]: c["State"] for c in found if c["Labels"][LABEL_OWNER].startswith(mine)}
    finally:
        client.close()
