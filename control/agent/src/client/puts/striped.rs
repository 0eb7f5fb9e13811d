//! Puts of striped objects: the stripes first, then the stripe head; and cleanup after a failure.

use std::ops::Range;

use kvplane_client::{Local, PutBook, Request};
use kvplane_engine::Slice;
use kvplane_proto::message::{ObjectName, Part, PutItem, PutOptions};
use kvplane_proto::rng::Rng;
use kvplane_proto::{Digest, Status};
use kvplane_sys::random::random_u64;

use super::WholePuts;
use super::capacity::Capacity;
use super::striping::{Striping, half};
use crate::client::namespace::Namespace;
use crate::client::objects::{Head, Objects, STRIPE_LEAST_BYTES, STRIPES_MOST};
use crate::client::outcome::Put;
use crate::error::Error;

/// Limits of the draws of stripes that avoid silent nodes: draws, and stripes of all of them.
const MOST_DRAWS: u64 = 256;
const STRIPES_LOOKED_AT: u64 = 16_384;
/// Attempts to draw a digest that belongs to a certain node.
const DRAWS: usize = 4096;
/// Attempts of a put whose stripes exist already.
const TRIES: usize = 4;
/// Limit of attempts that stored stripes of their own in vain: with shorter stripes, spread differently, the object may
/// fit, but each attempt evicts other objects.
const LOSSES: usize = 2;

/// Put of one object: its key, its value and the options.
#[derive(Clone, Copy)]
pub(super) struct ObjectPut<'a> {
    namespace: &'a Namespace,
    key: &'a [u8],
    digest: Digest,
    slice: Slice,
    options: PutOptions,
}

impl<'a> ObjectPut<'a> {
    pub(super) fn new(
        namespace: &'a Namespace,
        key: &'a [u8],
        slice: Slice,
        options: &PutOptions,
    ) -> Result<Self, Error> {
        Ok(Self { namespace, key, digest: namespace.digest(key)?, slice, options: *options })
    }

    pub(super) const fn digest(&self) -> Digest {
        self.digest
    }

    const fn bytes(&self) -> u64 {
        self.slice.local().bytes
    }

    /// Returns the stripe head of the striped object that the put replaces, if any, and the put with its options then;
    /// `None` if an existing object stays. The remains of an object that lost stripes are always replaced.
    fn replacing(&self, objects: &mut Objects) -> Result<Option<(Option<Head>, Self)>, Error> {
        let former = objects.head_of(self.digest)?;
        let stays = match &former {
            _ if self.options.replace => false,
            Some(former) => objects.lost_stripes(self.digest, former, usize::MAX)? == 0,
            None => objects.exists(self.digest)?,
        };
        let replace = self.options.replace || former.is_some();
        Ok((!stays).then_some((former, Self { options: PutOptions { replace, ..self.options }, ..*self })))
    }

    /// Stores the stripe head, as an object in one piece.
    fn put_head(&self, head: &Head, replace: bool, whole: &mut WholePuts, objects: &mut Objects) -> Result<Put, Error> {
        let value = objects.encode_head(head)?;
        let options = PutOptions { part: Part::Head, replace, ..self.options };
        let mut outcomes = whole.put(&[(self.key, value)], &options, self.namespace, objects)?;
        let put = outcomes.pop().unwrap_or(Ok(Put::Exists));
        // The error names the object's length, not that of the stripe head.
        let bytes = head.bytes;
        put.map_err(|why| match why.status() {
            Some(status) => objects.requester().problem(format!("put of {bytes} bytes"), status),
            None => why,
        })
    }
}

/// Puts of striped objects, and what is known of the lengths that the shards and the cluster take.
pub(super) struct StripedPuts {
    striping: Striping,
    capacity: Capacity,
}

impl StripedPuts {
    pub(super) fn new(stripe_bytes: u64) -> Self {
        Self { striping: Striping::new(stripe_bytes), capacity: Capacity::default() }
    }

    pub(super) const fn striping(&mut self) -> &mut Striping {
        &mut self.striping
    }

    /// Stores one large object in stripes, which are halved while shards refuse them as too long.
    pub(super) fn put(
        &mut self,
        put: &ObjectPut<'_>,
        whole: &mut WholePuts,
        objects: &mut Objects,
    ) -> Result<Put, Error> {
        let Some((former, put)) = put.replacing(objects)? else { return Ok(Put::Exists) };
        self.capacity.check(put.bytes(), objects.requester().link())?;
        let mut stripe_bytes = self.striping.stripe_bytes(put.bytes());
        let (mut tries, mut losses) = (0, 0);
        loop {
            let head = draw_head(&put, stripe_bytes, objects)?;
            let outcome = self.put_in_stripes(&put, &head, whole, objects);
            let is = |status: Status| matches!(&outcome, Err(error) if error.status() == Some(status));
            let too_large = is(Status::TooLarge);
            tries += 1;
            if is(Status::Exists) && tries < TRIES {
                continue;
            }
            // A stripe that a shard refused for its length has evicted nothing.
            losses += usize::from(too_large && !self.striping.is_striped(stripe_bytes));
            if !too_large || losses == LOSSES || stripe_bytes == STRIPE_LEAST_BYTES {
                if let (Ok(Put::Stored(_)), Some(former)) = (&outcome, former) {
                    objects.remove_stripes(put.digest, &former)?;
                }
                return outcome;
            }
            stripe_bytes = half(stripe_bytes);
        }
    }

