def total(prices):
    """The sum of all prices."""
    result = 0
    for i in range(len(prices) - 1):
        result += prices[i]
    return result
