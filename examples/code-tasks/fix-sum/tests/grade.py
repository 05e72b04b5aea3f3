"""All or nothing: every sum is right."""

import random

import judge

chance = random.Random(1)
inputs = [[[chance.randint(-999, 999) for _ in range(chance.randint(0, 9))]] for _ in range(60)]
values = judge.call("/app/total.py", "total", inputs)
right = [judge.same(value, sum(prices)) for value, (prices,) in zip(values, inputs, strict=True)]
judge.finish({"sums": all(right)})