    /// Stores one object as a single stripe with a digest that `is_there` holds for, and its stripe head with the owner
    /// of its key. Returns `None` if there is no such digest, or its owner has no room.
    pub(super) fn put_at(
        &mut self,
        put: &ObjectPut<'_>,
        is_there: impl Fn(Digest) -> bool,
        whole: &mut WholePuts,
        objects: &mut Objects,
    ) -> Result<Option<Put>, Error> {
        let (bytes, digest) = (put.bytes(), put.digest);
        let mut draw = Rng::new(random_u64()?, "stripe");
        // A node that owns a hundredth of all slots is hit by one draw in a hundred.
        let mut draw_head = || {
            (0..DRAWS)
                .map(|_| Head::new(bytes, bytes, u128::from(draw.next_u64()) << 64 | u128::from(draw.next_u64())))
                .find(|head| is_there(head.digest(digest, 0)))
        };
        let Some(mut head) = draw_head() else { return Ok(None) };
        let Some((former, put)) = put.replacing(objects)? else { return Ok(Some(Put::Exists)) };
        let mut tries = 1;
        let outcome = loop {
            let outcome = self.put_in_stripes(&put, &head, whole, objects);
            match outcome.as_ref().err().and_then(Error::status) {
                // An attempt of this very put stored it, and its acknowledgement was lost: as in `put`.
                Some(Status::Exists) if tries < TRIES => {
                    let Some(next) = draw_head() else { return Ok(None) };
                    (head, tries) = (next, tries + 1);
                }
                Some(Status::NoSpace | Status::TooLarge) => return Ok(None),
                _ => break outcome?,
            }
        };
        if let (Put::Stored(_), Some(former)) = (outcome, former) {
            objects.remove_stripes(put.digest, &former)?;
        }
        Ok(Some(outcome))
    }

    fn put_in_stripes(
        &mut self,
        put: &ObjectPut<'_>,
        head: &Head,
        whole: &mut WholePuts,
        objects: &mut Objects,
    ) -> Result<Put, Error> {
        if head.stripes() > STRIPES_MOST {
            let what = format!("put of {} bytes in {} stripes", head.bytes, head.stripes());
            return Err(objects.requester().problem(what, Status::TooLarge));
        }
        if let Err(why) = self.put_stripes(put, head, whole.new_book(), objects) {
            // Nothing of it may stay. The error of the put is reported, not that of the cleanup.
            let _ = objects.remove_stripes(put.digest, head);
            return Err(why);
        }
        let outcome = put.put_head(head, put.options.replace, whole, objects);
        if let Ok(Put::Stored(_)) = outcome {
            return outcome;
        }
        // The stripe head may exist nevertheless: its first acknowledgement may have been lost, and the retry was
        // answered `Exists`, or not in time. By now its node knows that the earlier request has ended.
        match objects.head_of(put.digest) {
            // The stripe head is in memory, but the put may have to wait for more than that: it is repeated,
            // replacing itself.
            Ok(Some(there)) if there == *head => {
                return put.put_head(head, true, whole, objects);
            }
            Ok(_) => {}
            // The outcome is unknown. Stripes without a stripe head are evicted in time; an object without its
            // stripes is lost.
            Err(_) if outcome.is_err() => return outcome,
            Err(why) => return Err(why),
        }
        let removed = objects.remove_stripes(put.digest, head);
        let outcome = outcome?;
        removed.map(|()| outcome)
    }

    fn put_stripes(
        &mut self,
        put: &ObjectPut<'_>,
        head: &Head,
        book: &mut PutBook,
        objects: &mut Objects,
    ) -> Result<(), Error> {
        let tenant = put.namespace.tenant_number();
        let options = PutOptions { part: Part::Stripe, replace: false, tenant, ..put.options };
        let mut requests = Vec::new();
        for stripe in 0..head.stripes() {
            let (offset, bytes) = head.place(stripe);
            let digest = head.digest(put.digest, stripe);
            let local = Local { offset: put.slice.local().offset + offset, bytes, ..put.slice.local() };
            let item = PutItem::plain(digest, bytes).with_options(&options);
            let number = book.push(item, &ObjectName::NONE);
            requests.push(Request::PutAs(digest, local, number));
        }
        let wave = match requests.len() {
            1 => 1,
            _ => {
                let bytes = self.capacity.wave_bytes(objects.requester().link());
                usize::try_from(bytes / head.stripe_bytes).unwrap_or(usize::MAX).max(1)
            }
        };
        for begin in (0..requests.len()).step_by(wave) {
            let end = begin.saturating_add(wave).min(requests.len());
            self.put_wave(head, &requests, begin..end, book, objects)?;
            // The last stripes may have evicted the first ones: the object is larger than the cluster, and further
            // stripes would only evict other objects.
            let lost = objects.lost_stripes(put.digest, head, end)?;
            if lost > 0 {
                let (bytes, stripes) = (head.bytes, head.stripes());
                let room = end as u64 - lost;
                let what = format!("put of {bytes} bytes: the cluster has room for {room} of its {stripes} stripes");
                return Err(objects.requester().problem(what, Status::TooLarge));
            }
        }
        Ok(())
    }

