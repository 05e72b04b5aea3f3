#!/bin/sh
set -eu
cd /app/photos
for name in *; do
    new=$(printf '%s' "$name" | tr 'A-Z ' 'a-z_')
    [ "$name" = "$new" ] || mv -- "$name" "$new"
done
