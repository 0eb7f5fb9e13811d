//! Pins and priorities of objects that are in memory.

use std::time::Duration;

use kvplane::{Error, ObjectPriority, Pins};

use crate::cpython::Keys;
use crate::outcome::store_code;
use crate::store::clients::Clients;

/// Returns the outcomes of a change of objects, for each key: 1, 0 if the object is not in memory, or an error code.
fn each(
    clients: &Clients,
    keys: &Keys,
    change: impl FnOnce(Pins<'_>, &[&[u8]]) -> Result<Vec<Result<bool, Error>>, Error>,
) -> Vec<i64> {
    let keys: Vec<&[u8]> = keys.iter().collect();
    match clients.with(|member| change(member.client.keys().pins(), &keys)) {
        Ok(Ok(there)) => there.into_iter().map(|one| one.map_or_else(|why| store_code(&why), i64::from)).collect(),
        Ok(Err(why)) => vec![store_code(&why); keys.len()],
        Err(code) => vec![code; keys.len()],
    }
}

/// Returns the number of objects that a change of a retention concerned, or an error code.
fn count(clients: &Clients, change: impl FnOnce(Pins<'_>) -> Result<u64, Error>) -> i64 {
    match clients.with(|member| change(member.client.keys().pins())) {
        Ok(Ok(objects)) => objects as i64,
        Ok(Err(why)) => store_code(&why),
        Err(code) => code,
    }
}

/// Gives objects soft pins of this duration, or ends them if it is zero.
pub(crate) fn soft_pin(clients: &Clients, keys: &Keys, duration: Duration) -> Vec<i64> {
    each(clients, keys, |mut pins, keys| {
        let there = if duration.is_zero() { pins.soft_unpin(keys) } else { pins.soft_pin(keys, duration) };
        Ok(there?.into_iter().map(Ok).collect())
    })
}

/// Sets the priorities of objects.
pub(crate) fn set_priority(clients: &Clients, keys: &Keys, priority: ObjectPriority) -> Vec<i64> {
    each(clients, keys, |mut pins, keys| Ok(pins.set_priority(keys, priority)?.into_iter().map(Ok).collect()))
}

/// Adds objects to a retention.
pub(crate) fn retain(clients: &Clients, number: u64, keys: &Keys, duration: Duration) -> Vec<i64> {
    each(clients, keys, |mut pins, keys| pins.retain(number, keys, duration))
}

/// Adds the objects of a group to the retention of its number.
pub(crate) fn retain_group(clients: &Clients, group: u64, duration: Duration) -> i64 {
    count(clients, |mut pins| pins.retain_group(group, duration))
}

/// Makes a retention last longer.
pub(crate) fn renew(clients: &Clients, number: u64, duration: Duration) -> i64 {
    count(clients, |mut pins| pins.renew(number, duration))
}

/// Ends a retention.
pub(crate) fn release(clients: &Clients, number: u64) -> i64 {
    count(clients, |mut pins| pins.release(number))
}
