#!/bin/sh
set -eu
mkdir -p /app/patterns
cd /app/patterns
printf '%s\n' '([01][0-9]|2[0-3]):[0-5][0-9]' > time.txt
printf '%s\n' '#([0-9a-fA-F]{3}){1,2}' > color.txt
printf '%s\n' '(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*)){2}(-[a-z0-9]+)?' > version.txt
printf '%s\n' '(0|[1-9][0-9]{0,2}(,[0-9]{3})*)(\.[0-9]{2})?' > amount.txt
cat > quoted.txt <<'END'
"([^"\\]|\\["\\])*"
END
