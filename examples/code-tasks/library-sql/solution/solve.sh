#!/bin/sh
set -eu
mkdir -p /app/queries
cd /app/queries
cat > authors.sql <<'END'
SELECT author, COUNT(*) FROM books GROUP BY author ORDER BY COUNT(*) DESC, author;
END
cat > unread.sql <<'END'
SELECT title FROM books WHERE id NOT IN (SELECT book_id FROM loans) ORDER BY title;
END
cat > late.sql <<'END'
WITH ended AS (
    SELECT member_id, due, COALESCE(returned, '2024-07-01') AS back FROM loans
)
SELECT name, COUNT(*), CAST(MAX(julianday(back) - julianday(due)) AS INTEGER) AS days
FROM ended JOIN members ON members.id = member_id
WHERE back > due
GROUP BY members.id
ORDER BY days DESC, COUNT(*) DESC, name;
END
