"""The store of weights under its public names."""

from mooncake.reshard.weight._store.client import WeightStore, begin_weight_snapshot
from mooncake.reshard.weight._store.plans import (
    UploadOperation,
    UploadReceipt,
    WeightLoadPlan,
    WeightStoreError,
    WeightUploadPlan,
    plan_weight_upload,
)
from mooncake.reshard.weight._store.registration import StoreRegistrationLease
from mooncake.reshard.weight._store.snapshot import (
    WeightSnapshotAdapter,
    WeightSnapshotDescriptor,
    WeightStoreWriter,
)

__all__ = [
    "StoreRegistrationLease",
    "UploadOperation",
    "UploadReceipt",
    "WeightLoadPlan",
    "WeightSnapshotAdapter",
    "WeightSnapshotDescriptor",
    "WeightStore",
    "WeightStoreError",
    "WeightStoreWriter",
    "WeightUploadPlan",
    "begin_weight_snapshot",
    "plan_weight_upload",
]
