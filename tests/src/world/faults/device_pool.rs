//! Device pools of shards: the copies of moves and of gets, which take time and are made in pieces at any moment of it,
//! damaged device memory, and devices that are lost.
//!
//! As in a real host, gets of objects in the device pool are staged: their bytes are copied to memory of the host
//! first, and sent from there. The device copies on its own, also while its node is halted.

use std::collections::BTreeMap;

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::{Digest, FrameFlags};
use kvplane_store::PoolMove;
use kvplane_store::service::{Hold, Memory, MemoryExtent, MoveId, MoveOutcome, PeerKey};

use crate::world::World;
use crate::world::check::ledger::{Ledger, Use};
use crate::world::check::{Rule, broken};
use crate::world::cluster::node::ShardIncarnation;
use crate::world::faults::device::DeviceMemory;
use crate::world::network::Way;
use crate::world::network::pipe::{OutgoingFrame, Source, StagedBytes};
use crate::world::queue::Event;
use crate::world::scenario::{Mischief, Scenario};

/// Name of the first copy in ledgers, where connections have their numbers; each copy has its own.
const COPIES: u32 = 1 << 31;
/// Byte that a lost device writes.
const GARBAGE: u8 = 0xdd;

/// Reply to a get whose bytes come from the device.
struct StagedReply {
    peer: PeerKey,
    header: Header,
    body: Vec<u8>,
    extent: MemoryExtent,
    hold: Option<Hold>,
    bytes: Vec<u8>,
}

/// Purpose of a copy.
enum Purpose {
    Move(MoveId, PoolMove),
    Reply(StagedReply),
}

/// Copy in progress.
struct DeviceCopy {
    purpose: Purpose,
    bytes: u64,
    copied: u64,
    piece: u64,
    /// A damaged byte was copied.
    is_damaged: bool,
    /// The service knows it as ended: [`Mischief::EarlyMoves`], [`Mischief::LateMoves`].
    is_reported: bool,
}

impl DeviceCopy {
    const fn new(purpose: Purpose, bytes: u64, pieces: u64) -> Self {
        let piece = bytes.div_ceil(pieces);
        Self { purpose, bytes, copied: 0, piece, is_damaged: false, is_reported: false }
    }

    const fn is_done(&self) -> bool {
        self.copied == self.bytes
    }
}

/// Device pool of a shard's incarnation.
pub(crate) struct IncarnationDevice {
    pub(crate) memory: DeviceMemory,
    copies: BTreeMap<u32, DeviceCopy>,
    last: u32,
    /// The host has given the device up.
    is_given_up: bool,
    /// Ranges of the pool that the lost device may still write to.
    pub(crate) quarantined: usize,
}

impl IncarnationDevice {
    pub(crate) fn open(scenario: &Scenario) -> Option<Self> {
        let memory = DeviceMemory::new(scenario.device?.pool_bytes);
        Some(Self { memory, copies: BTreeMap::new(), last: 0, is_given_up: false, quarantined: 0 })
    }

    /// Returns true if no copy is in flight, and no reply with bytes of the device is being sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.copies.is_empty() && self.memory.ledger.len() == 0
    }

    /// Returns the number of copies in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.copies.len()
    }

    /// Returns the copies of moves in flight.
    pub(crate) fn moves(&self) -> Vec<u32> {
        let is_move = |copy: &DeviceCopy| matches!(copy.purpose, Purpose::Move(..));
        self.copies.iter().filter(|(_, copy)| is_move(copy)).map(|(number, _)| *number).collect()
    }
}

impl ShardIncarnation {
    /// Returns the bytes of an extent, in which this version of an object is, as its writer wrote them: without damage.
    pub(crate) fn written(&self, version: u64, extent: MemoryExtent) -> Vec<u8> {
        match (&self.device, extent.memory) {
            (Some(device), Memory::DevicePool) => device.memory.undamaged(extent.offset, extent.bytes),
            _ => self.undamaged(version, extent),
        }
    }

    /// Returns true if an object is in the device pool.
    fn has_on_device(&self, digest: Digest) -> bool {
        self.service.store().peek(digest).is_some_and(|object| object.is_on_device)
    }
}

