#!/usr/bin/env bash
# Copies what the site is made of, with the paths that it has in the repository: `docs/stage.sh FOLDER`.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf "$1"
mkdir -p "$1"
cp README.md SECURITY.md ARCHITECTURE.md CHANGELOG.md "$1"
cp -r docs examples "$1"
rm -rf "$1"/docs/stage.sh "$1"/docs/reference/make.py "$1"/docs/schemas/make.py
find "$1" -name __pycache__ -prune -exec rm -rf {} +
