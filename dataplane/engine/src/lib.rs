//! The host of the dataplane: shard threads, mailboxes, initiators.
