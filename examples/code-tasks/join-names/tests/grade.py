"""A third each for lists of at most one name, of two, and of more."""

import random

import judge

chance = random.Random(2)


def names(count):
    return ["".join(chance.choices("abcdefgh", k=chance.randint(1, 6))).title() for _ in range(count)]


def right(counts):
    inputs = [[names(count)] for count in counts]
    values = judge.call("/app/names.py", "join_names", inputs)
    return all(judge.same(value, joined(given)) for value, (given,) in zip(values, inputs, strict=True))


def joined(given):
    return " and ".join([", ".join(given[:-1]), given[-1]] if len(given) > 1 else given)


judge.finish({"at_most_one": right([0, 1, 1, 1]), "two": right([2] * 5), "more": right([3, 3, 4, 4, 5, 6, 9])})
