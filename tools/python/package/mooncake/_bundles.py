"""Bundles: a manifest, metadata and named payloads, each in one or more objects of a store.

The keys of a bundle with the id `partition/number` are `prefix/id/manifest`, `prefix/id/meta` and
`prefix/id/buffer/NAME`; a payload longer than a chunk is in objects of that key with `/0`, `/1` and so on behind it.
The manifest is put last, so a bundle whose manifest exists is complete. It may name payloads of earlier bundles that it
continues; what only those needed is in its `cleanup_keys`.
"""

import contextlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from mooncake._bundle_moves import Piece
from mooncake._bundle_values import BundleTransferPolicy, Described, FlatArrays, Pieces, Tensor, TensorObject, bytes_of

CHUNK_BYTES = 64 << 20
#: Bytes of a bundle from which on its put checks that the last objects have not evicted the first.
_CHECKED_BYTES = 16 << 20


@dataclass
class RemoteBundleRef:
    """Reference to a bundle: the key of its manifest, and the manifest, if it is known (else empty)."""

    manifest_key: str
    manifest: dict


def encode_json(value, label):
    """Returns a mapping as JSON; TypeError if it has other values than JSON's."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(f"{label} must be JSON-serializable: {error}") from error


def decode_json(data, label):
    """Parses a mapping; ValueError if the bytes are none."""
    try:
        value = json.loads(bytes(data))
    except ValueError as error:
        raise ValueError(f"{label} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{label} is no mapping")
    return value


def check_segment(value, label):
    """ValueError if a text cannot be a part of a key."""
    if not isinstance(value, str) or not value or "/" in value:
        raise ValueError(f"{label} is text without a slash, and not empty, instead of {value!r}")


def check_prefix(prefix):
    """Returns a prefix of keys without slashes at its ends; ValueError if nothing is left."""
    stripped = prefix.strip("/") if isinstance(prefix, str) else ""
    if not stripped:
        raise ValueError(f"key_prefix is text, and not empty, instead of {prefix!r}")
    return stripped


def check_chunk_bytes(size):
    """Returns a length of chunks; ValueError if it is not above 0."""
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ValueError(f"chunk_bytes is above 0, not {size!r}")
    return size


class Bundles:
    """The bundles under one prefix of a store's keys."""

    def __init__(self, moves, prefix, chunk_bytes):
        self._moves = moves
        self._prefix = prefix
        self._chunk_bytes = chunk_bytes

    # --- puts ------------------------------------------------------------------------------------------------------

    def put_bundle(
        self, meta, buffers, partition, chunk_bytes, policy, max_inflight_put=None, config=None, continues=None
    ):
        """Puts a bundle; removes what it has put if that fails.

        With `continues`, a resolved manifest with the key under which it lies, the bundle also has the payloads of that
        one, which stays readable until this bundle is removed.
        """
        check_segment(partition, "partition")
        meta = bytes_of(meta, "meta")
        chunk_bytes = self._chunk_bytes if chunk_bytes is None else check_chunk_bytes(chunk_bytes)
        policy = (policy or BundleTransferPolicy()).checked(max_inflight_put)
        for name in buffers:
            check_segment(name, "buffer name")
        number = f"{partition}/{uuid.uuid4().hex}"
        base = f"{self._prefix}/{number}"
        put = _Put(self._moves, chunk_bytes, policy, config)
        try:
            small = BundleTransferPolicy(policy.max_inflight_put, policy.put_mode, "copy")
            specs = {name: put.add(f"{base}/buffer/{name}", value, name) for name, value in buffers.items()}
            described = put.add(f"{base}/meta", meta, "meta")
            put.move(small, f"{base}/meta")
            manifest = {"version": 1, "layout": "bundle", "object_id": number, "meta": described, "buffers": specs}
            if continues is not None:
                self._continue(manifest, *continues)
            return self._put_manifest(base, manifest, put, config)
        except BaseException:
            self._moves.remove(put.keys, strict=False)
            raise

    def put_bundle_manifest(self, meta, buffers, *, partition, chunk_bytes, policy, cleanup_keys=None, config=None):
        """Puts a bundle of payloads that exist: `buffers` are their descriptions from other manifests."""
        check_segment(partition, "partition")
        chunk_bytes = self._chunk_bytes if chunk_bytes is None else check_chunk_bytes(chunk_bytes)
        policy = (policy or BundleTransferPolicy()).checked()
        number = f"{partition}/{uuid.uuid4().hex}"
        base = f"{self._prefix}/{number}"
        put = _Put(self._moves, chunk_bytes, policy, config)
        try:
            described = put.add(f"{base}/meta", bytes_of(meta, "meta"), "meta")
            put.move(BundleTransferPolicy(copy_mode="copy"), f"{base}/meta")
            manifest = {"version": 1, "layout": "bundle", "object_id": number, "meta": described, "buffers": {}}
            self._extend(manifest, buffers, list(cleanup_keys or ()))
            return self._put_manifest(base, manifest, put, config)
        except BaseException:
            self._moves.remove(put.keys, strict=False)
            raise

    def put_payload(self, key, value, chunk_bytes, transfer_policy, config=None):
        """Puts one payload that no bundle names yet; returns its description and its keys. Removes what it has put if
        that fails."""
        put = _Put(self._moves, check_chunk_bytes(chunk_bytes), transfer_policy.checked(), config)
        try:
            spec = put.add(key, value, key)
            put.move(transfer_policy, f"{key}/meta")
        except BaseException:
            self._moves.remove(put.keys, strict=False)
            raise
        return spec, put.keys

    _put_direct_copy_payload = put_payload

    def _put_manifest(self, base, manifest, put, config):
        key = f"{base}/manifest"
        put.keys.append(key)
        self._moves.put([(key, memoryview(encode_json(manifest, "a manifest")))], _COPY, config)
        return RemoteBundleRef(key, manifest)

    def _continue(self, manifest, old, old_key):
        both = sorted(set(manifest["buffers"]) & set(old["buffers"]))
        if both:
            raise ValueError(f"structured members already exist: {both}")
        cleanup = [*old.get("cleanup_keys", ()), old_key, *self.payload_keys(old["meta"])]
        self._extend(manifest, old["buffers"], cleanup)

    def _extend(self, manifest, buffers, cleanup):
        """Adds payloads of other bundles, and keys that are removed with this one."""
        manifest["buffers"] = {**buffers, **manifest["buffers"]}
        keys = [spec["key"] for spec in manifest["buffers"].values()]
        numbers = {self._number(key) for key in [*keys, *cleanup]}
        manifest["buffer_object_ids"] = sorted(number for number in numbers if number is not None)
        if cleanup:
            manifest["cleanup_keys"] = list(dict.fromkeys(cleanup))
        # Descriptions made here are right; those of others are checked.
        self._check(manifest)

    def _number(self, key):
        """Returns the id of the bundle that a key is of; None if it is none of this prefix."""
        if not key.startswith(f"{self._prefix}/"):
            return None
        parts = key[len(self._prefix) + 1 :].split("/")
        return "/".join(parts[:2]) if len(parts) > 2 else None

    # --- references ------------------------------------------------------------------------------------------------

    def resolve_manifest(self, ref):
        """Returns the manifest of a reference, from the store if the reference does not have it. KeyError if there is
        none, RuntimeError if the store cannot be reached, ValueError if it is not of this prefix or not consistent."""
        key, manifest = _reference(ref)
        if not manifest:
            if not isinstance(key, str):
                raise ValueError("a reference to a bundle has a manifest_key")
            manifest = decode_json(self._moves.object(key, "bundle"), f"the manifest at {key}")
        self._check(manifest)
        return manifest

    def manifest_key(self, ref, manifest=None):
        """Returns the key of a reference's manifest; ValueError if it is that of another bundle."""
        manifest = self.resolve_manifest(ref) if manifest is None else manifest
        key, _ = _reference(ref)
        expected = f"{self._prefix}/{manifest['object_id']}/manifest"
        if key not in (None, expected):
            raise ValueError(f"manifest_key {key!r} is not that of the bundle, {expected!r}")
        return expected

    def payload_keys(self, spec):
        """Returns the keys of a payload's objects."""
        return [chunk["key"] for chunk in spec["chunks"]]

    def keys(self, ref):
        """Returns the keys of all objects that are removed with a bundle; the manifest's is the last."""
        manifest = self.resolve_manifest(ref)
        last = self.manifest_key(ref, manifest)
        specs = [manifest["meta"], *manifest["buffers"].values()]
        return [*(key for spec in specs for key in self.payload_keys(spec)), *manifest.get("cleanup_keys", ()), last]

    def _added_keys(self, ref, before):
        """Returns the keys of what a bundle has and the one that it continues has not; all of them, where `before` is
        None. That one may be gone: the bundle then says which bundles came after it."""
        keys = self.keys(ref)
        if before is None:
            return keys
        try:
            kept = set(self.keys(before))
            return [key for key in keys if key not in kept]
        except KeyError:
            manifest, (old, _) = self.resolve_manifest(ref), _reference(before)
            cleanup = manifest.get("cleanup_keys", [])
            if old not in cleanup:
                return keys
            # In the order of the bundles: those up to `before` end with its manifest and its metadata.
            later = {self._number(key) for key in cleanup[cleanup.index(old) + 1 :]} - {self._number(old)}
            return [key for key in keys if self._number(key) in {*later, manifest["object_id"]}]

    def remove_bundle(self, ref):
        """Removes a bundle. RuntimeError if an object of it stays: its manifest, by which it is removed later, then stays,
        too."""
        ref = self._resolved(ref)
        self._remove(ref, self.keys(ref))

    def remove_added(self, ref, before):
        """Removes what a bundle has added to another, if that is not None; KeyError if the bundle does not exist."""
        ref = self._resolved(RemoteBundleRef(_reference(ref)[0], {}))
        self._remove(ref, self._added_keys(ref, before))

    def _resolved(self, ref):
        return RemoteBundleRef(_reference(ref)[0], self.resolve_manifest(ref))

    def _remove(self, ref, keys):
        try:
            self._moves.remove(keys, strict=True)
        except Exception:
            # A put of what exists has no effect.
            with contextlib.suppress(Exception):
                self._moves.put([(keys[-1], memoryview(encode_json(ref.manifest, "a manifest")))], _COPY, None)
            raise

    def _check(self, manifest):
        """ValueError if a manifest is not consistent, or names objects of others."""
        if manifest.get("version") != 1 or manifest.get("layout") != "bundle":
            raise ValueError("the manifest is not that of a bundle of version 1")
        number = manifest.get("object_id")
        if not isinstance(number, str) or not number:
            raise ValueError("the manifest of a bundle has an object_id")
        numbers = manifest.get("buffer_object_ids", [number])
        if not isinstance(numbers, list) or not all(isinstance(one, str) and one for one in numbers):
            raise ValueError("buffer_object_ids of a bundle are a list of texts")
        bases = tuple(f"{self._prefix}/{one}/" for one in {number, *numbers})
        cleanup = manifest.get("cleanup_keys", [])
        if not isinstance(cleanup, list) or not all(isinstance(key, str) and key.startswith(bases) for key in cleanup):
            raise ValueError("cleanup_keys of a bundle are outside of its namespace")
        buffers = manifest.get("buffers")
        if not isinstance(buffers, dict):
            raise ValueError("buffers of a bundle are a mapping")
        _check_payload(manifest.get("meta"), (f"{self._prefix}/{number}/",))
        for name, spec in buffers.items():
            check_segment(name, "buffer name")
            _check_payload(spec, bases)

    # --- gets ------------------------------------------------------------------------------------------------------

    def pieces(self, spec, spans, at=0):
        """Returns the pieces of a payload that make up ranges of it, pairs of begin and end, one behind the other from
        the offset `at` of a destination."""
        found, chunks, starts = [], spec["chunks"], [0]
        for chunk in chunks:
            starts.append(starts[-1] + chunk["bytes"])
        index = 0
        for begin, end in spans:
            if end > starts[-1]:
                raise ValueError(f"a range to {end} of a payload of {starts[-1]} bytes")
            while begin < starts[index]:
                index -= 1
            while begin < end:
                while starts[index + 1] <= begin:
                    index += 1
                until = min(end, starts[index + 1])
                size = until - begin
                whole = size == chunks[index]["bytes"]
                found.append(Piece(chunks[index]["key"], begin - starts[index], size, at, whole))
                begin, at = until, at + size
        return found


