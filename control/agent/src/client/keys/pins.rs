//! Pins of objects that are in memory, soft pins and retentions, and their priorities.

use std::time::Duration;

use kvplane_client::Request;
use kvplane_proto::message::{ObjectPriority, RetainItem, Retaining};
use kvplane_proto::{Digest, Limits, Status};

use crate::client::namespace::Namespace;
use crate::client::objects::Objects;
use crate::error::{ArgumentError, Error};

/// Pins and priorities of a client's objects that are set after their puts: [`Keys::pins`](super::Keys::pins).
///
/// A *retention* keeps objects in memory until it ends. It has a number that the caller chooses, such as a digest of a
/// session's name, and is of the client's tenant. Objects may belong to several, and stay until the last one ends.
/// Retained objects count as hard pinned: see `--hard-pins` of `kvplane node`.
pub struct Pins<'a> {
    pub(in crate::client) objects: &'a mut Objects,
    pub(in crate::client) namespace: &'a Namespace,
}

/// Returns a duration in milliseconds, rounded up.
fn duration_ms(duration: Duration) -> Result<u32, Error> {
    let ms = duration.as_nanos().div_ceil(1_000_000);
    match u32::try_from(ms) {
        Ok(ms) if (1..=Limits::SOFT_PIN_MS).contains(&ms) => Ok(ms),
        _ => Err(ArgumentError::PinDuration { duration }.into()),
    }
}

impl Pins<'_> {
    /// Gives the objects under these keys soft pins of this duration from now, in place of those that they have.
    /// Returns for each whether it is in memory. A node shortens the duration to its `--soft-pin-max-ms`.
    ///
    /// # Errors
    /// When the duration is zero or more than a day, a key is empty or too long, or an owner does not answer.
    pub fn soft_pin(&mut self, keys: &[impl AsRef<[u8]>], duration: Duration) -> Result<Vec<bool>, Error> {
        self.pin(Retaining::Soft, keys, duration_ms(duration)?)?.into_iter().collect()
    }

    /// Ends the soft pins of the objects under these keys. Returns for each whether it is in memory.
    ///
    /// # Errors
    /// When a key is empty or too long, or an owner does not answer.
    pub fn soft_unpin(&mut self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<bool>, Error> {
        self.pin(Retaining::Soft, keys, 0)?.into_iter().collect()
    }

    /// Sets the priorities of the objects under these keys, as which they are evicted from now on; each counts as the
    /// newest of its priority. Returns for each whether it is in memory. An object that leaves memory and is read back
    /// from an SSD has the priority that it was written with there.
    ///
    /// # Errors
    /// When a key is empty or too long, or an owner does not answer.
    pub fn set_priority(&mut self, keys: &[impl AsRef<[u8]>], priority: ObjectPriority) -> Result<Vec<bool>, Error> {
        self.pin(Retaining::Priority(priority), keys, 0)?.into_iter().collect()
    }

    /// Adds the objects under these keys to a retention, which lasts for this duration from now at least, on the shards
    /// that own them: [`Self::renew`] reaches all. Returns for each whether it is in memory, and so retained; a failure
    /// of one concerns no other.
    ///
    /// # Errors
    /// When the duration is zero or more than a day, a key is empty or too long, or no owner answers; for a single
    /// object [`Status::PinLimit`] when the hard pins of its shard or tenant take what they may, or the duration is
    /// longer than the node's `--soft-pin-max-ms`.
    pub fn retain(
        &mut self,
        number: u64,
        keys: &[impl AsRef<[u8]>],
        duration: Duration,
    ) -> Result<Vec<Result<bool, Error>>, Error> {
        self.pin(Retaining::Object(number), keys, duration_ms(duration)?)
    }

    /// Adds the objects that belong to a group now, with [`PutOptions::group`](crate::PutOptions::group), to the
    /// retention of the group's number, for this duration from now at least. Returns their number.
    ///
    /// # Errors
    /// Errors of [`Self::retain`]; objects that were added before stay.
    pub fn retain_group(&mut self, group: u64, duration: Duration) -> Result<u64, Error> {
        self.everywhere(Retaining::Group(group), duration_ms(duration)?)
    }

    /// Makes a retention last for this duration from now at least. Returns the number of its objects.
    ///
    /// # Errors
    /// When the duration is zero or more than a day, or a shard does not answer, or refuses the duration.
    pub fn renew(&mut self, number: u64, duration: Duration) -> Result<u64, Error> {
        self.everywhere(Retaining::All(number), duration_ms(duration)?)
    }

    /// Ends a retention. Returns the number of its objects.
    ///
    /// # Errors
    /// When a shard does not answer.
    pub fn release(&mut self, number: u64) -> Result<u64, Error> {
        self.everywhere(Retaining::All(number), 0)
    }

    /// Sends an item to every shard; returns the number of objects.
    fn everywhere(&mut self, what: Retaining, duration_ms: u32) -> Result<u64, Error> {
        let tenant = self.namespace.tenant_number();
        let requester = self.objects.requester_mut();
        requester.follow_map();
        let slots = requester.owners()?.one_slot_each();
        let item = |digest| Request::Retain(RetainItem::of(what, digest, tenant, duration_ms));
        let requests: Vec<Request> = slots.iter().map(|slot| item(slot.first_digest())).collect();
        let results = if requests.is_empty() { Vec::new() } else { requester.run(&requests)? };
        let mut objects = 0;
        for result in results {
            requester.present(result, "pin")?;
            objects += result.bytes;
        }
        Ok(objects)
    }

    /// Sends an item for each object, and for each stripe of a striped one.
    fn pin(
        &mut self,
        what: Retaining,
        keys: &[impl AsRef<[u8]>],
        duration_ms: u32,
    ) -> Result<Vec<Result<bool, Error>>, Error> {
        let digests = self.namespace.digests(keys)?;
        let tenant = self.namespace.tenant_number();
        let parts = self.parts_of(&digests)?;
        let item = |digest: &Digest| Request::Retain(RetainItem::of(what, *digest, tenant, duration_ms));
        let requests: Vec<Request> = parts.iter().flatten().map(item).collect();
        let requester = self.objects.requester_mut();
        let mut results = if requests.is_empty() { Vec::new() } else { requester.run(&requests)? }.into_iter();
        let mut of_one = |parts: Vec<Digest>| {
            let mut all = !parts.is_empty();
            let mut failed = None;
            for result in results.by_ref().take(parts.len()) {
                match requester.present(result, "pin") {
                    Ok(there) => all &= there,
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            failed.map_or(Ok(all), Err)
        };
        Ok(parts.into_iter().map(&mut of_one).collect())
    }

    /// Returns for each object the digests of everything that it consists of; nothing if it does not exist.
    fn parts_of(&mut self, digests: &[Digest]) -> Result<Vec<Vec<Digest>>, Error> {
        let sizes: Vec<Request> = digests.iter().map(|digest| Request::Size(*digest)).collect();
        let results = if sizes.is_empty() { Vec::new() } else { self.objects.requester_mut().run(&sizes)? };
        let mut parts = Vec::with_capacity(digests.len());
        for (digest, result) in digests.iter().zip(results) {
            parts.push(match result.status {
                Status::Striped => self.objects.parts_of_striped(*digest)?.unwrap_or_default(),
                _ if self.objects.requester().present(result, "pin")? => vec![*digest],
                _ => Vec::new(),
            });
        }
        Ok(parts)
    }
}
