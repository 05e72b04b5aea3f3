#!/usr/bin/env bash
# Runs tests where there is cgroup v2 alone: in a Debian 13 whose kernel is a process of this machine (user-mode Linux).
# It has runc, crun, Docker and a systemd session of an ordinary user; this project and its environment are this
# machine's. Takes root, apt, 8 GiB and the sandbox image. `tests/cgroup2.sh`, or with arguments for pytest.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
python=$(readlink -f "$here/.venv/bin/python")
machine=$here/build/cgroup2
packages=systemd,systemd-sysv,libpam-systemd,dbus,dbus-user-session,kmod,iproute2,procps,runc,crun,uidmap,passwd
packages+=,docker.io,docker-cli,iptables,ca-certificates,git,e2fsprogs
packages+=,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8t64,libsqlite3-0,libssl3t64,zlib1g,libgomp1

make_machine() {
  [ -e "$machine/made-2" ] && return
  echo "== a Debian 13 of its own in $machine"
  rm -rf "$machine" && mkdir -p "$machine"
  { apt-get update && apt-get install -y --no-install-recommends user-mode-linux mmdebstrap e2fsprogs; } >"$machine/log" 2>&1 ||
    { tail "$machine/log" >&2; exit 1; }
  apt-config dump Acquire >"$machine/apt.conf"
  mmdebstrap --quiet --variant=minbase --aptopt="$machine/apt.conf" --include="$packages" trixie "$machine/root"
  cp -a /usr/lib/uml/modules "$machine/root/usr/lib/"
  for unit in docker.service docker.socket containerd.service getty@tty1.service serial-getty@tty0.service; do
    ln -sf /dev/null "$machine/root/etc/systemd/system/$unit"
  done
  # Debian's nftables needs more than this kernel has.
  chroot "$machine/root" update-alternatives --quiet --set iptables /usr/sbin/iptables-legacy
  chroot "$machine/root" useradd --shell /bin/bash me
  touch "$machine/made-2"
}

# What the machine does when it has booted: one unit, whose exit code is the result.
write_job() {
  cat >"$machine/root/job.sh" <<JOB
export PATH=$(dirname "$python"):/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
set -o pipefail
trap 'echo \$? >/result; systemctl poweroff --force' EXIT
set -e
# A file system whose ids can be mapped, as writable roots need: tmpfs can it from Linux 6.3 on.
mkdir -p /disk
mount /dev/ubda /disk
for folder in /tmp /root /home /var/lib/docker; do
  mkdir -p "\$folder" "/disk/\$folder"
  chmod 1777 "/disk/\$folder"
  mount --bind "/disk/\$folder" "\$folder"
done
for folder in "$here" "$(dirname "$(dirname "$python")")"; do
  mkdir -p "\$folder"
  mount -t hostfs -o "\$folder" none "\$folder"
done
cd "$here"
JOB
  cat - >>"$machine/root/job.sh"
  cat >"$machine/root/etc/systemd/system/job.service" <<UNIT
[Unit]
After=multi-user.target
[Service]
Type=oneshot
TimeoutStartSec=infinity
StandardOutput=tty
StandardError=inherit
TTYPath=/dev/tty0
ExecStart=/bin/bash /job.sh
UNIT
  ln -sf ../job.service "$machine/root/etc/systemd/system/multi-user.target.wants/"
}

boot() {
  sysctl -q vm.max_map_count=1048576  # each page of a process is a mapping of this machine's
  rm -f "$machine/root/result" "$machine/disk"
  truncate -s 16G "$machine/disk" && mkfs.ext4 -q "$machine/disk"
  linux.uml mem=8G ubd0="$machine/disk" root=/dev/root rootfstype=hostfs rootflags="$machine/root" rw quiet \
    con=null con0=null,fd:1 ssl=null console=tty0 </dev/null
  return "$(cat "$machine/root/result")"
}

write_tests() {
  local suites=(tests/integration/launch tests/integration/attacks tests/integration/test_inside_the_container.py
    tests/integration/test_oci_run.py)
  write_job <<JOB
$(declare -f start_docker session)
tests() { .venv/bin/python -m pytest -p no:cacheprovider --color=no -rfs -m "not long" "\$@"; }
start_docker
if [ $# -gt 0 ]; then
  tests $(printf '%q ' "$@")
  exit
fi
failed=0
echo "== runc and Docker"
tests ${suites[*]} || failed=1
echo "== crun"
mkdir -p /tmp/crun && ln -s /usr/bin/crun /tmp/crun/runc
PATH=/tmp/crun:\$PATH tests -k "oci and not oci-crun and not writable" ${suites[*]} || failed=1
echo "== an ordinary user with control groups of its own"
tests -m full tests/integration/launch/test_oci_rootless.py || failed=1
PATH=/tmp/crun:\$PATH tests -m full tests/integration/launch/test_oci_rootless.py || failed=1
session || failed=1
exit \$failed
JOB
}

# The rest is done in the machine.

start_docker() {
  local module
  depmod
  for module in loop overlay bridge br_netfilter veth iptable_nat iptable_filter xt_MASQUERADE xt_addrtype xt_conntrack; do
    modprobe "$module"
  done
  dockerd --ip6tables=false >/tmp/dockerd.log 2>&1 &
  timeout 60 sh -c 'until docker version >/dev/null 2>&1; do sleep 1; done' || { tail /tmp/dockerd.log; return 1; }
  docker load --quiet --input /image.tar
}

# systemd's own way to control groups of one's own.
session() {
  local runtime
  chmod 755 /root
  install -d -o me -g me /home/me
  loginctl enable-linger me
  timeout 60 sh -c 'until [ -S /run/user/1000/bus ]; do sleep 1; done'
  for runtime in runc crun; do
    echo "== an ordinary user's session, $runtime"
    su me -c "cd $PWD && export HOME=/home/me XDG_RUNTIME_DIR=/run/user/1000
      begin='systemd-run --quiet --user --scope --property Delegate=yes .venv/bin/orchestrator'
      given='--env.launcher oci --env.oci_runtime $runtime --env.sandbox_image /image.tar'
      \$begin doctor \$given --env.run_dir ~/runs && \$begin demo \$given --env.run_dir ~/$runtime --env.total_steps 2" 2>&1 |
      cat || return 1
  done
}

make_machine
docker save "$(cd "$here" && .venv/bin/python -c 'from orchestrator.launch.names import DEFAULT_IMAGE as it; print(it)')" >"$machine/root/image.tar"
write_tests "$@"
boot
