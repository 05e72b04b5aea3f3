#!/usr/bin/env bash
# Installs what the tests use beyond Python and Docker, where apt and root are at hand:
# mmdebstrap makes a base image where no registry answers; chromium looks at the report.
set -euo pipefail
missing=()
command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || missing+=(chromium)
[ ${#missing[@]} -eq 0 ] && exit 0
install="apt-get install -y --no-install-recommends ${missing[*]}"
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed: ${missing[*]}. What needs them is skipped; to have it: sudo $install" >&2
  exit 0
fi
echo "== system packages: ${missing[*]}"
log=$(mktemp)
{ apt-get update && DEBIAN_FRONTEND=noninteractive $install; } >"$log" 2>&1 || { tail -20 "$log" >&2; exit 1; }
rm -f "$log"