_COPY = BundleTransferPolicy(copy_mode="copy")


def _reference(ref):
    """Returns the key and the manifest that a reference has; TypeError if it is none."""
    if isinstance(ref, RemoteBundleRef):
        return ref.manifest_key, ref.manifest
    if not isinstance(ref, Mapping):
        raise TypeError(f"a reference to a bundle is a RemoteBundleRef or its handle, not {type(ref).__name__}")
    return ref.get("manifest_key"), ref.get("manifest")


def _check_payload(spec, bases):
    if not isinstance(spec, dict):
        raise ValueError("a payload of a bundle is described by a mapping")
    key, size, chunks = spec.get("key"), spec.get("bytes"), spec.get("chunks")
    if not isinstance(key, str) or not key.startswith(bases):
        raise ValueError(f"a payload of a bundle is outside of its namespace: {key!r}")
    if not isinstance(size, int) or size < 0 or not isinstance(chunks, list):
        raise ValueError(f"the payload {key!r} has no length, or no chunks")
    seen = set()
    for chunk in chunks:
        one = chunk.get("key") if isinstance(chunk, dict) else None
        if not isinstance(one, str) or (one != key and not one.startswith(f"{key}/")):
            raise ValueError(f"a chunk of {key!r} is outside of its namespace: {one!r}")
        if one in seen or not isinstance(chunk.get("bytes"), int) or chunk["bytes"] < 0:
            raise ValueError(f"a chunk of {key!r} is there twice, or has no length")
        seen.add(one)
    total = sum(chunk["bytes"] for chunk in chunks)
    if total != size:
        raise ValueError(f"the chunks of {key!r} are {total} bytes, and the payload {size}")


