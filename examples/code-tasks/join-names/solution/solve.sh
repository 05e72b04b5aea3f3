#!/bin/sh
set -eu
cat > /app/names.py <<'END'
def join_names(names):
    if len(names) < 2:
        return "".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]
END
