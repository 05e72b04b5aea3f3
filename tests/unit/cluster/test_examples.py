"""examples/cluster: what its files must have for a node to work. The script runs with stand-ins for commands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.launch.channels import socket_fits
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.settings.table import SECTIONS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "cluster"
RAY = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())["ray"]

Manifest = Mapping[str, Any]


def _manifests() -> dict[str, Manifest]:
    return {told["kind"]: told for told in yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text("utf-8"))}


CLUSTER = _manifests()["RayCluster"]["spec"]
HEAD = CLUSTER["headGroupSpec"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
POD = WORKERS["template"]["spec"]
(NODE,) = POD["containers"]
ENGINE, PULL = POD["initContainers"]


def environ(container: Manifest) -> dict[str, str]:
    return {told["name"]: told["value"] for told in container["env"]}


def volume_of(container: Manifest, path: str) -> str:
    """The volume that holds the path in this container."""
    mounts = {told["mountPath"]: told["name"] for told in container["volumeMounts"]}
    return next(mounts[str(place)] for place in (Path(path), *Path(path).parents) if str(place) in mounts)


def resources(group: Manifest) -> object:
    """As `ray start` gets it: KubeRay writes a command line for a shell."""
    (told,) = shlex.split(f"--resources={group['rayStartParams'].get('resources', '{}')}")
    return json.loads(told.removeprefix("--resources="))


def test_workers_carry_out_rollouts_and_the_head_does_not() -> None:
    assert resources(WORKERS) == {"sandbox": 1}
    assert resources(HEAD) == {}


def test_the_engine_finds_sockets_where_the_host_actor_makes_them() -> None:
    sockets = environ(NODE)["TMPDIR"]
    assert volume_of(NODE, sockets) == volume_of(ENGINE, sockets)
    assert socket_fits(Path(sockets))


def test_the_host_actor_and_the_pull_find_the_engine() -> None:
    host = environ(NODE)["DOCKER_HOST"]
    assert f"--host={host}" in ENGINE["args"]
    assert f"--host={host}" in PULL["command"]
    assert f"--host={host}" in ENGINE["startupProbe"]["exec"]["command"]
    path = host.removeprefix("unix://")
    assert volume_of(NODE, path) == volume_of(ENGINE, path) == volume_of(PULL, path)
    assert f"--group={NODE['securityContext']['runAsGroup']}" in ENGINE["args"]


def test_the_engine_outlives_ray_and_the_pod_the_drain() -> None:
    assert ENGINE["restartPolicy"] == "Always"
    assert float(environ(NODE)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < POD["terminationGracePeriodSeconds"]


def test_the_engine_alone_is_privileged_and_the_head_alone_has_keys() -> None:
    text = (FOLDER / "kuberay.yaml").read_text("utf-8")
    assert text.count("privileged: true") == 1
    assert ENGINE["securityContext"] == {"privileged": True}
    assert "secretRef" in json.dumps(HEAD)
    assert not any(word in json.dumps(WORKERS) for word in ("secretRef", "secretKeyRef", "secretName"))


def test_only_pods_of_the_cluster_may_speak_to_them() -> None:
    manifests = _manifests()
    policy = manifests["NetworkPolicy"]["spec"]
    name = {"matchLabels": {"ray.io/cluster": manifests["RayCluster"]["metadata"]["name"]}}
    assert policy["podSelector"] == name
    assert policy["ingress"] == [{"from": [{"podSelector": name}]}]


def test_versions_are_those_of_this_package() -> None:
    version = DEFAULT_IMAGE.rpartition(":")[2]
    dockerfile = (FOLDER / "Dockerfile").read_text("utf-8")
    assert CLUSTER["rayVersion"] == RAY
    assert f"\nFROM rayproject/ray:{RAY}-py3" in dockerfile
    assert PULL["command"][-1] == f"REGISTRY/{DEFAULT_IMAGE}"
    (image,) = {pod["template"]["spec"]["containers"][0]["image"] for pod in (HEAD, WORKERS)}
    assert image == f"REGISTRY/rollout-orchestrator-ray:{version}"
    assert image in dockerfile


def test_the_docs_settings_are_settings_and_name_the_image_that_is_pulled() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text("utf-8")
    told = yaml.safe_load(page.partition("`run.yaml`:\n\n")[2].partition("\n\n")[0])
    assert told["env"]["sandbox_image"] == PULL["command"][-1]
    for section, settings in told.items():
        assert set(settings) <= set(SECTIONS[section].rows())


# ---------------------------------------------------------------- slurm.sh

STAND_INS = {
    "scontrol": "printf 'n1\\nn2\\nn3\\n'",
    "getent": "echo '192.0.2.1 STREAM n1'",
    # What a step is asked for, then the step itself, here. A node of Ray lives until it is ended.
    "srun": """
        echo "$*" >> "$HERE/steps"
        node=
        while [[ $1 == --* ]]; do
            case $1 in --nodelist=*) node=${1#*=} ;; esac
            shift
        done
        [[ $node != "$BROKEN" ]] || exit 5
        exec "$@"
    """,
    "ray": """
        echo "$1 $TMPDIR" >> "$HERE/ray"
        case $1 in
            start) exec sleep 60 ;;
            status)
                until (($(grep -c '^start' "$HERE/ray") >= NODES)); do sleep 0.02; done
                echo ' 0.0/2.0 sandbox'
                ;;
            health-check) exit "$UNHEALTHY" ;;
        esac
    """,
    "orchestrator": """
        trap 'echo told > "$HERE/told"; exit 143' TERM
        echo "$*" > "$HERE/asked.part" && mv "$HERE/asked.part" "$HERE/asked"
        [[ -n $ENDS ]] && exit "$ENDS"
        while :; do sleep 0.05; done
    """,
}


def job(folder: Path, *, run: Path, **environ: str) -> subprocess.Popen[str]:
    """The script, as Slurm starts it. `ENDS`: the code by which the run ends at once; empty: it runs on.
    `BROKEN`: a node whose step fails. `NODES`: how many are up before the cluster has sandboxes."""
    commands = folder / "bin"
    commands.mkdir()
    for name, text in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    told = {"ENDS": "0", "BROKEN": "none", "NODES": "3", "UNHEALTHY": "0", **environ}
    return subprocess.Popen(
        ["bash", str(FOLDER / "slurm.sh"), "--env.group_size", "2"],
        env={
            "PATH": f"{commands}:{os.environ['PATH']}",
            "HERE": str(folder),
            "RUN": str(run),
            "LOCAL": str(folder),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "n[1-3]",
            **told,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code and what it said. Nothing of it is left: a node's stand-in would live for a minute."""
    said = process.communicate(timeout=60)[0]
    until(lambda: not is_left(process), "all of it has ended")
    return process.returncode, said