class _Put:
    """Payloads of one bundle on the way into the store, in few calls: those of one kind together."""

    def __init__(self, moves, chunk_bytes, policy, config):
        self._moves = moves
        self._chunk_bytes = chunk_bytes
        self._policy = policy
        self._config = config
        #: Keys of all objects that were or may have been put.
        self.keys = []
        self._bytes = 0
        self._plain = []
        self._pieces = []
        self._arrays = []
        self._tensors = []
        self._objects = []

    def add(self, key, value, label):
        """Adds a payload, and returns its description."""
        if isinstance(value, Described):
            return {**self.add(key, value.value, label), **value.about}
        if isinstance(value, Tensor):
            return self._add_tensor(key, value)
        if isinstance(value, TensorObject):
            self._objects.append((key, value))
            return self._described(key, [value.size])
        if isinstance(value, FlatArrays):
            return self._add_arrays(key, value)
        if isinstance(value, Pieces):
            return self._add_pieces(key, value)
        view, step = bytes_of(value, label), self._chunk_bytes
        parts = [view[at : at + step] for at in range(0, len(view), step)]
        spec = self._described(key, [len(part) for part in parts])
        self._plain += [(chunk["key"], part) for chunk, part in zip(spec["chunks"], parts)]
        return spec

    def _described(self, key, sizes):
        names = [key] if len(sizes) == 1 else [f"{key}/{index}" for index in range(len(sizes))]
        chunks = [{"key": name, "bytes": size} for name, size in zip(names, sizes)]
        self.keys += names
        self._bytes += sum(sizes)
        return {"key": key, "bytes": sum(sizes), "chunks": chunks}

    def _add_tensor(self, key, value):
        if self._policy.copy_mode == "zero_copy":
            raise ValueError("the zero-copy put of a tensor needs a BufferPool tensor-object buffer")
        self._tensors.append((key, value.tensor))
        from mooncake._tensors import HEADER_BYTES

        size = HEADER_BYTES + value.tensor.numel() * value.tensor.element_size()
        return {**self._described(key, [size]), "kind": "tensor", "metadata_bytes": HEADER_BYTES}

    def _add_arrays(self, key, value):
        """Cuts arrays into chunks of whole arrays; those longer than a chunk are cut first."""
        groups, size = [[]], 0
        for array in value.arrays:
            step = max(self._chunk_bytes // max(array.itemsize, 1), 1)
            for part in [array[at : at + step] for at in range(0, array.size, step)]:
                if groups[-1] and size + part.nbytes > self._chunk_bytes:
                    groups.append([])
                    size = 0
                groups[-1].append(part)
                size += part.nbytes
        groups = [group for group in groups if group]
        sizes = [sum(part.nbytes for part in group) for group in groups]
        spec = self._described(key, sizes)
        self._arrays += [(chunk["key"], group, chunk["bytes"]) for chunk, group in zip(spec["chunks"], groups)]
        return spec

    def _add_pieces(self, key, value):
        groups, room = [[]], self._chunk_bytes
        for buffer in value.buffers:
            view = bytes_of(buffer, "a piece")
            while len(view):
                if room == 0:
                    groups.append([])
                    room = self._chunk_bytes
                groups[-1].append(view[:room])
                view, room = view[room:], room - min(room, len(view))
        groups = [group for group in groups if group]
        spec = self._described(key, [sum(map(len, group)) for group in groups])
        self._pieces += [(chunk["key"], group) for chunk, group in zip(spec["chunks"], groups)]
        return spec

    def move(self, small, meta):
        """Puts everything; the object at `meta`, which is small, under another policy."""
        moves, policy, config = self._moves, self._policy, self._config
        first = [chunk for chunk in self._plain if _is_of(chunk[0], meta)]
        rest = [chunk for chunk in self._plain if not _is_of(chunk[0], meta)]
        moves.put(first, small, config)
        if policy.copy_mode == "zero_copy" and (self._pieces or self._arrays):
            raise RuntimeError("memory in several pieces has no zero-copy put")
        moves.put(rest, policy, config)
        moves.put_staged(self._pieces, policy, config)
        moves.put_concatenated(self._arrays, policy, config)
        if self._tensors:
            moves.put_tensors(*map(list, zip(*self._tensors)), config)
        for key, value in self._objects:
            moves.put_tensor_object(key, value, config)
        if self._bytes >= _CHECKED_BYTES:
            moves.check_there(self.keys)


def _is_of(key, payload):
    return key == payload or key.startswith(f"{payload}/")