    /// Puts some of an object's stripes.
    fn put_wave(
        &mut self,
        head: &Head,
        requests: &[Request],
        stripes: Range<usize>,
        book: &PutBook,
        objects: &mut Objects,
    ) -> Result<(), Error> {
        let requester = objects.requester_mut();
        let mut waiting: Vec<usize> = stripes.collect();
        while !waiting.is_empty() {
            let asked: Vec<Request> = waiting.iter().map(|stripe| requests[*stripe]).collect();
            let results = requester.run_puts(&asked, book)?;
            let problem = |stripe: usize, status: Status| {
                let what = format!("put of stripe {stripe} of {} ({} bytes)", head.stripes(), head.bytes);
                Err(requester.problem(what, status))
            };
            let mut full = Vec::new();
            for (&stripe, result) in waiting.iter().zip(results) {
                match result.status {
                    Status::Ok => {}
                    Status::NoSpace => full.push(stripe),
                    Status::TooLarge => {
                        self.striping.refuse(head.stripe_bytes);
                        return problem(stripe, Status::TooLarge);
                    }
                    // A stripe that exists was stored by an attempt of this very put whose acknowledgement was lost,
                    // and may still wait for an SSD that refuses it. Its state is unknown, so the put starts over.
                    status => return problem(stripe, status),
                }
            }
            // Stripes of this object filled the pool while they were in flight; committed, they can be evicted or
            // demoted.
            if full.len() == waiting.len() {
                return problem(full[0], Status::NoSpace);
            }
            waiting = full;
        }
        Ok(())
    }
}

/// Draws the stripes of an object: as few as possible of them at nodes that are silent for this client, so that one
/// silent node does not delay every striped put of the cluster. The nodes of stripes follow from the drawn nonce.
fn draw_head(put: &ObjectPut<'_>, stripe_bytes: u64, objects: &mut Objects) -> Result<Head, Error> {
    let mut draw = Rng::new(random_u64()?, "stripes");
    let mut next =
        || Head::new(put.bytes(), stripe_bytes, u128::from(draw.next_u64()) << 64 | u128::from(draw.next_u64()));
    let (head, silent) = (next(), objects.requester_mut().silent_nodes());
    if silent.is_empty() {
        return Ok(head);
    }
    let owners = objects.requester_mut().owners()?;
    let is_silent = |stripe: &Digest| owners.node_of(*stripe).is_some_and(|node| silent.contains(&node));
    Ok(fewest(head, next, |head| head.digests(put.digest).filter(is_silent).count()))
}

/// Returns this stripe head, or another one of which fewer stripes count, drawn with bounded work.
fn fewest(head: Head, mut next: impl FnMut() -> Head, count: impl Fn(&Head) -> usize) -> Head {
    let draws = (STRIPES_LOOKED_AT / head.stripes()).clamp(1, MOST_DRAWS);
    let (mut best, mut least) = (head, count(&head));
    for _ in 0..draws {
        if least == 0 {
            break;
        }
        let other = next();
        let counted = count(&other);
        if counted < least {
            (best, least) = (other, counted);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_avoid_silent_nodes_with_bounded_work() {
        let object = Digest::of(b"", b"object");
        // A fifth of all digests belongs to the silent node.
        let is_silent = |digest: &Digest| digest.low().is_multiple_of(5);
        for (stripes, most) in [(1, 0), (4, 0), (16, 0), (1024, 250)] {
            let (mut nonce, mut drawn) = (0, 0);
            let mut next = || {
                (nonce, drawn) = (nonce + 1, drawn + 1);
                Head::new(stripes << 20, 1 << 20, nonce)
            };
            let head = next();
            let best = fewest(head, &mut next, |head| head.digests(object).filter(is_silent).count());
            let silent = best.digests(object).filter(is_silent).count();
            assert!(silent <= most, "{silent} of {stripes}");
            assert!(drawn <= MOST_DRAWS + 1 && (drawn - 1) * stripes <= STRIPES_LOOKED_AT.max(stripes), "{drawn}");
        }
    }
}
