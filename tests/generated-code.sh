#!/usr/bin/env bash
# Regenerates the wire code beside the checked-in one and compares. $1: the bin folder of the generator.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
PATH="$1:$PATH" "$1/python" -m grpc_tools.protoc -I proto --python_out="$fresh" --pyi_out="$fresh" \
  --grpc_python_out="$fresh" --mypy_grpc_out=quiet:"$fresh" proto/rollout_api/v1/*.proto
for file in "$fresh"/rollout_api/v1/*; do
  diff -u "proto/rollout_api/v1/$(basename "$file")" "$file" || {
    echo "proto/rollout_api/v1/$(basename "$file") is not what the .proto gives: run 'make proto'" >&2
    exit 1
  }
done