impl World {
    /// Takes the moves of a shard, and begins their copies; returns true if there were any.
    pub(crate) fn drive_device(&mut self, incarnation: usize) -> bool {
        let now_ns = self.now_ns;
        let at = &mut self.incarnations[incarnation];
        let Some(device) = at.device.as_ref().filter(|device| at.alive && !device.is_given_up) else { return false };
        let is_lost = device.memory.is_lost;
        if at.service.inspect().lost_device_pool() {
            // A get found the device lost. The driver may report copies as done that were done before.
            if self.streams.device.chance(0.5) {
                self.finish_done(incarnation);
            }
            self.give_up_device(incarnation);
            return true;
        }
        let mut begun = Vec::new();
        while let Some((id, one)) = at.service.device_moves().poll(now_ns) {
            begun.push((id, one));
        }
        let any = !begun.is_empty();
        begun.into_iter().for_each(|(id, one)| self.start_move(incarnation, id, one));
        if any && is_lost {
            // The driver rejects the copies.
            self.give_up_device(incarnation);
        }
        any
    }

    fn start_move(&mut self, incarnation: usize, id: MoveId, one: PoolMove) {
        let number = self.start_copy_of_device(incarnation, Purpose::Move(id, one), one.bytes);
        let PoolMove { digest, is_promotion, from, to, bytes, .. } = one;
        self.detail(u64::from(number), || {
            let way = if is_promotion { "promotes" } else { "demotes" };
            format!("incarnation {incarnation} {way} {digest} from {from} to {to}, {bytes} bytes: copy {number}")
        });
        let at = &mut self.incarnations[incarnation];
        let Some(device) = &mut at.device else { return };
        let (pool, memory) = (&mut at.ledger, &mut device.memory.ledger);
        let (source, destination) = if is_promotion { (pool, memory) } else { (memory, pool) };
        let read = source.lend(COPIES + number, Use::Read, from, bytes);
        let written = destination.lend(COPIES + number, Use::Write, to, bytes);
        self.require(read.and(written));
        if self.scenario.has(Mischief::EarlyMoves) {
            self.report_move(incarnation, number);
        }
    }

    /// Begins a get of an object in the device pool: its bytes are copied, and then sent.
    pub(crate) fn stage_reply(
        &mut self,
        incarnation: usize,
        peer: PeerKey,
        (header, body): (Header, &[u8]),
        (extent, hold): (MemoryExtent, Hold),
    ) {
        let is_early = self.scenario.has(Mischief::ReleaseStagedEarly);
        if is_early {
            self.incarnations[incarnation].service.sent(hold);
        }
        let hold = (!is_early).then_some(hold);
        let reply = StagedReply { peer, header, body: body.to_vec(), extent, hold, bytes: Vec::new() };
        let number = self.start_copy_of_device(incarnation, Purpose::Reply(reply), extent.bytes);
        self.detail(u64::from(number), || format!("incarnation {incarnation} stages {extent:?}: copy {number}"));
        let Some(device) = &mut self.incarnations[incarnation].device else { return };
        let lent = device.memory.ledger.lend(COPIES + number, Use::Read, extent.offset, extent.bytes);
        self.require(lent);
    }

    fn start_copy_of_device(&mut self, incarnation: usize, purpose: Purpose, bytes: u64) -> u32 {
        let pieces = 1 + self.streams.device.below(3);
        let Some(device) = &mut self.incarnations[incarnation].device else { return 0 };
        device.last += 1;
        let number = device.last;
        device.copies.insert(number, DeviceCopy::new(purpose, bytes, pieces));
        self.after_piece(Event::DevicePiece(incarnation, number));
        number
    }

    fn after_piece(&mut self, event: Event) {
        let most_ns = self.scenario.device.map_or(0, |device| device.piece_ns);
        let wait_ns = 1 + self.streams.device.below(most_ns);
        self.after(wait_ns, event);
    }

