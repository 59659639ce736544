"""The beginning that two lists share."""


def common_prefix(a: list[int], b: list[int]) -> int:
    """The number of equal items at the start of both lists."""
    # Comparing slices by bisection is faster than comparing items one by one.
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
