"""Catalog of batches: which rows of which puts are the fields of a sample, by the sample's key.

A put of a batch is a *fragment*, named by the key of its manifest. `DataProtoCatalog` has the metadata, in one process;
`DataProtoCatalogTransfer` puts batches, publishes them in a catalog, perhaps of another process, and removes them from
the store when no sample and no reader refers to them any more.
"""

import contextlib
import copy
import json
import logging
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

_LOG = logging.getLogger(__name__)


class CatalogRefusal(ValueError):
    """Publication that the catalog refused for good: nothing was published."""


class CatalogDrained(CatalogRefusal, RuntimeError):
    """Publication in a catalog that was drained."""


@contextlib.contextmanager
def _refusing():
    """Context manager that raises what a catalog does not accept as `CatalogRefusal`."""
    try:
        yield
    except CatalogRefusal:
        raise
    except ValueError as error:
        raise CatalogRefusal(*error.args) from error


@dataclass
class _Fragment:
    """A put of a batch, and who refers to it."""

    handle: dict
    #: True if it is removed from the store when nobody refers to it.
    managed: bool
    #: Number of pairs of sample and field that are in it.
    references: int = 0
    readers: int = 0


@dataclass
class _Sample:
    tag: dict = field(default_factory=dict)
    #: Fragment and row of each field.
    fields: dict = field(default_factory=dict)


