"""Pins of memory: a framework keeps an allocation where it is until a transfer that uses it has ended."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Tuple, runtime_checkable

from mooncake.reshard import _checks


class TerminalTransferState(str, Enum):
    """How a transfer ended. In each of these states, nothing accesses its memory any more."""

    ABORTED = "aborted"
    COMPLETED = "completed"
    FAILED_DRAINED = "failed_drained"


@dataclass(frozen=True)
class AllocationFence:
    """Identity of pinned memory: of which binding, and of which of its fragments, at which addresses."""

    resource_id: str
    revision: str
    placement_id: str
    placement_digest: str
    instance_id: str
    participant_id: str
    runtime_lease_id: str
    runtime_generation: int
    binding_digest: str
    fragment_ids: Tuple[str, ...]
    token_id: str

    def __post_init__(self):
        for name in set(self.__dataclass_fields__) - {"runtime_generation", "fragment_ids"}:
            _checks.text(getattr(self, name), f"allocation fence {name}")
        _checks.integer(self.runtime_generation, "allocation fence runtime_generation", 0)
        found = _checks.sequence(self.fragment_ids, "allocation fence fragment_ids")
        if not found:
            raise ValueError("allocation fence fragment_ids must not be empty")
        for one in found:
            _checks.text(one, "an allocation fence's fragment_id")
        _checks.unique(found, "fragment_id of an allocation fence")
        object.__setattr__(self, "fragment_ids", tuple(sorted(found)))


@runtime_checkable
class AllocationLifetimeToken(Protocol):
    """Pin of a framework, released when the transfer has ended."""

    @property
    def fence(self) -> AllocationFence: ...

    def release_after_terminal(self, terminal_state: TerminalTransferState) -> None: ...


@dataclass
class AllocationTokenSet:
    """The pins of a transfer: released once, or handed to whoever has to clean up first."""

    tokens: Tuple[AllocationLifetimeToken, ...]
    _pending: bool = field(default=False, init=False, repr=False)
    _released: bool = field(default=False, init=False, repr=False)

    def __post_init__(self):
        self.tokens = tuple(self.tokens)
        if not all(isinstance(one, AllocationLifetimeToken) for one in self.tokens):
            raise ValueError("an allocation token has a fence and release_after_terminal")
        _checks.unique((one.fence.token_id for one in self.tokens), "token_id of allocation tokens")

    @property
    def pending(self) -> bool:
        """Returns true if the pins were handed over."""
        return self._pending

    @property
    def released(self) -> bool:
        """Returns true if the pins were released."""
        return self._released

    def handoff_to_pending(self) -> Tuple[AllocationLifetimeToken, ...]:
        """Returns the pins to their next owner; RuntimeError if they were released."""
        if self._released:
            raise RuntimeError("allocation tokens were already released")
        self._pending = True
        return self.tokens

    def release_after_terminal(self, terminal_state: TerminalTransferState) -> None:
        """Releases the pins, unless they were released or handed over."""
        if not self._pending and not self._released:
            release_tokens_after_terminal(self.tokens, terminal_state)
            self._released = True


def release_tokens_after_terminal(tokens, terminal_state):
    """Releases pins, the last one first."""
    for token in reversed(tuple(tokens)):
        token.release_after_terminal(terminal_state)


__all__ = [
    "AllocationFence",
    "AllocationLifetimeToken",
    "AllocationTokenSet",
    "TerminalTransferState",
    "release_tokens_after_terminal",
]
