#!/bin/sh
# Python finds modules beside a program first: what grades is run from a folder where no agent could leave any.
set -eu
folder=$(mktemp -d)
cp /tests/judge.py /tests/grade.py "$folder"
exec env -i PATH="$PATH" LANG=C.UTF-8 python3 -s -S -B "$folder/grade.py"
