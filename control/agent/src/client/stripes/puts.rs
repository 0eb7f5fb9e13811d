//! Puts of striped objects: the stripes first, then the stripe head; and cleanup after a failure.

use std::ops::Range;

use kvplane_client::{Local, Request};
use kvplane_proto::digest::tenant_number;
use kvplane_proto::message::{ObjectName, Part, PutItem, PutOptions};
use kvplane_proto::rng::Rng;
use kvplane_proto::{Digest, Status};
use kvplane_sys::random::random_u64;

use crate::client::stripes::{HEAD_BYTES, Head, STRIPE_LEAST_BYTES, STRIPES_MOST};
use crate::client::{Client, Put, Slice};
use crate::error::Error;

/// Attempts to draw a digest that belongs to a certain node.
const DRAWS: usize = 4096;
/// Attempts of a put whose stripes exist already.
const TRIES: usize = 4;
/// Limit of attempts that stored stripes of their own in vain: with shorter stripes, spread differently, the object may
/// fit, but each attempt evicts other objects.
const LOSSES: usize = 2;

impl Client {
    /// Returns how many of the first `among` stripes of an object are missing.
    fn lost_stripes(&mut self, digest: Digest, head: &Head, among: usize) -> Result<u64, Error> {
        let requests: Vec<Request> = head.digests(digest).take(among).map(Request::Exists).collect();
        let there = self.run(&requests)?;
        Ok(there.iter().filter(|result| result.status == Status::NotFound).count() as u64)
    }

    /// Returns the stripe head of the striped object that a put replaces, if any, and the options of the put; `None` if
    /// an existing object stays. The remains of an object that lost stripes are always replaced.
    fn replaced_by(
        &mut self,
        key: &[u8],
        digest: Digest,
        options: &PutOptions,
    ) -> Result<Option<(Option<Head>, PutOptions)>, Error> {
        let former = self.head_of(digest)?;
        let stays = match &former {
            _ if options.replace => false,
            Some(former) => self.lost_stripes(digest, former, usize::MAX)? == 0,
            None => self.exists(key)?,
        };
        let replace = options.replace || former.is_some();
        Ok((!stays).then_some((former, PutOptions { replace, ..*options })))
    }

    /// Stores one large object in stripes, which are halved while shards refuse them as too long.
    pub(in crate::client) fn put_striped(
        &mut self,
        key: &[u8],
        slice: Slice,
        options: &PutOptions,
    ) -> Result<Put, Error> {
        let digest = self.digest(key)?;
        let Some((former, options)) = self.replaced_by(key, digest, options)? else { return Ok(Put::Exists) };
        self.check_capacity(slice.local().bytes)?;
        let mut stripe_bytes = self.striping.stripe_bytes.min(slice.local().bytes.div_ceil(2)).max(STRIPE_LEAST_BYTES);
        while self.is_striped(stripe_bytes) {
            stripe_bytes = (stripe_bytes / 2).max(STRIPE_LEAST_BYTES);
        }
        let (mut tries, mut losses) = (0, 0);
        loop {
            let nonce = u128::from(random_u64()?) << 64 | u128::from(random_u64()?);
            let head = Head::new(slice.local().bytes, stripe_bytes, nonce);
            let put = self.put_in_stripes(key, &head, slice, &options);
            let is = |status: Status| matches!(&put, Err(error) if error.status() == Some(status));
            let too_large = is(Status::TooLarge);
            tries += 1;
            if is(Status::Exists) && tries < TRIES {
                continue;
            }
            // A stripe that a shard refused for its length has evicted nothing.
            losses += usize::from(too_large && !self.is_striped(stripe_bytes));
            if !too_large || losses == LOSSES || stripe_bytes == STRIPE_LEAST_BYTES {
                if let (Ok(Put::Stored(_)), Some(former)) = (&put, former) {
                    self.remove_stripes(digest, &former)?;
                }
                return put;
            }
            stripe_bytes = (stripe_bytes / 2).max(STRIPE_LEAST_BYTES);
        }
    }

    /// Stores one object as a single stripe on a preferred node, and its stripe head with the owner of its key. Returns
    /// `None` if there is no such node, or it has no room.
    pub(in crate::client) fn put_stripe_at(
        &mut self,
        key: &[u8],
        slice: Slice,
        options: &PutOptions,
        place: &dyn Fn(Digest) -> bool,
    ) -> Result<Option<Put>, Error> {
        let digest = self.digest(key)?;
        let bytes = slice.local().bytes;
        let mut draw = Rng::new(random_u64()?, "stripe");
        // A node that owns a hundredth of all slots is hit by one draw in a hundred.
        let head = (0..DRAWS)
            .map(|_| Head::new(bytes, bytes, u128::from(draw.next_u64()) << 64 | u128::from(draw.next_u64())))
            .find(|head| place(head.digest(digest, 0)));
        let Some(head) = head else { return Ok(None) };
        let Some((former, options)) = self.replaced_by(key, digest, options)? else { return Ok(Some(Put::Exists)) };
        let put = match self.put_in_stripes(key, &head, slice, &options) {
            Err(error) if matches!(error.status(), Some(Status::NoSpace | Status::TooLarge)) => return Ok(None),
            put => put?,
        };
        if let (Put::Stored(_), Some(former)) = (put, former) {
            self.remove_stripes(digest, &former)?;
        }
        Ok(Some(put))
    }