class DataProtoCatalog:
    """Samples by partition and key, each with a tag and its fields. Its host makes one call at a time.

    Handles of `update` are metadata only: their objects stay in the store. Those of `publish` are managed: when nothing
    refers to one, results name it in `retired_handles` until `ack_retired` says that its objects were removed.
    """

    def __init__(self):
        self._partitions = {}
        self._fragments = {}
        self._retired = {}
        #: Results of publications by operation, so that a retry has no effect.
        self._published = {}
        self._pins = {}
        self._last_pin = 0
        self._drained = False

    def update(self, partition, keys, *, tags=None, handle=None):
        """Merges tags into samples, and makes a batch's rows their fields. Returns keys, tags and all fields."""
        return self._update(partition, keys, tags, handle, managed=False)

    def publish(self, operation_id, partition, keys, *, tags=None, handle=None):
        """Does the same for a batch that the catalog manages from now on; a retry of an operation has no effect."""
        operation = _text(operation_id, "operation_id")
        if operation not in self._published:
            with _refusing():
                self._published[operation] = self._update(partition, keys, tags, handle, managed=handle is not None)
        return copy.deepcopy(self._published[operation])

    def publish_append(self, operation_id, fragment_id, partition, keys, *, previous_handle, handle):
        """Replaces a managed batch by itself with more fields. Returns the reason in `append_rejected` if it changed in
        the meantime or the new one is not a continuation of it; a retry of an operation has no effect."""
        operation = _text(operation_id, "operation_id")
        if operation not in self._published:
            with _refusing():
                arguments = (_text(fragment_id, "fragment_id"), _text(partition, "partition"), _texts(keys, "keys"))
                self._published[operation] = self._append(*arguments, previous_handle, handle)
        return copy.deepcopy(self._published[operation])

    def ack_publication(self, operation_id):
        """Forgets a publication: it is not retried any more."""
        self._published.pop(_text(operation_id, "operation_id"), None)

    def _append(self, fragment_id, partition, keys, previous_handle, handle):
        (before, old), (after, new) = _normal(previous_handle), _normal(handle)
        samples, fragment = self._partitions.get(partition, {}), self._fragments.get(fragment_id)
        missing = [key for key in keys if key not in samples]
        identity = lambda ref: (ref.batch_size, ref.partition, ref._storage_group_id)
        reason = None
        if self._drained:
            reason = "the catalog was drained"
        elif fragment is None or not fragment.managed or fragment.handle != old:
            reason = f"stale DataProto append handle: {fragment_id!r}"
        elif identity(before) != identity(after) or (before.batch_size, before.partition) != (len(keys), partition):
            reason = "the appended handle is of another batch"
        elif any(after.field_index.get(name) != place for name, place in before.field_index.items()):
            reason = "the appended handle changes fields of the batch"
        elif missing:
            reason = f"keys were not found in partition {partition!r}: {missing}"
        if reason is not None:
            return {"append_rejected": reason}
        fragment.handle = new
        self._place(samples, keys, fragment_id, [name for name in after.field_index if name not in before.field_index])
        return self._result(samples, keys)

    def _update(self, partition, keys, tags, handle, managed):
        if self._drained:
            raise CatalogDrained("the catalog was drained")
        partition, keys = _text(partition, "partition"), _texts(keys, "keys")
        tags = _tags(tags, len(keys))
        if tags is None and handle is None:
            raise ValueError("an update of the catalog has tags or a handle")
        fragment = None if handle is None else self._fragment(handle, len(keys), managed)
        # Nothing changes before everything was checked.
        samples = self._partitions.setdefault(partition, {})
        for row, key in enumerate(keys):
            sample = samples.setdefault(key, _Sample())
            if tags is not None:
                sample.tag.update(tags[row])
        if fragment is not None:
            name, stored, fields = fragment
            self._fragments.setdefault(name, _Fragment(stored, managed))
            self._place(samples, keys, name, fields)
        return self._result(samples, keys)

    def _fragment(self, handle, count, managed):
        """Returns name, handle and fields of a batch; ValueError if it cannot be published."""
        ref, stored = _normal(handle)
        if len(ref.stage_refs) != 1:
            raise ValueError("a batch of the catalog has exactly one DataProto stage")
        name = next(iter(ref.stage_refs.values())).manifest_key
        if ref.batch_size != count:
            raise ValueError(f"the DataProto batch size {ref.batch_size} is not that of {count} keys")
        before = self._fragments.get(name)
        if before is not None and (before.handle != stored or before.managed != managed):
            raise ValueError(f"another batch is published as {name!r}")
        if name in self._retired:
            raise ValueError(f"the batch {name!r} is being removed")
        return name, stored, _texts(ref.field_index, "field names")

    def _place(self, samples, keys, name, fields):
        """Makes rows of a batch the fields of samples, in the order of their keys."""
        self._fragments[name].references += len(keys) * len(fields)
        for row, key in enumerate(keys):
            for one in fields:
                before, samples[key].fields[one] = samples[key].fields.get(one), (name, row)
                if before is not None:
                    self._drop(before[0])

    def _drop(self, name):
        fragment = self._fragments[name]
        fragment.references -= 1
        self._retire_unused(name)

    def _retire_unused(self, name):
        fragment = self._fragments[name]
        if fragment.references == 0 and fragment.readers == 0:
            del self._fragments[name]
            if fragment.managed:
                self._retired[name] = fragment.handle

    def _result(self, samples, keys):
        tags = [copy.deepcopy(samples[key].tag) for key in keys]
        return {"keys": list(keys), "tags": tags, "fields": _fields(samples, keys), **self._retired_result()}

    def _retired_result(self):
        return {"retired_handles": [copy.deepcopy(handle) for handle in self._retired.values()]}

    def resolve(self, partition, keys, fields=None, *, pin=False):
        """Returns where fields of samples are: groups of fields with the same (batch, row) for each key, and handles of
        the batches. With `pin`, these are not retired until `release_read` with the token."""
        partition, keys = _text(partition, "partition"), _texts(keys, "keys")
        samples = self._partitions.get(partition, {})
        missing = [key for key in keys if key not in samples]
        if missing:
            raise ValueError(f"keys were not found in partition {partition!r}: {missing}")
        chosen = _fields(samples, keys) if fields is None else list(_texts(fields, "field names"))
        if not chosen:
            raise ValueError("the samples do not contain any fields")
        for key in keys:
            absent = [name for name in chosen if name not in samples[key].fields]
            if absent:
                raise ValueError(f"fields are not ready for key {key!r}: {absent}")
        groups = {}
        for name in chosen:
            groups.setdefault(tuple(samples[key].fields[name] for key in keys), []).append(name)
        names = dict.fromkeys(name for places in groups for name, _ in places)
        result = {
            "keys": list(keys),
            "tags": [copy.deepcopy(samples[key].tag) for key in keys],
            "fields": chosen,
            "field_groups": [{"fields": some, "locations": list(places)} for places, some in groups.items()],
            "handles": {name: copy.deepcopy(self._fragments[name].handle) for name in names},
            "meta_info": self._meta_info(names),
        }
        if pin:
            self._last_pin += 1
            self._pins[self._last_pin] = tuple(names)
            for name in names:
                self._fragments[name].readers += 1
            result["read_token"] = self._last_pin
        return result

    def _meta_info(self, names):
        merged = {}
        for name in names:
            for key, value in self._fragments[name].handle.get("meta_info", {}).items():
                if merged.setdefault(key, value) != value:
                    raise ValueError(f"conflicting DataProto meta_info of the batches for {key!r}")
        return copy.deepcopy(merged)

    def release_read(self, token):
        """Ends a read that was pinned; a second call has no effect. Returns the retired handles."""
        for name in self._pins.pop(token, ()):
            self._fragments[name].readers -= 1
            self._retire_unused(name)
        return self._retired_result()

    def list(self, partition=None):
        """Returns the tags of samples by partition and key."""
        names = list(self._partitions) if partition is None else [_text(partition, "partition")]
        return {
            name: {key: copy.deepcopy(sample.tag) for key, sample in self._partitions[name].items()}
            for name in names
            if name in self._partitions
        }

    def remove(self, partition, keys):
        """Removes samples; those that do not exist have no effect. Returns the retired handles."""
        partition, keys = _text(partition, "partition"), _texts(keys, "keys")
        samples = self._partitions.get(partition, {})
        for key in keys:
            for name, _ in samples.pop(key, _Sample()).fields.values():
                self._drop(name)
        if not samples:
            self._partitions.pop(partition, None)
        return self._retired_result()

    def drain(self):
        """Removes all samples for good, and returns the handles of all managed batches; RuntimeError during reads."""
        if self._pins:
            raise RuntimeError(f"the catalog has {len(self._pins)} active reads")
        self._retired.update((name, one.handle) for name, one in self._fragments.items() if one.managed)
        self._partitions, self._fragments, self._published = {}, {}, {}
        self._drained = True
        return self._retired_result()

    def ack_retired(self, handles):
        """Forgets retired handles, whose objects were removed. Returns those that are left."""
        for handle in handles:
            ref, stored = _normal(handle)
            name = next((name for name, pending in self._retired.items() if pending == stored), None)
            if name is not None:
                del self._retired[name]
            elif any(one.manifest_key in self._retired for one in ref.stage_refs.values()):
                raise ValueError("a retired batch has another handle than the one that was removed")
        return self._retired_result()


