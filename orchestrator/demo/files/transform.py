def transform(n):
    value = 1
    for step in range(n):
        value = (value * 5 + 22 + step) % 103
    return value
