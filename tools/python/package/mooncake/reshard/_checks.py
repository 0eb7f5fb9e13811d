"""Checks of values in manifests. Whatever is wrong is a ValueError that names the field."""

import hashlib
import json
from collections.abc import Mapping, Sequence

MOST = (1 << 64) - 1


def text(value, name):
    """Returns a text that is not empty."""
    if type(value) is not str or not value:
        raise ValueError(f"{name} must be a non-empty string, not {value!r}")
    return value


def integer(value, name, least=None, most=None):
    """Returns a number within limits; a bool is none."""
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must fit in an unsigned 64-bit integer, not {value}")
    return value


def u64(value, name, least=0):
    """Returns a number of 64 bits."""
    return integer(value, name, least, MOST)


def optional(value, name):
    """Returns None, or a number that is not negative."""
    return None if value is None else integer(value, name, 0)


def sequence(value, name, what="a sequence"):
    """Returns the items of something with an order, as a tuple."""
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be {what}, not {type(value).__name__}")
    return tuple(value)


def integers(value, name, least):
    """Returns a sequence of numbers."""
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must contain integers, and is {type(value).__name__}")
    return tuple(integer(item, name, least) for item in value)


def items(value, name, kind):
    """Returns a sequence of objects of one class."""
    found = sequence(value, name)
    if not all(isinstance(item, kind) for item in found):
        raise ValueError(f"{name} must contain {getattr(kind, '__name__', kind)}")
    return found


def instance(value, name, kind):
    """Returns an object of a class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def unique(values, label):
    """ValueError if a value is there twice."""
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"duplicate {label}: {value}")
        seen.add(value)


def digest_text(value, name):
    """Returns the text of a SHA-256 digest."""
    if len(text(value, name)) != 64 or any(letter not in "0123456789abcdef" for letter in value):
        raise ValueError(f"{name} must be a lowercase SHA-256 digest, not {value!r}")
    return value


def strides(shape, itemsize):
    """Returns the distance in bytes from one index to the next along each dimension of contiguous rows."""
    found = [itemsize]
    for extent in reversed(shape[1:]):
        found.append(found[-1] * extent)
    return tuple(reversed(found)) if shape else ()


def canonical(value):
    """Returns a value as JSON, always in the same form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def identity(value):
    """Returns an id that follows from a value."""
    return f"sha256:{hashlib.sha256(canonical(value).encode()).hexdigest()}"


def mapping(value, label):
    """Returns a JSON object."""
    if not isinstance(value, Mapping) or not all(type(key) is str for key in value):
        raise ValueError(f"{label} must be a JSON object")
    return value


def fields(value, names, label, maybe=()):
    """Returns a JSON object with exactly these fields, and perhaps others."""
    found = set(mapping(value, label))
    if not set(names) <= found <= {*names, *maybe}:
        wrong = sorted(found.symmetric_difference(names) - set(maybe))
        raise ValueError(f"{label} schema fields do not match the contract: {', '.join(wrong)}")
    return value


def parse(value, label):
    """Parses a JSON object: no field twice, no number that is not finite."""

    def once(pairs):
        found = {}
        for key, item in pairs:
            if key in found:
                raise ValueError(f"duplicate JSON field: {key}")
            found[key] = item
        return found

    def finite(constant):
        raise ValueError(f"non-finite JSON number: {constant}")

    try:
        found = json.loads(value, object_pairs_hook=once, parse_constant=finite)
    except (TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{label} is not valid JSON: {error}") from error
    return mapping(found, label)
