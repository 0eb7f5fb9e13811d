"""What can go wrong, as exceptions. `code` is the number that Mooncake's interface has for it."""

from kvplane import _native


class Error(Exception):
    """Anything that the store or the transfer engine could not do."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class InvalidArgument(Error, ValueError):
    """The call makes no sense: an empty key, memory that is not this process's, a range past its object's end."""


class NoSpace(Error):
    """There is no room, even after evicting what may be evicted."""


class QuotaExceeded(NoSpace):
    """The tenant's quota is used up."""


class Timeout(Error, TimeoutError):
    """The deadline passed first."""


class Unreachable(Error, ConnectionError):
    """The control plane or the owner of a key cannot be reached."""


class Unauthorized(Error, PermissionError):
    """The certificate does not allow this."""


class Corrupt(Error):
    """The bytes do not match their checksum."""


class Replaced(Error):
    """The object was replaced while it was being read."""


class NotFound(Error, LookupError):
    """Nobody has an object of that name and version, or some of its bytes; or the Conductor knows no such instance,
    request, reservation or model. Perhaps not any more."""


class Conflict(Error):
    """The name is taken: by another request's prompt, or a later incarnation of the instance."""


class Closed(Error):
    """It was closed, or the process was forked after it was opened."""


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
}


def error(code: int) -> Error:
    """The exception for a number of the native half's, with what it said last."""
    return _KINDS.get(code, Error)(code, _native.last_error() or f"error {code}")