class DataProtoCatalogTransfer:
    """Puts batches and publishes them in a catalog: `catalog_call(method, *arguments, **keywords)` calls it, in this or
    another process. A publication that the catalog refuses (`CatalogRefusal`, and any other ValueError or TypeError) is
    raised once, and ends there; the objects of a `CatalogRefusal`, and of an append that was rejected, are removed. A
    call that fails otherwise is made a second time; what fails again is retried by the next `put`, `append`, `drain` or
    `close`, which raises if it cannot be done."""

    #: Attribute of an output that refers to results in memory of a pool.
    _RESULTS = "_mooncake_catalog_results"

    def __init__(self, transfer, catalog_call):
        self.transfer = transfer
        self._call = catalog_call
        self._lock = threading.RLock()
        self._unpublished = []
        self._unacknowledged = []
        #: Batches that were put and not published, as pairs: the batch before or None, and the batch.
        self._unremoved = []
        self._unreleased = []

    def put(self, data, *, partition, keys, tags=None, **put_kwargs):
        """Puts a batch, or only tags, and publishes it. Returns what the catalog returns."""
        self._retry()
        partition, keys = _text(partition, "partition"), _texts(keys, "keys")
        tags = _tags(tags, len(keys))
        if data is None and tags is None:
            raise ValueError("an update of the catalog has tags or data")
        handle = None
        if data is not None:
            _check_length(data, keys)
            ref = self.transfer.put(data, type="dataproto", partition=partition, **put_kwargs)
            handle = self._exported(ref, {"handle": ref})
        return self._publish_twice("publish", (partition, keys), {"tags": tags, "handle": handle})

    def append(self, fragment_id, handle, data, *, partition, keys, stage, **append_kwargs):
        """Appends fields to a published batch; ValueError if it changed since the handle was resolved."""
        self._retry()
        name, partition, keys = _text(fragment_id, "fragment_id"), _text(partition, "partition"), _texts(keys, "keys")
        if append_kwargs.get("overwrite"):
            raise ValueError("an append to the catalog does not overwrite")
        _check_length(data, keys)
        before, old = _normal(handle)
        if before.partition != partition:
            raise ValueError(f"the handle is of partition {before.partition!r}, not {partition!r}")
        plan = self._call("resolve", partition, keys, list(before.field_index))
        if plan["handles"].get(name) != old:
            raise ValueError(f"stale DataProto append handle: {name!r}")
        ref = self.transfer.append_dataproto_fields(old, data, stage=stage, **append_kwargs)
        new = self._exported(ref, {"previous_handle": old, "handle": ref})
        handles = {"previous_handle": old, "handle": new}
        result = self._publish_twice("publish_append", (name, partition, keys), handles)
        if "append_rejected" in result:
            raise ValueError(result["append_rejected"])
        return result

    def resolve(self, partition, keys, fields=None):
        """Returns where fields of samples are. `release_read` with the result's `read_token` ends the read."""
        return self._call("resolve", partition, keys, fields, pin=True)

    def release_read(self, token):
        """Ends a read, and removes batches that nobody refers to any more."""
        self._remove_retired(self._call("release_read", token))

    def attach_results(self, output, results):
        """Keeps results with an output that was made of them, until `release_result`."""
        setattr(output, self._RESULTS, list(results))

    def release_result(self, output):
        """Returns the memory of an output's results to their pool."""
        results = getattr(output, self._RESULTS, None) or ()
        setattr(output, self._RESULTS, [])
        self.discard_results(results)

    def discard_results(self, results, *, strict=False):
        """Returns the memory of results to their pool; what fails is retried, or raises with `strict`."""
        with self._lock:
            self._unreleased += results
        self._drain_list(self._unreleased, self.transfer.release_result, "memory of results", strict, attempts=2)

    def list(self, partition=None):
        """Returns the tags of samples by partition and key."""
        return self._call("list", partition)

    def remove(self, partition, keys):
        """Removes samples, and batches that nobody refers to any more."""
        self._remove_retired(self._call("remove", partition, keys))

    def drain(self):
        """Removes all samples and all managed batches; nobody may use the catalog any more."""
        for last in (False, True):
            try:
                self._retry()
                self._remove_retired(self._call("drain"), strict=True)
                return
            except Exception:
                if last:
                    raise
                _LOG.warning("a drain of the catalog is retried", exc_info=True)

    def close(self):
        """Ends what was left undone; RuntimeError if it cannot be."""
        self.discard_results((), strict=True)
        self._retry(strict=True)

    def _publish_twice(self, method, arguments, keywords):
        publication = (method, uuid.uuid4().hex, arguments, keywords)
        for last in (False, True):
            try:
                return self._publish(publication)
            except _Refused as refused:
                raise refused.error from None
            except Exception:
                if last:
                    # It may have arrived: the objects stay until that is known.
                    with self._lock:
                        self._unpublished.append(publication)
                    raise
                _LOG.warning("a publication of a batch is retried", exc_info=True)

    def _publish(self, publication):
        method, operation, arguments, keywords = publication
        try:
            result = self._call(method, operation, *arguments, **keywords)
        except (ValueError, TypeError) as error:
            # These say that an answer could not be decoded, and nothing of the publication.
            if isinstance(error, (UnicodeError, json.JSONDecodeError)):
                raise
            _LOG.warning("a publication of a batch was refused: %s", error)
            if isinstance(error, CatalogRefusal):
                self._remove_refused(keywords)
            raise _Refused(error) from error
        if "append_rejected" in result:
            self._remove_refused(keywords)
        self._remove_retired(result)
        try:
            self._call("ack_publication", operation)
        except Exception:
            _LOG.warning("an acknowledgement of a publication is retried later", exc_info=True)
            with self._lock:
                self._unacknowledged.append(operation)
        return result

    def _exported(self, ref, handles):
        """Returns the handle of a batch that was put; removes the batch if it has none."""
        try:
            return _export(ref)
        except BaseException:
            self._remove_refused(handles)
            raise

    def _remove_refused(self, keywords):
        """Removes the objects of a batch that was not published; what fails is retried later."""
        refused = (keywords.get("previous_handle"), keywords["handle"])
        if refused[1] is None:
            return
        try:
            self._remove_unpublished(refused)
        except Exception:
            _LOG.warning("a removal of a refused batch is retried later", exc_info=True)
            with self._lock:
                self._unremoved.append(refused)

    def _remove_unpublished(self, refused):
        previous, handle = refused
        if previous is not None:
            self.transfer.cleanup_dataproto_append(previous, handle)
            return
        # Its manifest is gone: it was removed.
        with contextlib.suppress(KeyError):
            self.transfer.cleanup_dataproto(handle)

    def _publish_late(self, publication):
        """Publishes what could not be published when it was put; a refusal ends it, too."""
        with contextlib.suppress(_Refused):
            self._publish(publication)

    def _remove_retired(self, result, strict=False):
        """Removes the objects of retired batches, and tells the catalog."""
        removed, failed = [], 0
        for handle in result.get("retired_handles", ()):
            try:
                self.transfer.cleanup_dataproto(handle)
                removed.append(handle)
            except KeyError:
                # Its manifest is gone: another process has removed it.
                removed.append(handle)
            except Exception:
                failed += 1
                _LOG.warning("a retired batch was not removed", exc_info=True)
        try:
            if removed:
                self._call("ack_retired", removed)
        except Exception:
            _LOG.warning("the catalog was not told of removed batches", exc_info=True)
            if strict:
                raise
        if strict and failed:
            raise RuntimeError(f"{failed} retired batches were not removed")

    def _retry(self, strict=False):
        acknowledge = lambda operation: self._call("ack_publication", operation)
        self._drain_list(self._unacknowledged, acknowledge, "acknowledgements", strict)
        self._drain_list(self._unremoved, self._remove_unpublished, "removals of refused batches", strict)
        self._drain_list(self._unpublished, self._publish_late, "publications", strict=True)

    def _drain_list(self, pending, action, label, strict, attempts=1):
        """Does what is pending; what fails stays pending."""
        with self._lock:
            items, pending[:] = list(pending), []
        for _ in range(attempts):
            failed = []
            for item in items:
                try:
                    action(item)
                except Exception:
                    _LOG.warning("%s of the catalog failed", label, exc_info=True)
                    failed.append(item)
            items = failed
        with self._lock:
            pending[:0] = items
            left = len(pending)
        if strict and left:
            raise RuntimeError(f"{left} {label} of the catalog failed")


