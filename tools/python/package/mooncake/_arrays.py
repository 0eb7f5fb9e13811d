"""Columns of batches in arrays of 64-bit integers: anything with the buffer protocol, such as numpy's uint64 and int64."""

_KINDS = frozenset("QqLlNn")
#: Numbers of a row of fields: base and stride at both ends, length.
_FIELD = 5


def _view(name, array):
    """Returns a view of an array of 64-bit integers; TypeError for others, and for what is no array."""
    try:
        view = memoryview(array)
    except TypeError:
        raise TypeError(f"{name} is an array with the buffer protocol, not {type(array).__name__}") from None
    if view.itemsize != 8 or view.format.lstrip("@=<") not in _KINDS:
        raise TypeError(f"{name} must hold 8-byte integers (uint64/int64), not {view.format!r}")
    if not view.c_contiguous:
        raise TypeError(f"{name} must be contiguous")
    return view


def _flat(view):
    """Returns the elements of a view in one dimension, as unsigned integers."""
    return view.cast("B").cast("Q") if view.nbytes else memoryview(b"").cast("Q")


def words(name, array):
    """Returns the elements of an array with one dimension."""
    view = _view(name, array)
    if view.ndim != 1:
        raise TypeError(f"{name} must be a one-dimensional array, not one of {view.ndim} dimensions")
    return _flat(view)


def equal(names, *columns):
    """Raises ValueError for columns of different lengths."""
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"{names} must have the same length")


def field_rows(array):
    """Returns the numbers of the rows of fields, one row after the other: (base, stride) of each end, and the length.
    Lengths are above zero, and strides not negative."""
    view = _view("fields", array)
    if view.ndim != 2 or view.shape[1] != _FIELD:
        raise TypeError(f"fields must be a [rows, {_FIELD}] array, not one of shape {view.shape}")
    flat = _flat(view)
    signed = flat.cast("B").cast("q")
    for row in range(0, len(signed), _FIELD):
        if signed[row + 1] < 0 or signed[row + 3] < 0 or signed[row + 4] <= 0:
            raise ValueError("fields rows need a positive length and non-negative strides")
    return flat
