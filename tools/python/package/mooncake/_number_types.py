"""Numbers in another type: conversions that keep each value, or say which one they would change."""

import numpy as np

#: Integers up to this magnitude are exact in float64.
_EXACT = 1 << 53


def as_type(value, dtype):
    """Returns numbers, an array or nested lists, as a contiguous array of a type.

    ValueError for a number that the type does not have: it is not wrapped, cut or made infinite. Floating types round
    fractions.
    """
    dtype = np.dtype(dtype)
    if isinstance(value, np.ndarray):
        return _array_as(value, dtype)
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(value, dtype, order="C")
    except OverflowError as error:
        raise ValueError(f"a number does not fit the type {dtype}: {error}") from error
    given, made = _items([value]), array.reshape(-1).tolist()
    for before, after in zip(given, made) if given != made else ():
        if not _is_same(before, after, dtype):
            raise ValueError(f"{before!r} does not fit the type {dtype}")
    return array


def is_kept(value, array):
    """Returns true if nested lists have numbers of one kind, that of the array that they became."""
    kinds = {"b": bool, "i": int, "u": int, "f": float, "c": complex}
    return all(type(item) is kinds.get(array.dtype.kind) for item in _items([value]))


def _is_same(given, made, dtype):
    if given == made or given != given and made != made:
        return True
    rounds = dtype.kind in "fc" and isinstance(given, (float, complex))
    return rounds and np.isfinite(given) == np.isfinite(made)


def _items(values):
    """Returns the numbers of nested lists as Python's, in their order."""
    found = []
    for one in values:
        if isinstance(one, (list, tuple)):
            found += _items(one)
        elif isinstance(one, np.ndarray):
            found += one.reshape(-1).tolist()
        else:
            found.append(one.item() if isinstance(one, np.generic) else one)
    return found


def _array_as(array, dtype):
    if array.dtype == dtype or array.size == 0:
        return np.asarray(array, dtype, order="C")
    there, real = array, array
    if array.dtype.kind == "c" and dtype.kind != "c":
        _check(there, array.imag == 0, dtype)
        real = array.real
    if dtype.kind in "iu":
        _check(there, _fits_integers(real, np.iinfo(dtype)), dtype)
    elif dtype.kind == "b":
        _check(there, (real == 0) | (real == 1), dtype)
    with np.errstate(over="ignore"):
        made = np.asarray(real, dtype, order="C")
    if dtype.kind in "fc":
        _check(there, _is_kept(real, made), dtype)
    return made


def _check(array, fits, dtype):
    if not np.all(fits):
        bad = array.reshape(-1)[int(np.argmin(np.reshape(fits, -1)))]
        raise ValueError(f"{bad} does not fit the type {dtype}")


def _fits_integers(array, limits):
    if array.dtype.kind == "b":
        return np.ones(array.shape, np.bool_)
    if array.dtype.kind in "iu":
        if limits.min <= int(array.min()) and int(array.max()) <= limits.max:
            return np.ones(array.shape, np.bool_)
        return np.reshape([limits.min <= one <= limits.max for one in array.reshape(-1).tolist()], array.shape)
    wide = array.astype(np.float64) if array.dtype.itemsize < 8 else array
    # Powers of two, or 0: exact as floating numbers.
    return (wide >= float(limits.min)) & (wide < float(int(limits.max) + 1)) & (np.trunc(wide) == wide)


def _is_kept(array, made):
    """Returns where floating numbers are those that they were made of; fractions may be rounded."""
    if array.dtype.kind in "fc":
        return np.isfinite(array) == np.isfinite(made)
    made = made.real
    if array.dtype.kind == "b" or max(abs(int(array.min())), abs(int(array.max()))) <= _EXACT:
        return array.astype(np.float64) == made.astype(np.float64)
    same = [one == other for one, other in zip(array.reshape(-1).tolist(), made.reshape(-1).tolist())]
    return np.reshape(same, array.shape)
