"""Calls of a store, with its codes as exceptions."""

from mooncake.reshard.weight._store.plans import WeightStoreError

_ABSENT = -704


def default_config_factory(group_ids, record_type):
    """Returns the settings of a put: hard-pinned, in a group, as weights or (`"metadata"`) as metadata."""
    from mooncake.store import ObjectDataType, ReplicateConfig

    config = ReplicateConfig()
    config.group_ids = list(group_ids)
    config.with_hard_pin = True
    config.data_type = ObjectDataType.WEIGHT if record_type == "payload" else ObjectDataType.METADATA
    return config


class StoreBackend:
    """A `MooncakeDistributedStore`, or what has its methods. Whatever they raise or refuse is a WeightStoreError."""

    def __init__(self, raw):
        self._raw = raw

    def call(self, name, *arguments, **options):
        """Calls a method of the store."""
        method = getattr(self._raw, name, None)
        if not callable(method):
            raise WeightStoreError(f"the store has no {name}")
        try:
            return method(*arguments, **options)
        except Exception as error:
            raise WeightStoreError(f"{name} failed: {type(error).__name__}: {error}") from error

    def code(self, name, *arguments, **options):
        """Calls a method that returns a number."""
        found = self.call(name, *arguments, **options)
        if type(found) is not int:
            raise WeightStoreError(f"{name} returned {type(found).__name__}, not a code")
        return found

    def codes(self, name, keys, *arguments):
        """Calls a method that returns a number for each key; returns them by key."""
        found = self.call(name, list(keys), *arguments)
        if not isinstance(found, (list, tuple)) or len(found) != len(keys):
            raise WeightStoreError(f"{name} returned {found!r} for {len(keys)} keys")
        return dict(zip(keys, found))

    def get(self, key):
        """Returns an object's bytes; None if there is none, of which the store says so."""
        exists = self.code("is_exist", key)
        if exists == 0:
            return None
        if exists != 1:
            raise WeightStoreError("the store does not say whether an object exists", {key: exists})
        found = self.call("get", key)
        if not isinstance(found, (bytes, bytearray)) or not found:
            raise WeightStoreError(f"the object was not read: {key}")
        return bytes(found)

    def check_present(self, keys, limit):
        """WeightStoreError unless all of these objects exist."""
        for begin in range(0, len(keys), limit):
            found = self.codes("batch_is_exist", keys[begin : begin + limit])
            wrong = {key: code for key, code in found.items() if code != 1}
            if wrong:
                raise WeightStoreError("payloads are not in the store", wrong)

    def remove(self, keys):
        """Removes objects, whether they exist or not. WeightStoreError, after all were tried, for those that stayed."""
        wrong = {}
        for key in keys:
            try:
                code = self.code("remove", key, force=True)
            except WeightStoreError as error:
                code = str(error)
            if code not in (0, _ABSENT):
                wrong[key] = code
        if wrong:
            raise WeightStoreError("payloads were not removed", wrong)


__all__ = ["StoreBackend", "default_config_factory"]