    /// Copies the next piece; the host notices the end of the last one later.
    pub(crate) fn device_piece(&mut self, incarnation: usize, number: u32) {
        let trusting = self.scenario.has(Mischief::LateMoves);
        let at = &mut self.incarnations[incarnation];
        let Some(device) = at.device.as_mut().filter(|_| at.alive) else { return };
        let Some(copy) = device.copies.get_mut(&number) else { return };
        if device.memory.is_lost {
            self.after_piece(Event::DeviceCopied(incarnation, number));
            return;
        }
        let (from, bytes) = (copy.copied, copy.piece.min(copy.bytes - copy.copied));
        copy.copied += bytes;
        let name = COPIES + number;
        let check = |ledger: &Ledger, usage, offset| {
            if copy.is_reported { Ok(()) } else { ledger.check(name, usage, offset + from, bytes) }
        };
        let checked = match &mut copy.purpose {
            Purpose::Move(_, one) if one.is_promotion => {
                let moved = at.pool.bytes(one.from + from, bytes);
                let checked = check(&at.ledger, Use::Read, one.from);
                let checked = checked.and(check(&device.memory.ledger, Use::Write, one.to));
                device.memory.write(one.to + from, &moved);
                checked
            }
            Purpose::Move(_, one) => {
                let checked = check(&device.memory.ledger, Use::Read, one.from);
                let checked = checked.and(check(&at.ledger, Use::Write, one.to));
                copy.is_damaged |= device.memory.is_damaged(one.from + from, bytes);
                let moved = device.memory.read(one.from + from, bytes);
                at.pool.copy_in(one.to + from, moved);
                checked
            }
            Purpose::Reply(reply) => {
                reply.bytes.extend_from_slice(device.memory.read(reply.extent.offset + from, bytes));
                check(&device.memory.ledger, Use::Read, reply.extent.offset)
            }
        };
        let is_last_left = !copy.is_done() && copy.copied + copy.piece >= copy.bytes;
        let reports = trusting && is_last_left && matches!(copy.purpose, Purpose::Move(..));
        let next = if copy.is_done() { Event::DeviceCopied } else { Event::DevicePiece };
        self.require(checked);
        self.after_piece(next(incarnation, number));
        if reports {
            self.report_move(incarnation, number);
        }
    }

    /// Notices, at the host, that a copy is done, or that the device is lost.
    pub(crate) fn device_copied(&mut self, incarnation: usize, number: u32) {
        let at = &mut self.incarnations[incarnation];
        let Some(device) = at.device.as_mut().filter(|_| at.alive) else { return };
        let Some(copy) = device.copies.get(&number) else { return };
        match (copy.is_done(), &copy.purpose) {
            (true, Purpose::Move(..)) => self.finish_move(incarnation, number),
            (true, Purpose::Reply(_)) => self.send_staged(incarnation, number),
            (false, Purpose::Move(..)) => self.give_up_device(incarnation),
            (false, Purpose::Reply(_)) => self.refuse_staged(incarnation, number),
        }
        self.drain_service(incarnation, None);
    }

    /// Finishes the moves whose bytes are copied.
    fn finish_done(&mut self, incarnation: usize) {
        let Some(device) = &self.incarnations[incarnation].device else { return };
        let done = device.moves().into_iter().filter(|number| device.copies[number].is_done()).collect::<Vec<_>>();
        done.into_iter().for_each(|number| self.finish_move(incarnation, number));
    }

    /// Finishes a move whose bytes are copied: checks those that came from the device, and copies the tail.
    fn finish_move(&mut self, incarnation: usize, number: u32) {
        let Some(copy) = self.report_move(incarnation, number) else { return };
        let Purpose::Move(_, one) = copy.purpose else { return };
        self.check_name(incarnation, one.digest);
    }

    /// Ends a move at the service, and its loans; returns its copy. With a host's bug that reports too early, the copy
    /// goes on.
    fn report_move(&mut self, incarnation: usize, number: u32) -> Option<DeviceCopy> {
        if self.scenario.has(Mischief::ForgetMoves) && self.streams.device.chance(0.1) {
            return None;
        }
        let device = self.incarnations[incarnation].device.as_mut()?;
        let copy = device.copies.get_mut(&number)?;
        let Purpose::Move(id, one) = copy.purpose else { return None };
        if !copy.is_done() {
            copy.is_reported = true;
        } else if copy.is_reported {
            self.end_loans(incarnation, number, &one, false);
            return self.incarnations[incarnation].device.as_mut()?.copies.remove(&number);
        }
        let (is_done, is_damaged) = (copy.is_done(), copy.is_damaged);
        let outcome = self.outcome_of(incarnation, &one, is_done, is_damaged);
        self.detail(u64::from(number), || format!("incarnation {incarnation} reports copy {number}: {outcome:?}"));
        if outcome == MoveOutcome::Corrupt {
            self.forget_promise(incarnation, one.digest);
        }
        let now_ns = self.now_ns;
        // A host that reports at once still uses both places.
        if is_done || !self.scenario.has(Mischief::EarlyMoves) {
            self.end_loans(incarnation, number, &one, false);
        }
        let at = &mut self.incarnations[incarnation];
        at.service.device_moves().finish(id, outcome, now_ns);
        if is_done { at.device.as_mut()?.copies.remove(&number) } else { None }
    }

