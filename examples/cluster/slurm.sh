#!/bin/bash
# A run on the nodes of a Slurm job: Ray's head and the run are on the first node, the others carry out rollouts.
# Checked by ShellCheck and with stand-ins for Slurm's commands, but not on a live Slurm.
#
#   sbatch slurm.sh --env.dataset jsonl:tasks.jsonl --openai.base_url http://INFERENCE:9001/v1 \
#     --openai.model_name NAME
#
# What follows `slurm.sh` goes to `orchestrator process`. Before the job's time is up, the run is told to end; what
# is finished is on disk. The same command line again goes on with it.
#
# What must be there:
#   - On all nodes, under the same path: a Python environment with 'rollout-orchestrator[ray]' of one version.
#   - On all nodes: a Docker Engine that you may use. Either the site's, or a rootless one of your own that runs
#     before this script starts; then set DOCKER_HOST. A rootless Engine needs newuidmap, 65,536 ids in /etc/subuid
#     and /etc/subgid, and cgroup v2 with cpu, memory and pids delegated to you; else the run refuses it, as it
#     could not limit sandboxes. Its data must not be on NFS.
#   - The sandboxes' image in the first node's Engine (`orchestrator image build`); the others get it from there.
#   - LOCAL: a directory on a local disk of each node, with a short name, that the Engine has under the same path.
#     If Slurm gives each job a /tmp of its own (job_container/tmpfs), a site-wide Engine does not see that: name
#     another directory. A rootless Engine has a /run of its own.
#   - RUN: a new directory for the run, on a file system that all nodes have and that has flock.
# Keys come from the environment (OPENAI_API_KEY, TAVILY_API_KEY), never from this file or the command line.
#
#SBATCH --job-name=rollouts
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=08:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --no-kill

# --exclusive: sandboxes belong to the Engine, so Slurm neither counts nor limits them. --signal: to this script,
# three minutes before the end. --no-kill: a node that fails costs its rollouts and not the job.
set -euo pipefail

RUN=${RUN:-$PWD/runs/slurm}
LOCAL=${LOCAL:-/tmp}
# export DOCKER_HOST=unix:///run/user/$UID/docker.sock
# source /shared/venv/bin/activate

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#nodes[@]} < 2)); then
    echo "one node has the run, others carry out rollouts: ask for two nodes or more" >&2
    exit 1
fi
ip=${HEAD_IP:-$(getent ahostsv4 "${nodes[0]}" | awk 'NR == 1 { print $1 }')}
if [[ -z $ip || $ip == 127.* ]]; then
    echo "no address of ${nodes[0]} is known that other nodes can reach: set HEAD_IP" >&2
    exit 1
fi

# Ports that differ from those of the next thousand jobs. Ray takes free ones for what is not named below.
port=$((20000 + SLURM_JOB_ID % 1000 * 10))
address=$ip:$port
scratch=$LOCAL/r$SLURM_JOB_ID # for Ray, and for the sockets of the sandboxes

# Without a token, whoever reaches Ray's ports can run code as you. The token encrypts nothing.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN TMPDIR=$scratch

started=() # the steps of the nodes, the head's first, and then the run

start_node() { # NODE FLAG...: a node of Ray there, until its step is ended
    local node=$1
    shift
    # shellcheck disable=SC2016 # these are expanded on the node
    srun --nodes=1 --ntasks=1 --nodelist="$node" --cpu-bind=none \
        bash -c 'install -d -m 700 "$TMPDIR" && exec ray start "$@"' ray \
        --block --disable-usage-stats --temp-dir="$scratch" --num-cpus=0 --object-store-memory=200000000 \
        --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=$((port + 1)) "$@" &
    started+=("$!")
}

wait_a_little() { # or gives up: the head's step has ended, or those of all other nodes
    kill -0 "${started[0]}" || exit 1
    if ((${#started[@]} > 1)); then
        kill -0 "${started[@]:1}" || exit 1
    fi
    sleep 2
}

# shellcheck disable=SC2317,SC2329 # it is the trap's
finish() {
    kill "${started[@]}" 2> /dev/null || true
    wait
    srun --overlap --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 rm -rf "$scratch" || true
}

trap finish EXIT
install -d -m 700 "$scratch"
start_node "${nodes[0]}" --head --node-ip-address="$ip" --port="$port" \
    --ray-client-server-port=$((port + 2)) --include-dashboard=false
until ray health-check --address "$address" > /dev/null 2>&1; do wait_a_little; done
for node in "${nodes[@]:1}"; do
    start_node "$node" --address="$address" --resources='{"sandbox": 1}'
done
# The run needs one node to begin with. Others are used when they have joined.
until ray status --address "$address" 2> /dev/null | grep sandbox > /dev/null; do wait_a_little; done

begin=(--env.run_dir "$RUN")
if [[ -e $RUN/run.json ]]; then
    begin=(--env.resume "$RUN")
fi
orchestrator process "${begin[@]}" --env.cluster ray --env.ray_address "$address" "$@" &
run=$!
started+=("$run")
trap 'kill "$run"' TERM INT
code=0
wait "$run" || code=$?
while kill -0 "$run" 2> /dev/null; do # a signal has ended the wait, and the run is still ending
    code=0
    wait "$run" || code=$?
done
exit "$code"
