"""`zip(strict=True)`, which CPython 3.9 does not have."""


def _strict_zip(*iterables):
    columns = [tuple(iterable) for iterable in iterables]
    if len({len(column) for column in columns}) > 1:
        raise ValueError("the arguments of zip have different lengths")
    return zip(*columns)
