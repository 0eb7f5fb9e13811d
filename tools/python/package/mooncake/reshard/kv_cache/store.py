"""Execution of plans by a store: ranks write their parts of pages, and ranks of another layout read ranges of them."""

from typing import Sequence

from mooncake.reshard import _checks
from mooncake.reshard.kv_cache.resolved import DEFAULT_TRANSFER_LIMITS, KVCacheResolvedRange, KVCacheTransferLimits
from mooncake.reshard.kv_cache.serde import kv_cache_store_manifest_from_json, kv_cache_store_manifest_to_json
from mooncake.reshard.kv_cache.stored import (
    KVCacheStoreLoadPlan,
    KVCacheStoreManifest,
    KVCacheStoreRuntimeBinding,
    KVCacheStoreUploadPlan,
    check_store_binding,
)
from mooncake.reshard.kv_cache.transfer import Budget, by_component, copies, merged


class KVCacheStoreError(RuntimeError):
    """Pages that the store refused, or does not have whole: `codes` maps keys of their parts to its codes."""

    def __init__(self, text, codes):
        super().__init__(f"{text}: {', '.join(f'{key} ({code})' for key, code in sorted(codes.items())[:4])}")
        self.codes = codes


class KVCacheStoreExecutor:
    """Pages of a KV cache in a `mooncake.store.MooncakeDistributedStore`, with which the memory of all bindings is
    registered. The part of a page is the object `PAGE_SUFFIX`, as its shard says. Callable from any thread."""

    def __init__(self, store, *, limits: KVCacheTransferLimits = DEFAULT_TRANSFER_LIMITS):
        self._store = store
        self._limits = _checks.instance(limits, "limits", KVCacheTransferLimits)

    def publish(self, manifest: KVCacheStoreManifest) -> str:
        """Writes the record of a layout, unless it is there. Returns its key. KVCacheStoreError if it is refused."""
        _checks.instance(manifest, "manifest", KVCacheStoreManifest)
        code = self._store.put(manifest.manifest_key, kv_cache_store_manifest_to_json(manifest).encode())
        if code != 0:
            raise KVCacheStoreError("the record of a layout was not written", {manifest.manifest_key: code})
        return manifest.manifest_key

    def manifest(self, key: str) -> KVCacheStoreManifest:
        """Reads the record of a layout. KVCacheStoreError if there is none."""
        found = self._store.get(key)
        if not found:
            raise KVCacheStoreError("there is no record of a layout", {key: -704})
        return kv_cache_store_manifest_from_json(found.decode())

    def upload(
        self,
        plan: KVCacheStoreUploadPlan,
        binding: KVCacheStoreRuntimeBinding,
        pages: Sequence[str],
        token_start: int = 0,
    ) -> int:
        """Writes a writer's part of each page, of which the first begins at `token_start`. Returns the bytes.

        KVCacheStoreError if the store refuses some; the others are there.
        """
        _checks.instance(plan, "plan", KVCacheStoreUploadPlan)
        if binding.participant_id not in plan.part_writers:
            raise ValueError(f"{binding.participant_id} writes no part: {', '.join(plan.part_writers)} do")
        pages = self._pages(plan.source_placement, binding, plan.layout, pages, token_start)
        number = plan.part_writers.index(binding.participant_id)
        fragments = [one for one in plan.layout.fragments if one.part_index == number]
        regions = {one.region_id: one.address for one in binding.regions}
        buffers = {}
        # The other way round: of each byte of the object, where it is in memory.
        for key, pieces in self._pieces(plan.layout, binding, fragments, pages, False).items():
            pieces.sort(key=lambda piece: piece.target_offset)
            buffers[key] = (
                [regions[piece.source_region] + piece.source_offset for piece in pieces],
                [piece.nbytes for piece in pieces],
            )
        keys = list(buffers)
        pointers, sizes = ([buffers[key][at] for key in keys] for at in (0, 1))
        codes = self._store.batch_put_from_multi_buffers(keys, pointers, sizes)
        self._check("pages were not written", {key: code for key, code in zip(keys, codes) if code != 0})
        return sum(map(sum, sizes))

    def load(
        self,
        plan: KVCacheStoreLoadPlan,
        binding: KVCacheStoreRuntimeBinding,
        pages: Sequence[str],
        token_start: int = 0,
    ) -> int:
        """Reads a participant's ranges of each page, of which the first begins at `token_start`. Returns the bytes.

        KVCacheStoreError if a page is not there, or not whole: what was read is in memory then, and does not count.
        """
        _checks.instance(plan, "plan", KVCacheStoreLoadPlan)
        pages = self._pages(plan.target_placement, binding, plan.layout, pages, token_start)
        fragments = [one.fragment for one in plan.ranges if one.participant_id == binding.participant_id]
        if not fragments:
            raise ValueError(f"{binding.participant_id} reads nothing by this plan")
        regions, moves = {one.region_id: one.address for one in binding.regions}, {}
        for key, pieces in self._pieces(plan.layout, binding, fragments, pages, True).items():
            for piece in pieces:
                moves.setdefault(piece.target_region, {}).setdefault(key, []).append(piece)
        columns = lambda name: [[[getattr(one, name) for one in some] for some in by.values()] for by in moves.values()]
        to, of, sizes = map(columns, ("target_offset", "source_offset", "nbytes"))
        keys = [list(by) for by in moves.values()]
        read = self._store.get_into_ranges([regions[name] for name in moves], keys, to, of, sizes)
        wrong = {}
        for some, codes, wanted in zip(keys, read, sizes):
            for key, got, expected in zip(some, codes, wanted):
                for code, size in zip(got, expected):
                    if code != size:
                        wrong[key] = code
        self._check("pages were not read whole", wrong)
        return sum(size for some in sizes for part in some for size in part)

    def _check(self, text, codes):
        if codes:
            raise KVCacheStoreError(text, codes)

    def _pages(self, placement, binding, layout, pages, token_start):
        """Returns the first token of each page by its key, once a binding has all of them."""
        _checks.instance(binding, "binding", KVCacheStoreRuntimeBinding)
        pages = [_checks.text(page, "the key of a page") for page in _checks.sequence(pages, "pages")]
        if not pages:
            raise ValueError("pages must not be empty")
        _checks.unique(pages, "page")
        if _checks.u64(token_start, "token_start") % layout.token_count:
            raise ValueError(f"pages begin at multiples of {layout.token_count} tokens, not at {token_start}")
        tokens = (token_start, token_start + len(pages) * layout.token_count)
        check_store_binding(placement, binding, tokens, self._limits)
        return {page: token_start + number * layout.token_count for number, page in enumerate(pages)}

    def _pieces(self, layout, binding, fragments, pages, into_memory):
        """Returns the copies of each part by its key: from it into memory, or the other way round."""
        mine, budget, found = by_component(binding.ranges), Budget(self._limits), {}
        for page, token in pages.items():
            for fragment in fragments:
                key = f"{page}_{layout.shards[fragment.part_index].key_suffix}"
                stored = [_range(fragment, key, token, layout.token_count)]
                memory = mine[fragment.global_layer_id, fragment.component]
                heads = (fragment.head_start, fragment.head_start + fragment.head_count)
                ends = (stored, memory) if into_memory else (memory, stored)
                width = layout.descriptor.head_bytes(fragment.component)
                found.setdefault(key, []).extend(copies(*ends, heads, width, budget))
        return {key: list(merged(some, self._limits.max_batch_bytes)) for key, some in found.items()}


def _range(fragment, key, token, count):
    """Returns a fragment of a page as a range whose region is the object."""
    heads = (fragment.head_start, fragment.head_count)
    strides = (fragment.token_stride_bytes, fragment.head_stride_bytes)
    names = (fragment.global_layer_id, fragment.component, token, count, *heads)
    return KVCacheResolvedRange(*names, key, fragment.part_offset, *strides)


__all__ = ["KVCacheStoreError", "KVCacheStoreExecutor"]
