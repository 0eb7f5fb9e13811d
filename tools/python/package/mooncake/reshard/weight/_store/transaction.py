"""Visibility of a version: its manifest is written last, by the writer whose decision is in the store."""

from mooncake.reshard import _checks
from mooncake.reshard.weight._store.plans import UploadReceipt, WeightStoreError
from mooncake.reshard.weight.storage_manifest import StoredWeightManifest

_RECORD = "weight-upload-decision"


class WeightUploadTransaction:
    """Commit and abort of plans. Objects are put if absent, so of decisions and manifests the first one counts, and
    whoever reads them back knows which it was."""

    def __init__(self, store, config_factory, limit):
        self._store = store
        self._config = config_factory
        self._limit = limit

    def manifest(self, key):
        """Returns the manifest under a key; None if there is none."""
        found = self._store.get(key)
        if found is None:
            return None
        try:
            manifest = StoredWeightManifest.from_json(found)
        except ValueError as error:
            raise WeightStoreError(f"invalid weight manifest {key}: {error}") from error
        if manifest.manifest_key != key:
            raise WeightStoreError(f"the weight manifest under {key} is that of {manifest.manifest_key}")
        return manifest

    def check_writable(self, plan):
        """WeightStoreError if the plan was aborted, or another one was published in its place: what it has written is
        removed then."""
        decision = self._decision(plan)
        if decision is None:
            return
        published = self.manifest(plan.manifest.manifest_key)
        if decision == "commit" and published in (None, plan.manifest):
            return
        self._discard(plan, published)
        lost = "was aborted" if decision == "abort" else "lost to another one"
        raise WeightStoreError(f"the upload {lost}: {plan.control_key}")

    def commit(self, plan, receipts, decided=lambda: None):
        """Publishes a plan of which all is written. Returns its manifest.

        `decided` is called before the decision is written: from then on only a commit, which may be repeated, finds
        out whether it was. WeightStoreError if something is missing, or another writer has published this version.
        """
        self.check_receipts(plan, receipts, True)
        if self._decision(plan) is None:
            self._store.check_present(plan.keys, self._limit)
        decided()
        self._decide(plan, "commit")
        self._store.check_present(plan.keys, self._limit)
        published = self.manifest(plan.manifest.manifest_key)
        if published is None:
            error = self._put(plan.manifest.manifest_key, plan.manifest.to_json(), plan.manifest.group_id)
            published = self.manifest(plan.manifest.manifest_key)
            if published is None:
                raise WeightStoreError(f"the manifest was not written; commit again: {error}")
        if published != plan.manifest:
            self._discard(plan, published)
            raise WeightStoreError(f"another writer has published this version: {plan.manifest.manifest_key}")
        return published

    def abort(self, plan, receipts):
        """Removes what a plan has written. WeightStoreError if it is published, or decided to be."""
        self.check_receipts(plan, receipts, False)
        self._check_unpublished(plan)
        self._decide(plan, "abort")
        self._discard(plan, self._check_unpublished(plan))

    def finalize(self, plan):
        """Ends a plan whose writer does not know how it ended: after a decision it does what is left of it.

        WeightStoreError if there is no decision, or a commit without its manifest: it has to be committed again.
        """
        published, decision = self.manifest(plan.manifest.manifest_key), self._decision(plan)
        if decision is None and published == plan.manifest:
            self._decide(plan, "commit")
            return
        if decision is None:
            raise WeightStoreError(f"the upload has no decision: {plan.control_key}")
        if decision == "abort":
            self._discard(plan, self._check_unpublished(plan))
        elif published is None:
            raise WeightStoreError(f"the committed upload has no manifest: {plan.manifest.manifest_key}")
        elif published != plan.manifest:
            self._discard(plan, published)

    @staticmethod
    def check_receipts(plan, receipts, complete):
        """WeightStoreError unless receipts are of the plan, each once, and (`complete`) of all of it."""
        expected, found = {one.target.fragment_id: one for one in plan.operations}, set()
        for one in receipts:
            if not isinstance(one, UploadReceipt):
                raise WeightStoreError(f"a receipt is an UploadReceipt, not {type(one).__name__}")
            if one.fragment_id in found:
                raise WeightStoreError(f"duplicate upload receipt: {one.fragment_id}")
            found.add(one.fragment_id)
            operation = expected.get(one.fragment_id)
            if operation is None:
                raise WeightStoreError(f"unexpected upload receipt: {one.fragment_id}")
            if (one.object_key, one.worker_id) != (operation.target.object_key, operation.source_snapshot.worker_id):
                raise WeightStoreError(f"invalid upload receipt: {one.fragment_id}")
        if complete and set(expected) - found:
            raise WeightStoreError(f"missing upload receipts: {', '.join(sorted(set(expected) - found)[:4])}")

    def _check_unpublished(self, plan):
        published = self.manifest(plan.manifest.manifest_key)
        if published == plan.manifest:
            raise WeightStoreError(f"the upload is published already: {plan.manifest.manifest_key}")
        return published

    def _discard(self, plan, published):
        """Removes a plan's objects, except those that a published manifest names."""
        kept = set() if published is None else {one.object_key for one in published.fragments}
        self._store.remove([key for key in plan.keys if key not in kept])

    def _decide(self, plan, decision):
        record = {"decision": decision, "plan_digest": plan.manifest.manifest_digest, "record_type": _RECORD}
        error = self._put(plan.control_key, _checks.canonical(record), plan.transaction_group_id)
        found = self._decision(plan)
        if found is None:
            raise WeightStoreError(f"the decision of the upload was not written; try again: {error}")
        if found != decision:
            raise WeightStoreError(f"the upload was decided before: {found}")

    def _put(self, key, text, group):
        """Puts a record, unless there is one. Returns what went wrong: whoever reads it back knows what counts."""
        try:
            return self._store.code("put", key, text.encode(), self._config([group], "metadata"))
        except WeightStoreError as error:
            return error

    def _decision(self, plan):
        found = self._store.get(plan.control_key)
        if found is None:
            return None
        try:
            record = _checks.fields(
                _checks.parse(found, "upload decision"), ("decision", "plan_digest", "record_type"), "upload decision"
            )
            if record["record_type"] != _RECORD or record["decision"] not in ("abort", "commit"):
                raise ValueError(f"no decision of an upload: {record}")
        except ValueError as error:
            raise WeightStoreError(f"invalid upload decision {plan.control_key}: {error}") from error
        if record["plan_digest"] != plan.manifest.manifest_digest:
            raise WeightStoreError(f"the upload decision is of another plan: {plan.control_key}")
        return record["decision"]


__all__ = ["WeightUploadTransaction"]
