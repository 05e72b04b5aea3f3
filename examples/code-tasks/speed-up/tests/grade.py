"""Half for 30,000 numbers and half for 100,000, each in its time; nothing where small inputs come out wrong."""

import random
import sys

import judge

chance = random.Random(10)


def smaller(numbers):
    """How many earlier ones are smaller: counted in a tree over ranks (Fenwick)."""
    rank = {number: at for at, number in enumerate(sorted(set(numbers)), 1)}
    tree = [0] * (len(rank) + 1)
    counts = []
    for number in numbers:
        at, count = rank[number] - 1, 0
        while at:
            count += tree[at]
            at &= at - 1
        counts.append(count)
        at = rank[number]
        while at < len(tree):
            tree[at] += 1
            at += at & -at
    return counts


def right(numbers, cpu_s):
    stdin = "".join(f"{number}\n" for number in numbers)
    ran = judge.run([sys.executable, "/app/earlier.py"], stdin, cpu_s)
    return ran.stdout.split() == [str(count) for count in smaller(numbers)] and ran.status == 0


def numbers(count, most):
    return [chance.randint(-most, most) for _ in range(count)]


SMALL = [(0, 1), (1, 9), (40, 5), (300, 10**12), (500, 50)]
small = all(right(numbers(count, most), 2) for count, most in SMALL)
half = small and right(numbers(30_000, 10**9), 2)
full = half and right(numbers(50_000, 10**9) + list(range(50_000)), 10)
judge.finish({"30,000": half, "100,000": full})
