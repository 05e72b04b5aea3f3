#!/bin/sh
set -eu
cat > /app/cases.json <<'END'
[
  {"ranges": [[1, 2], [3, 4], [6, 7]], "expected": [[1, 4], [6, 7]]},
  {"ranges": [[1, 5], [5, 8]], "expected": [[1, 8]]},
  {"ranges": [[1, 9], [3, 4]], "expected": [[1, 9]]},
  {"ranges": [[20, 30], [9, 1]], "expected": [[1, 9], [20, 30]]},
  {"ranges": [[5, 5]], "expected": [[5, 5]]},
  {"ranges": [[1, 3], [2, 5], [4, 8]], "expected": [[1, 8]]},
  {"ranges": [[100, 101], [11, 12], [9, 10]], "expected": [[9, 12], [100, 101]]},
  {"ranges": [[-9, -7], [-2, 1]], "expected": [[-9, -7], [-2, 1]]}
]
END
