#!/usr/bin/env bash
# Installs what the tests use beyond Python and Docker, where apt and root are at hand:
# mmdebstrap makes a base image where no registry answers; gcc, musl and busybox make images unlike ours; chromium
# looks at the report; runc and crun make sandboxes without Docker, with uidmap for ordinary users too, and buildah
# their image.
# With REGISTER_RUNSC, gVisor too: on machines that are the tests' own, as it changes the Engine's configuration. And
# Podman and Prometheus, whose packages start services where there is systemd.
set -euo pipefail

packages() {
  local missing=() install log
  command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
  [ -x /bin/busybox ] || missing+=(busybox-static)
  command -v musl-gcc >/dev/null || missing+=(musl musl-tools)
  command -v gcc >/dev/null || missing+=(gcc libc6-dev)
  command -v chromium >/dev/null || command -v chromium-browser >/dev/null || missing+=(chromium)
  command -v newuidmap >/dev/null || missing+=(uidmap)
  command -v buildah >/dev/null || missing+=(buildah)
  [ -z "${REGISTER_RUNSC:-}" ] || command -v podman >/dev/null || missing+=(podman)
  [ -z "${REGISTER_RUNSC:-}" ] || command -v prometheus >/dev/null || missing+=(prometheus)
  command -v runc >/dev/null || [ -x /usr/sbin/runc ] || missing+=(runc)
  # Podman would take it first, and it refuses machines that have control groups of v1 too.
  [ ! -e /sys/fs/cgroup/cgroup.controllers ] || command -v crun >/dev/null || missing+=(crun)
  [ ${#missing[@]} -eq 0 ] && return 0
  install="apt-get install -y --no-install-recommends ${missing[*]}"
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed: ${missing[*]}. What needs them is skipped; to have it: sudo $install" >&2
    return 0
  fi
  echo "== system packages: ${missing[*]}"
  log=$(mktemp)
  { apt-get update && DEBIAN_FRONTEND=noninteractive $install; } >"$log" 2>&1 || { tail -20 "$log" >&2; return 1; }
  rm -f "$log"
}

gvisor() {
  if ! command -v runsc >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends runsc; } >/dev/null 2>&1 ||
      { echo "no gVisor to be had from apt: its tests are skipped" >&2; return 0; }
  fi
  pidof dockerd >/dev/null || return 0
  python3 - <<'PY' || return 0
import json, pathlib, shutil, sys
path = pathlib.Path("/etc/docker/daemon.json")
config = json.loads(path.read_text()) if path.exists() else {}
if "runsc" in config.get("runtimes", {}):
    sys.exit(1)
# Docker's TMPDIR is below its data, which may be closed to the unprivileged process that runsc starts.
started = pathlib.Path("/usr/local/bin/runsc-for-docker")
started.write_text(f'#!/bin/sh\nTMPDIR=/tmp exec {shutil.which("runsc")} "$@"\n')
started.chmod(0o755)
# Without --host-uds a sandbox cannot reach its socket; sandboxes have no network in any case.
runsc = {"path": str(started), "runtimeArgs": ["--host-uds=open", "--network=none"]}
config.setdefault("runtimes", {})["runsc"] = runsc
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps(config, indent=2) + "\n")
PY
  echo "== gVisor registered with Docker as runsc"
  kill -HUP "$(pidof -s dockerd)"  # reads its runtimes again; containers stay
}

packages
if [ -n "${REGISTER_RUNSC:-}" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then gvisor; fi