class _Refused(Exception):
    """Refusal of a publication by the catalog, apart from errors of what follows."""

    def __init__(self, error):
        super().__init__(str(error))
        self.error = error


def _export(ref):
    from mooncake.structured_object_store import export_dataproto_ref

    return export_dataproto_ref(ref)


def _normal(handle):
    """Returns a handle's batch, and the handle as it is compared."""
    from mooncake.structured_object_store import import_dataproto_ref

    ref = import_dataproto_ref(handle)
    return ref, _export(ref)


def _fields(samples, keys):
    return list(dict.fromkeys(name for key in keys for name in samples[key].fields))


def _text(value, label):
    if not isinstance(value, str) or not value:
        raise ValueError(f"{label} must be a non-empty string, not {value!r}")
    return value


def _texts(values, label):
    if isinstance(values, str):
        raise ValueError(f"{label} are a sequence of texts, not a text")
    values = tuple(values)
    if not values:
        raise ValueError(f"there are no {label}")
    for value in values:
        _text(value, f"one of the {label}")
    if len(set(values)) != len(values):
        raise ValueError(f"{label} are there twice")
    return values


def _tags(tags, count):
    if tags is None:
        return None
    if len(tags) != count:
        raise ValueError(f"tags must have the same length as keys, {count}, not {len(tags)}")
    if not all(isinstance(tag, Mapping) for tag in tags):
        raise TypeError("tags are mappings")
    return [copy.deepcopy(dict(tag)) for tag in tags]


def _check_length(data, keys):
    if len(data) != len(keys):
        raise ValueError(f"the DataProto batch size {len(data)} is not that of {len(keys)} keys")
