"""Exceptions. `code` is the number that Mooncake's interface uses for the error."""

from kvplane import _native


class Error(Exception):
    """Error of the store or of the transfer engine."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


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
}


def error(code: int) -> Error:
    """Returns the exception for an error code of the native module, with its last message."""
    return _KINDS.get(code, Error)(code, _native.last_error() or f"error {code}")
