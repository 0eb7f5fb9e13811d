"""Content of a KV cache: tokens of a model, wherever they are."""

from dataclasses import dataclass, field
from typing import NewType, Optional

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ResourceId, ResourceKind
from mooncake.reshard.kv_cache.types import check_texts, digest

SnapshotId = NewType("SnapshotId", str)


@dataclass(frozen=True, init=False)
class KVCacheSnapshotDescriptor:
    """Interval of tokens under a model. Its id follows from the rest; fingerprints are SHA-256 digests."""

    namespace: str
    resource_id: ResourceId
    snapshot_id: SnapshotId
    model_id: str
    model_revision: str
    token_start: int
    token_count: int
    token_fingerprint: str
    semantic_fingerprint: str
    _digest: str = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        namespace: str,
        resource_id: ResourceId,
        model_id: str,
        model_revision: str,
        token_start: int,
        token_count: int,
        token_fingerprint: str,
        semantic_fingerprint: str,
        snapshot_id: Optional[SnapshotId] = None,
    ):
        content = {
            "namespace": namespace,
            "resource_id": resource_id,
            "model_id": model_id,
            "model_revision": model_revision,
            "token_start": _checks.u64(token_start, "token_start"),
            "token_count": _checks.u64(token_count, "token_count", 1),
            "token_fingerprint": _checks.digest_text(token_fingerprint, "token_fingerprint"),
            "semantic_fingerprint": _checks.digest_text(semantic_fingerprint, "semantic_fingerprint"),
        }
        _checks.u64(token_start + token_count, "token_end")
        for name, value in content.items():
            object.__setattr__(self, name, value)
        check_texts(self, "namespace", "resource_id", "model_id", "model_revision")
        content.update(schema="kv-cache-snapshot", resource_kind=self.resource_kind.value)
        known = _checks.identity(content)
        if snapshot_id not in (None, known):
            raise ValueError("snapshot_id does not match canonical semantic content")
        object.__setattr__(self, "snapshot_id", known)
        object.__setattr__(self, "_digest", digest({**content, "snapshot_id": known}))

    @property
    def resource_kind(self) -> ResourceKind:
        """Returns the kind: KV cache."""
        return ResourceKind.KV_CACHE

    @property
    def token_end(self) -> int:
        """Returns the first token behind the interval."""
        return self.token_start + self.token_count

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the content and the id."""
        return self._digest


__all__ = ["KVCacheSnapshotDescriptor", "SnapshotId"]
