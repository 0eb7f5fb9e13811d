//! Pins and priorities of objects that are in memory. Outcomes for each key: 1, 0 if the object is not in memory, or an
//! error code.

use std::time::Duration;

use kvplane::ObjectPriority;

use crate::cpython::Keys;
use crate::store::clients::Clients;
use crate::store::values::each;

/// Gives objects soft pins of this duration, or ends them if it is zero.
pub(crate) fn soft_pin(clients: &Clients, keys: &Keys, duration: Duration) -> Vec<i64> {
    each(clients, keys, |client, keys| {
        let mut pins = client.keys().pins();
        let there = if duration.is_zero() { pins.soft_unpin(keys) } else { pins.soft_pin(keys, duration) };
        Ok(there?.into_iter().map(Ok).collect())
    })
}

/// Sets the priorities of objects.
pub(crate) fn set_priority(clients: &Clients, keys: &Keys, priority: ObjectPriority) -> Vec<i64> {
    each(clients, keys, |client, keys| {
        Ok(client.keys().pins().set_priority(keys, priority)?.into_iter().map(Ok).collect())
    })
}

/// Adds objects to a retention.
pub(crate) fn retain(clients: &Clients, number: u64, keys: &Keys, duration: Duration) -> Vec<i64> {
    each(clients, keys, |client, keys| client.keys().pins().retain(number, keys, duration))
}
