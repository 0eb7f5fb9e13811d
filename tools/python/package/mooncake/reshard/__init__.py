"""Resources under another parallel layout: the contracts that all share. `weight` and `kv_cache` have planners and
executors."""

from mooncake.reshard.contracts import PlacementManifest, ResourceKind, ResourceManifest, RuntimeBindingManifest

__all__ = ["ResourceKind", "ResourceManifest", "PlacementManifest", "RuntimeBindingManifest"]
