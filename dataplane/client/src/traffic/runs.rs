//! Runs: similar slices that take the same way at once are appended to their lanes' lists together, and completed
//! together.
//!
//! This is an optimisation that makes no decisions of its own: it checks the common conditions of a run once, and adds
//! its totals once. Any irregular slice ends a run and takes the normal path. The result of a run is exactly that of
//! its slices one by one (`tests/batches/bulk.rs`).

use super::Traffic;
use super::bulk::{Copies, Tally, short_of_least, unlink};
use super::deal::{Common, Deal, DealOutcome, LANES, Share, Turns};
use crate::host::HostSide;
use crate::network::{Endpoint, Network, SMALL_WINDOW_BYTES};
use crate::tables::{HeldHandle, LEAST_LOAD_BYTES, LaneLink, NOWHERE, Slice, SliceState, slice_id};
use crate::types::{Output, Request, SegmentTarget, SliceId, Transport};

impl Traffic {
    /// Returns the lanes for slices like one that was just routed.
    #[inline(never)]
    pub(crate) fn find_deal(&mut self, routed: u32, like: &SegmentTarget) -> Option<Deal> {
        let slice = self.slices.peek(routed);
        let group = &self.network.peers[like.peer.0].groups[usize::from(slice.way.group)];
        let (&[rail], true, true) = (&group.rails[..], group.is_empty(), group.path.is_greeted()) else {
            return None;
        };
        let small = self.network.host.config.is_small(slice.load_bytes());
        let entry = &self.network.rails[rail];
        // Small slices next to bulk need the scheduler.
        let (bulk_bytes, small_bytes) = entry.rail.inflight_bytes();
        if small && bulk_bytes > 0
            || !small && self.network.host.now_ns < group.express_until_ns
            || entry.lanes.len() > LANES
        {
            return None;
        }
        let window_bytes = self.network.rails.window_of(rail, &self.network.host.config).max(if small {
            SMALL_WINDOW_BYTES
        } else {
            0
        });
        if !entry.rail.has_room(small, window_bytes, true) {
            return None;
        }
        let (mut open, mut shares) = (0, [Share::default(); LANES]);
        for &lane in &entry.lanes {
            let entry = &self.network.lanes[lane];
            if entry.state == Endpoint::Ready && entry.may_take_more(&self.network.host.config) {
                let (load_bytes, last) = (entry.load.bound_bytes, entry.list.last);
                self.runs += 1;
                shares[open] = Share { lane, load_bytes, run: self.runs, bound: 0, first: NOWHERE, last };
                open += 1;
            }
        }
        let booked_bytes = if small { small_bytes } else { bulk_bytes };
        let room_bytes = window_bytes.max(1).saturating_sub(booked_bytes);
        if open == 0 {
            return None;
        }
        // The routed slice as it was before it was bound, except for the rail, which all slices of the run get.
        let like_slice = Slice { state: SliceState::Queued, link: LaneLink { rail, ..slice.link }, ..*slice };
        Some(Deal { rail, like: like_slice, common: Common { like: *like, small, room_bytes }, shares, open })
    }

    /// Books the slices dealt to the lanes of a rail.
    fn enter_lanes(&mut self, deal: &Deal, bytes: u64) {
        self.network.rails[deal.rail].rail.book(bytes, deal.common.small, self.network.host.now_ns);
        for share in &deal.shares[..deal.open] {
            let entry = &mut self.network.lanes[share.lane];
            if share.bound == 0 {
                continue;
            }
            if entry.list.last == NOWHERE {
                (entry.list.first, entry.progress_ns) = (share.first, self.network.host.now_ns);
            }
            if entry.list.next == NOWHERE {
                entry.list.next = share.first;
            }
            entry.list.queued += share.bound;
            (entry.list.last, entry.load.bound_bytes) = (share.last, share.load_bytes);
            self.network.lanes.mark_dirty(share.lane);
        }
    }

