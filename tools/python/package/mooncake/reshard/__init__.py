"""Tensors under another parallel layout: contracts that weights and other resources share; `weight` has the planner."""

from mooncake.reshard.contracts import PlacementManifest, ResourceKind, ResourceManifest, RuntimeBindingManifest

__all__ = ["ResourceKind", "ResourceManifest", "PlacementManifest", "RuntimeBindingManifest"]
