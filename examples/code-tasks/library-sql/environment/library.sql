CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT NOT NULL, author TEXT NOT NULL);
CREATE TABLE members (id INTEGER PRIMARY KEY, name TEXT NOT NULL);  -- two members may have the same name
CREATE TABLE loans (
    id INTEGER PRIMARY KEY,
    book_id INTEGER NOT NULL REFERENCES books (id),
    member_id INTEGER NOT NULL REFERENCES members (id),
    lent TEXT NOT NULL,  -- dates are texts like 2024-03-05
    due TEXT NOT NULL,
    returned TEXT        -- NULL: the member still has the book
);
INSERT INTO books VALUES (1, 'Salt Roads', 'M. Okafor'), (2, 'The Ferry', 'M. Okafor'), (3, 'Night Ferns', 'L. Brandt'),
    (4, 'Glass Rivers', 'A. Sato'), (5, 'Late Apples', 'L. Brandt'), (6, 'Old Maps', 'M. Okafor');
INSERT INTO members VALUES (1, 'Ines'), (2, 'Tom'), (3, 'Ines'), (4, 'Wren');
INSERT INTO loans VALUES
    (1, 1, 1, '2024-03-01', '2024-03-22', '2024-03-20'), (2, 3, 1, '2024-03-01', '2024-03-22', '2024-03-30'),
    (3, 4, 2, '2024-04-10', '2024-05-01', NULL), (4, 1, 3, '2024-04-12', '2024-05-03', '2024-05-03'),
    (5, 2, 3, '2024-05-20', '2024-06-10', '2024-06-11'), (6, 5, 1, '2024-06-15', '2024-07-06', NULL);
