"""Exceptions. `code` is the number that Mooncake's interface uses for the error."""

from typing import Sequence, Tuple

from kvplane import _native


class Error(Exception):
    """Error of the store, of the transfer engine or of a process group. `ranks` are the group ranks that it concerns:
    those that a collective waited for, or that differ from this one; empty for other errors."""

    ranks: Tuple[int, ...] = ()

    def __init__(self, code: int, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.code = code
        self.ranks = tuple(ranks)


class InvalidArgument(Error, ValueError):
    """An argument is invalid: an empty key, memory that is not this process's, a range past the end of its object."""


class NoSpace(Error):
    """There is not enough space, even after evicting everything that may be evicted."""


class QuotaExceeded(NoSpace):
    """The tenant's quota is used up."""


class Timeout(Error, TimeoutError):
    """The deadline passed first."""


class Unreachable(Error, ConnectionError):
    """The control plane or the owner of a key is unreachable."""


class Unauthorized(Error, PermissionError):
    """The certificate does not permit this."""


class Corrupt(Error):
    """The bytes do not match their checksum."""


class Replaced(Error):
    """The object was replaced while it was being read."""


class NotFound(Error, LookupError):
    """There is no object of that name and version, or some of its bytes are missing; or the Conductor does not know the
    instance, request, reservation or model, possibly not any more."""


class Conflict(Error):
    """The name is taken: by another request's prompt, or a later incarnation of the instance."""


class Mismatch(Error, ValueError):
    """The ranks of a group disagree: about type, size or order of a collective, or about the group itself."""


class Excluded(Error):
    """This process is not in the group's view any more: it was declared dead, was deactivated, or has left."""


class Closed(Error):
    """The object was closed, or the process was forked after it was opened."""


_KINDS = {
    -1: Closed,
    -200: NoSpace,
    -400: InvalidArgument,
    -600: InvalidArgument,
    -601: Unauthorized,
    -704: NotFound,
    -705: Conflict,
    -707: Replaced,
    -801: Corrupt,
    -900: Unreachable,
    -901: Timeout,
    -1700: QuotaExceeded,
    -1800: Mismatch,
    -1801: Excluded,
}


def error(code: int) -> Error:
    """Returns the exception for an error code of the native module, with its last message."""
    return _KINDS.get(code, Error)(code, _native.last_error() or f"error {code}")


def raised(problem: RuntimeError) -> Error:
    """Returns the exception for one that the native module raised: its arguments are the code, the message, and the
    ranks that it concerns."""
    if problem.args and isinstance(problem.args[0], int):
        code, message, *ranks = problem.args
        return _KINDS.get(code, Error)(code, str(message), ranks[0] if ranks else ())
    return Error(-1, str(problem))