    fn put_in_stripes(&mut self, key: &[u8], head: &Head, slice: Slice, options: &PutOptions) -> Result<Put, Error> {
        if head.stripes() > STRIPES_MOST {
            let what = format!("put of {} bytes in {} stripes", head.bytes, head.stripes());
            return Err(self.problem(what, Status::TooLarge));
        }
        let digest = self.digest(key)?;
        if let Err(why) = self.put_stripes(digest, head, slice, options) {
            // Nothing of it may stay. The error of the put is reported, not that of the cleanup.
            let _ = self.remove_stripes(digest, head);
            return Err(why);
        }
        let put = self.put_head(key, head, options);
        if let Ok(Put::Stored(_)) = put {
            return put;
        }
        // The stripe head may exist nevertheless: its first acknowledgement may have been lost, and the retry was
        // answered `Exists`, or not in time. By now its node knows that the earlier request has ended.
        match self.heads_of(&[digest]).map(|mut heads| heads.pop().flatten()) {
            // The stripe head is in memory, but the put may have to wait for more than that: it is repeated,
            // replacing itself.
            Ok(Some((there, _))) if there == *head => {
                return self.put_head(key, head, &PutOptions { replace: true, ..*options });
            }
            Ok(_) => {}
            // The outcome is unknown. Stripes without a stripe head are evicted in time; an object without its
            // stripes is lost.
            Err(_) if put.is_err() => return put,
            Err(why) => return Err(why),
        }
        let removed = self.remove_stripes(digest, head);
        let put = put?;
        removed.map(|()| put)
    }

    fn put_stripes(&mut self, digest: Digest, head: &Head, slice: Slice, options: &PutOptions) -> Result<(), Error> {
        let tenant = tenant_number(&self.tenant);
        let options = PutOptions { part: Part::Stripe, replace: false, tenant, ..*options };
        self.puts.clear();
        let mut requests = Vec::new();
        for stripe in 0..head.stripes() {
            let (offset, bytes) = head.place(stripe);
            let digest = head.digest(digest, stripe);
            let local = Local { offset: slice.local().offset + offset, bytes, ..slice.local() };
            let item = PutItem::plain(digest, bytes).with_options(&options);
            let number = self.puts.push(item, &ObjectName::NONE);
            requests.push(Request::PutAs(digest, local, number));
        }
        let wave = match requests.len() {
            1 => 1,
            _ => usize::try_from(self.wave_bytes() / head.stripe_bytes).unwrap_or(usize::MAX).max(1),
        };
        for begin in (0..requests.len()).step_by(wave) {
            let end = begin.saturating_add(wave).min(requests.len());
            self.put_wave(head, &requests, begin..end)?;
            // The last stripes may have evicted the first ones: the object is larger than the cluster, and further
            // stripes would only evict other objects.
            let lost = self.lost_stripes(digest, head, end)?;
            if lost > 0 {
                let (bytes, stripes) = (head.bytes, head.stripes());
                let room = end as u64 - lost;
                let what = format!("put of {bytes} bytes: the cluster has room for {room} of its {stripes} stripes");
                return Err(self.problem(what, Status::TooLarge));
            }
        }
        Ok(())
    }

    /// Puts some of an object's stripes.
    fn put_wave(&mut self, head: &Head, requests: &[Request], stripes: Range<usize>) -> Result<(), Error> {
        let mut waiting: Vec<usize> = stripes.collect();
        while !waiting.is_empty() {
            let asked: Vec<Request> = waiting.iter().map(|stripe| requests[*stripe]).collect();
            let results = self.run_puts(&asked)?;
            let mut full = Vec::new();
            for (&stripe, result) in waiting.iter().zip(results) {
                match result.status {
                    Status::Ok => {}
                    Status::NoSpace => full.push(stripe),
                    Status::TooLarge => {
                        self.striping.refused(head.stripe_bytes);
                        return Err(self.stripe_problem(stripe, head, Status::TooLarge));
                    }
                    // A stripe that exists was stored by an attempt of this very put whose acknowledgement was lost,
                    // and may still wait for an SSD that refuses it. Its state is unknown, so the put starts over.
                    status => return Err(self.stripe_problem(stripe, head, status)),
                }
            }
            // Stripes of this object filled the pool while they were in flight; committed, they can be evicted or
            // demoted.
            if full.len() == waiting.len() {
                return Err(self.stripe_problem(full[0], head, Status::NoSpace));
            }
            waiting = full;
        }
        Ok(())
    }

    fn stripe_problem(&self, stripe: usize, head: &Head, status: Status) -> Error {
        self.problem(format!("put of stripe {stripe} of {} ({} bytes)", head.stripes(), head.bytes), status)
    }

    fn put_head(&mut self, key: &[u8], head: &Head, options: &PutOptions) -> Result<Put, Error> {
        let room = self.room_for_heads(1)?;
        room.region().copy_in(0, &head.encode());
        let options = PutOptions { part: Part::Head, ..*options };
        let mut outcomes = self.batch_put_whole(&[(key, room.slice(0, HEAD_BYTES))], &options)?;
        let put = outcomes.pop().unwrap_or(Ok(Put::Exists));
        // The error names the object's length, not that of the stripe head.
        put.map_err(|why| match why.status() {
            Some(status) => self.problem(format!("put of {} bytes", head.bytes), status),
            None => why,
        })
    }
}