def is_left(process: subprocess.Popen[str]) -> bool:
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def until(true: Callable[[], bool], what: str) -> None:
    for _ in range(1000):
        if true():
            return
        time.sleep(0.02)
    raise AssertionError(f"never: {what}")


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_job_starts_ray_and_the_run_and_ends_as_the_run_does(tmp_path: Path, code: str) -> None:
    assert ended(job(tmp_path, run=tmp_path / "run", ENDS=code)) == (int(code), "")
    place = "--env.cluster ray --env.ray_address 192.0.2.1:27110 --env.group_size 2\n"
    assert (tmp_path / "asked").read_text() == f"process --env.run_dir {tmp_path}/run {place}"
    *steps, removal = (tmp_path / "steps").read_text().splitlines()
    nodes = {shlex.split(step)[2].removeprefix("--nodelist="): step for step in steps}
    assert [("--head" in step, "sandbox" in step) for _, step in sorted(nodes.items())] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    assert removal.endswith(f"rm -rf {tmp_path}/r4711")
    assert not (tmp_path / "r4711").exists()
    assert {line.split()[1] for line in (tmp_path / "ray").read_text().splitlines()} == {f"{tmp_path}/r4711"}


def test_a_job_goes_on_with_its_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    assert ended(job(tmp_path, run=tmp_path / "run"))[0] == 0
    assert (tmp_path / "asked").read_text().startswith(f"process --env.resume {tmp_path}/run ")


def test_a_job_whose_time_is_up_waits_for_its_run(tmp_path: Path) -> None:
    process = job(tmp_path, run=tmp_path / "run", ENDS="")
    until((tmp_path / "asked").exists, "the run is begun")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (143, "")
    assert (tmp_path / "told").exists()


def test_a_job_without_its_head_ends(tmp_path: Path) -> None:
    assert ended(job(tmp_path, run=tmp_path / "run", BROKEN="n1", UNHEALTHY="1"))[0] == 1
    assert not (tmp_path / "asked").exists()


def test_a_job_with_a_broken_node_has_its_run(tmp_path: Path) -> None:
    assert ended(job(tmp_path, run=tmp_path / "run", BROKEN="n2", NODES="2"))[0] == 0
    assert (tmp_path / "asked").exists()


def test_ray_knows_every_flag() -> None:
    """Its command line is read, not imported: that takes seconds."""
    if (found := importlib.util.find_spec("ray")) is None or found.origin is None:
        pytest.skip("Ray is not installed")
    source = Path(found.origin).parent / "scripts" / "scripts.py"
    options = re.findall(r'"(--[a-z-]+)"', source.read_text("utf-8").partition("\ndef start(")[0])
    script = (FOLDER / "slurm.sh").read_text("utf-8").replace("\\\n", "")
    calls = re.findall(r"(?:ray start|start_node) .*", script)
    used = {flag for call in calls for flag in re.findall(r" (--[a-z-]+)", call)}
    assert {"--head", "--temp-dir", "--resources"} <= used
    used |= {f"--{name}" for group in (HEAD, WORKERS) for name in group["rayStartParams"]}
    assert used <= set(options)