    /// Makes slices and binds each to the least loaded lane. Returns their number, and the first item that is not among
    /// them.
    #[inline(always)]
    pub(crate) fn deal<const ONE: bool, I>(
        &mut self,
        deal: &mut Deal,
        most: usize,
        items: &mut impl Iterator<Item = I>,
        set: &impl Fn(&mut Slice, &I),
    ) -> DealOutcome<I> {
        let Self { network, slices, batches, .. } = self;
        let (config, locality) = (&network.host.config, &network.locality);
        let Deal { like, common, shares, open, .. } = deal;
        let (like, shares) = (&*like, &mut shares[..*open]);
        let ids = &mut batches.at(like.batch.index).slices;
        let (lane_bytes, small_bytes) = (config.lane_window_bytes.max(1), config.small_bytes);
        let (mut bound, mut bytes, mut task) = (0, 0, like.task);
        // Our buffer and its place, which must be equal for all slices of a run, as they are booked together when they
        // end.
        let (mut buffer, mut ours) = (u32::MAX, None);
        let mut turns = Turns::default();
        let mut vacant = slices.vacant(like, most);
        let next = loop {
            let Some(item) = items.next() else { break None };
            let Some((index, generation, slice)) = vacant.fill(like) else { break Some(item) };
            set(slice, &item);
            let fits = 'fits: {
                let (Request::Read(target, local) | Request::Write(target, local)) = &slice.request else {
                    break 'fits None;
                };
                let load_bytes = local.bytes.max(LEAST_LOAD_BYTES);
                // Slices of one task are for one segment.
                let is_like = ONE
                    || slice.task == task
                    || (SegmentTarget { offset: common.like.offset, ..*target }) == common.like;
                let is_small = load_bytes <= small_bytes;
                if !is_like || is_small != common.small || bytes >= common.room_bytes {
                    break 'fits None;
                }
                if !ONE && local.buffer != buffer {
                    let place = locality.place_of(local.buffer);
                    if *ours.get_or_insert(place) != place {
                        break 'fits None;
                    }
                    buffer = local.buffer;
                }
                let at = turns.next(shares, load_bytes);
                shares.get_mut(at).filter(|share| share.load_bytes < lane_bytes).map(|share| (share, load_bytes))
            };
            let Some((share, load_bytes)) = fits else {
                vacant.leave(index);
                break Some(item);
            };
            task = slice.task;
            let before = core::mem::replace(&mut share.last, index);
            slice.link.lane = share.lane;
            slice.link.run = if ONE || slice.tasks == 1 { share.run } else { 0 };
            (slice.link.before, slice.link.after) = (before, NOWHERE);
            ids.push(slice_id(index, generation));
            if before != NOWHERE {
                vacant.at(before).link.after = index;
            }
            if share.bound == 0 {
                share.first = index;
            }
            share.bound += 1;
            share.load_bytes += load_bytes;
            bytes += load_bytes;
            bound += 1;
        };
        slices.filled(bound);
        if bound > 0 {
            self.enter_lanes(deal, bytes);
        }
        DealOutcome { bound, next }
    }

    /// Returns the copies that the device of an RDMA lane can execute, limited by its window.
    #[inline]
    pub(crate) fn copies_of(&mut self, index: u32) -> Copies<'_> {
        let Self { network, slices, .. } = self;
        let (config, lane) = (&network.host.config, &mut network.lanes[index]);
        Copies {
            most: lane.may_fly(config),
            left: lane.may_fly(config),
            next: lane.list.next,
            sent_bytes: lane.load.sent_bytes,
            // A copy that is larger than the window goes alone.
            window_bytes: config.lane_window_bytes.max(1),
            closes_ways: lane.closes_ways(),
            now_ns: network.host.now_ns,
            slices,
            lane,
        }
    }

    /// Returns the tally of the slices that end together with this one; `None` for an irregular slice.
    pub(crate) fn tally_for(&self, lane: u32, id: SliceId) -> Option<Tally> {
        let slice = self.slices.get(id.index, id.generation)?;
        let slow = self.network.host.now_ns.saturating_sub(slice.times.begun_ns) >= self.network.host.config.slow_ns;
        let mine = slice.link.lane == lane && slice.state == SliceState::Copying;
        if !mine || slow || slice.tasks != 1 || slice.answer.held != HeldHandle::Nothing {
            return None;
        }
        Some(Tally {
            times: slice.times,
            small: self.network.host.config.is_small(slice.load_bytes()),
            places: self.network.locality.places_of(&slice.request),
            ..Tally::default()
        })
    }

    /// Completes a slice whose copy has succeeded, and the following ones that match the tally. Returns the first that
    /// does not match.
    #[inline]
    pub(crate) fn end_alike(
        &mut self,
        lane: u32,
        first: SliceId,
        ids: &mut impl Iterator<Item = SliceId>,
        tally: &mut Tally,
    ) -> Option<SliceId> {
        let Self { network, slices, batches, .. } = self;
        let Network { host, lanes, locality, .. } = network;
        let HostSide { config, outbox, .. } = host;
        let lane_entry = &mut lanes[lane];
        let report = config.report_tasks;
        // The first slice is always checked, as no slice has this run number.
        let mut run = u64::MAX;
        let (mut count, mut bytes, mut more_load_bytes) = (0, 0, 0);
        let mut batch = slices.peek(first.index).batch;
        let mut entry = batches.at(batch.index);
        // Slices at the front of the lane's list are removed without updating their neighbours.
        let mut front = lane_entry.list.first;
        let mut next = Some(first);
        while let Some(id) = next {
            let Some(slice) = slices.get(id.index, id.generation) else {
                next = ids.next();
                continue;
            };
            if slice.link.run != run {
                if !tally.has(slice, lane, config, locality) {
                    break;
                }
                run = if slice.link.run == 0 { u64::MAX } else { slice.link.run };
                // A run belongs to one batch.
                if slice.batch != batch {
                    batch = slice.batch;
                    entry = batches.at(batch.index);
                }
            }
            if slice.state != SliceState::Copying {
                break;
            }
            debug_assert!(
                tally.has(slice, lane, config, locality) && slice.was_sent_whole(),
                "all slices of a run are alike"
            );
            debug_assert!(slice.batch == batch, "a run belongs to one batch");
            let slice = slices.end(id.index);
            let (before, after, task, slice_bytes) =
                (slice.link.before, slice.link.after, slice.task, slice.answer.bytes);
            count += 1;
            bytes += slice_bytes;
            if slice_bytes < LEAST_LOAD_BYTES {
                more_load_bytes += short_of_least(slice_bytes);
            }
            if id.index == front {
                front = after;
            } else {
                unlink(slices, lane_entry, before, after);
            }
            // If tasks are not reported, only the end of the batch is.
            if entry.end_slice(task, slice_bytes) && (report || entry.remaining == 0) {
                if report {
                    outbox.report(batch, task);
                }
                if entry.remaining == 0 {
                    outbox.push(Output::Done { batch });
                }
            }
            next = ids.next();
        }
        lane_entry.list.first = front;
        match front {
            NOWHERE => lane_entry.list.last = NOWHERE,
            front => slices.at(front).link.before = NOWHERE,
        }
        (tally.slices, tally.bytes, tally.load_bytes) = (count, bytes, bytes + more_load_bytes);
        next
    }

    /// Accounts for the end of slices that left a lane.
    pub(crate) fn take_stock(&mut self, lane: u32, tally: &Tally) {
        let &Tally { times, small, places, slices, bytes, load_bytes, .. } = tally;
        if slices == 0 {
            return;
        }
        let now_ns = self.network.host.now_ns;
        let entry = &mut self.network.lanes[lane];
        entry.load.bound_bytes -= load_bytes;
        // Each was sent as a whole.
        entry.load.sent_bytes -= bytes;
        entry.load.flying -= slices as u32;
        let (rail, peer) = (entry.rail, entry.peer.0);
        let nodes = self.network.nodes_of(rail, peer, places);
        let rail = &mut self.network.rails[rail];
        rail.rail.unbook(load_bytes, small);
        rail.rail.all_done(slices, bytes, small, times.posted_ns, now_ns);
        let counts = rail.books.of(Transport::Rdma);
        counts.operations += slices;
        counts.bytes += bytes;
        if let Some(nodes) = nodes {
            counts.own_node.count_many(nodes.own, slices);
            counts.peer_node.count_many(nodes.peer, slices);
        }
        counts.queue.add_many(times.posted_ns.saturating_sub(times.queued_ns), slices);
        counts.service.add_many(now_ns.saturating_sub(times.posted_ns), slices);
        self.network.peers[peer].retries.earn_many(slices);
    }
}
