"""Memory that this process gives to the cluster beside what `setup` gave."""


class Segments:
    """The calls of a store that mount and unmount memory."""

    def allocate_and_mount_segment(self, size, protocol="tcp", location=""):
        """Gives `size` bytes of this process's memory to the cluster."""
        result = self.mount_segment("", size, 0, protocol, location)
        if result["ret"] == 0:
            result["allocated_size"] = size
        return result

    def mount_segment(self, path, size, offset=0, protocol="tcp", location=""):
        """Gives memory to the cluster. Memory in a file of others cannot be given: give a node the file as its SSD."""
        native = self._native
        if native is None or path or size <= 0:
            return {"ret": -1, "segment_ids": []}
        name = native.join(size, self._hostname)
        if not isinstance(name, str):
            return {"ret": name, "segment_ids": []}
        return {"ret": 0, "segment_ids": [name]}

    def unmount_segment(self, segment_ids, grace_period_seconds=0):
        """Takes memory back; objects may go to others within the time given."""
        native = self._native
        if native is None:
            return -1
        results = [native.leave(name, grace_period_seconds) for name in segment_ids]
        return -1 if any(results) else 0

    def unmount_and_free_segment(self, segment_ids, grace_period_seconds=0):
        """The same: memory that is not mounted is not kept."""
        return self.unmount_segment(segment_ids, grace_period_seconds)

    def unmount_local_disk_segment(self, grace_period_seconds=0):
        """Clients have no disks here; nodes do."""
        return 0 if self._native is not None else -1

    def alloc_from_mem_pool(self, arg0, /):
        """Memory of the pool of `setup_dummy`. There is none: shared memory needs no pool here."""
        return 0