    fn outcome_of(&mut self, incarnation: usize, one: &PoolMove, is_done: bool, is_damaged: bool) -> MoveOutcome {
        let bytes = self.incarnations[incarnation].bytes(one.to, if one.is_promotion { 0 } else { one.bytes });
        let is_checked = is_done && !one.is_promotion && one.checksum != 0 && !self.scenario.has(Mischief::TrustDevice);
        if is_checked && payload_checksum(&bytes) != one.checksum {
            if !is_damaged {
                let what = format!("incarnation {incarnation}: the bytes of {one:?} are others, and no device did it");
                self.violate(broken(Rule::Bytes, what));
            }
            self.statistics.device.damaged += 1;
            return MoveOutcome::Corrupt;
        }
        if let Some(tail) = one.tail.filter(|_| !self.scenario.has(Mischief::LoseTails)) {
            let at = &mut self.incarnations[incarnation];
            let free = at.ledger.is_free(tail.to, tail.bytes);
            at.pool.copy_in(tail.to, &at.pool.bytes(tail.from, tail.bytes));
            self.require(free);
        }
        MoveOutcome::Copied
    }

    /// Ends the loans of a move. A lost device may still write to the pool.
    fn end_loans(&mut self, incarnation: usize, number: u32, one: &PoolMove, may_write: bool) {
        let at = &mut self.incarnations[incarnation];
        let Some(device) = &mut at.device else { return };
        device.memory.ledger.end_all(COPIES + number);
        if may_write && !one.is_promotion {
            device.quarantined += 1;
        } else {
            at.ledger.end_all(COPIES + number);
        }
    }

    /// Sends a reply whose bytes are copied.
    fn send_staged(&mut self, incarnation: usize, number: u32) {
        let at = &mut self.incarnations[incarnation];
        let Some(device) = &mut at.device else { return };
        let Some(DeviceCopy { purpose: Purpose::Reply(reply), .. }) = device.copies.remove(&number) else { return };
        let StagedReply { peer, mut header, body, hold, bytes, .. } = reply;
        let staged = StagedBytes { bytes, hold, name: COPIES + number };
        let Some(index) = at.connection_of(peer) else {
            self.release_staged(incarnation, &staged);
            return;
        };
        if header.flags.has(FrameFlags::CHECKSUM) && header.payload_checksum == 0 {
            header.payload_checksum = payload_checksum(&staged.bytes);
        }
        let copy = Source::Copy(staged.bytes.clone());
        let again = self.is_repeated(index, &header).then(|| OutgoingFrame::new(&header, &body, Some(copy)));
        self.send(index, Way::ToClient, OutgoingFrame::new(&header, &body, Some(Source::Staged(staged))));
        if let Some(again) = again {
            self.send(index, Way::ToClient, again);
        }
    }

    /// Refuses a reply whose bytes a lost device does not copy.
    fn refuse_staged(&mut self, incarnation: usize, number: u32) {
        self.forget_promises_on_device(incarnation);
        let at = &mut self.incarnations[incarnation];
        let Some(device) = &mut at.device else { return };
        let Some(DeviceCopy { purpose: Purpose::Reply(reply), .. }) = device.copies.remove(&number) else { return };
        device.memory.ledger.end_all(COPIES + number);
        if let Some(hold) = reply.hold {
            let status = at.service.device_moves().lose_read(hold);
            at.service.refuse_read(reply.peer, &reply.header, hold, status);
        }
    }

    /// Releases device memory whose bytes were sent, or never will be.
    pub(crate) fn release_staged(&mut self, incarnation: usize, staged: &StagedBytes) {
        let at = &mut self.incarnations[incarnation];
        if let Some(device) = &mut at.device {
            device.memory.ledger.end_all(staged.name);
        }
        if let Some(hold) = staged.hold {
            at.service.sent(hold);
        }
    }

    /// Gives the device of a shard up, as its host does when a copy fails.
    fn give_up_device(&mut self, incarnation: usize) {
        self.forget_promises_on_device(incarnation);
        let now_ns = self.now_ns;
        let at = &mut self.incarnations[incarnation];
        let Some(device) = at.device.as_mut().filter(|device| !device.is_given_up) else { return };
        device.is_given_up = true;
        at.service.device_moves().lose();
        self.statistics.device.lost += 1;
        self.detail(incarnation as u64, || format!("incarnation {incarnation} gives its device up"));
        let Some(device) = &self.incarnations[incarnation].device else { return };
        for number in device.moves() {
            let device = self.incarnations[incarnation].device.as_mut();
            let Some(DeviceCopy { purpose, copied, .. }) = device.and_then(|device| device.copies.remove(&number))
            else {
                continue;
            };
            let Purpose::Move(id, one) = purpose else { continue };
            self.end_loans(incarnation, number, &one, true);
            if !one.is_promotion {
                self.after_piece(Event::DeviceGarbage(incarnation, one.to + copied, one.bytes - copied));
            }
            self.incarnations[incarnation].service.device_moves().finish(id, MoveOutcome::Lost, now_ns);
        }
    }

    /// Lets a lost device write to a range of the pool that it was to copy to.
    pub(crate) fn device_garbage(&mut self, incarnation: usize, offset: u64, bytes: u64) {
        self.incarnations[incarnation].pool.copy_in(offset, &vec![GARBAGE; bytes as usize]);
    }

    /// Drops the promises for the objects of a lost device.
    fn forget_promises_on_device(&mut self, incarnation: usize) {
        let Self { shadow, incarnations, doubled, .. } = self;
        doubled.retain(|key, _| !incarnations[incarnation].has_on_device(shadow.digest(*key)));
    }

    /// Drops the promise for an object that is dropped because its bytes are damaged.
    fn forget_promise(&mut self, incarnation: usize, digest: Digest) {
        let key = self.shadow.key(digest).filter(|_| self.incarnations[incarnation].has_on_device(digest));
        if let Some(key) = key {
            self.doubled.remove(&key);
        }
    }

    /// Loses the device of a shard of a node: its host notices that later.
    pub(crate) fn lose_device(&mut self, node: usize, drawn: u64) {
        let Some(incarnation) = self.shard_of(node, drawn) else { return };
        if let Some(device) = &mut self.incarnations[incarnation].device {
            device.memory.is_lost = true;
        }
    }

    /// Flips a bit of an object in the device pool of a shard of a node, if there is one.
    pub(crate) fn damage_device(&mut self, node: usize, drawn: u64) {
        let Some(incarnation) = self.shard_of(node, drawn) else { return };
        let rng = &mut self.streams.device;
        let at = &mut self.incarnations[incarnation];
        let views = (0..self.scenario.keys).filter_map(|key| at.service.store().peek(self.shadow.digest(key)));
        let on_device: Vec<_> = views.filter(|view| view.is_on_device).map(|view| view.extent).collect();
        let Some(device) = at.device.as_mut().filter(|_| !on_device.is_empty()) else { return };
        let extent = on_device[rng.below(on_device.len() as u64) as usize];
        let offset = extent.offset + rng.below(extent.bytes);
        device.memory.damage(offset, rng.below(8) as u32);
        self.detail(offset, || format!("incarnation {incarnation}: byte {offset} of its device is damaged"));
    }

    pub(crate) fn shard_of(&self, node: usize, drawn: u64) -> Option<usize> {
        let shards = &self.nodes[node].shards;
        if shards.is_empty() { None } else { Some(shards[drawn as usize % shards.len()]) }
    }

    /// Ends the faults of devices: their objects must be readable again. Hosts notice that devices are lost.
    pub(crate) fn mend_devices(&mut self) {
        for incarnation in 0..self.incarnations.len() {
            let at = &mut self.incarnations[incarnation];
            let Some(device) = at.device.as_mut().filter(|_| at.alive) else { continue };
            device.memory.mend();
            if device.memory.is_lost {
                self.give_up_device(incarnation);
                self.drain_service(incarnation, None);
            }
        }
    }
}
