//! What the puts of a batch say beside their bytes, and how they are asked for.

use kvplane_proto::frame::Header;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{Item, Kind, ObjectName, Operation, PutItem};

use super::Client;
use super::types::{Local, Request};

/// What the puts of a batch say beside their bytes: names and wishes, in bytes that are used again for the next batch.
/// [`Request::PutAs`] names one by its number.
#[derive(Clone, Debug, Default)]
pub struct PutBook {
    puts: Vec<Entry>,
    names: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    item: PutItem,
    name_at: u32,
}

impl PutBook {
    /// A book without entries.
    #[must_use]
    pub const fn new() -> Self {
        Self { puts: Vec::new(), names: Vec::new() }
    }

    /// Adds what a put says; the length of its object is taken from the request. Its number.
    ///
    /// # Panics
    /// When the name is not the one that the item was made of, or all names together have more than 4 GiB.
    pub fn push(&mut self, item: PutItem, name: &ObjectName<'_>) -> u32 {
        assert!(
            (usize::from(item.key_bytes), usize::from(item.tenant_bytes)) == (name.key.len(), name.tenant.len()),
            "the item is of another name"
        );
        let name_at = u32::try_from(self.names.len()).expect("names of 4 GiB");
        self.names.extend_from_slice(name.tenant);
        self.names.extend_from_slice(name.key);
        self.puts.push(Entry { item, name_at });
        self.puts.len() as u32 - 1
    }

    /// Forgets all entries.
    pub fn clear(&mut self) {
        self.puts.clear();
        self.names.clear();
    }

    /// How many entries there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.puts.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.puts.is_empty()
    }

    /// Whether the allocations are small enough to be kept.
    pub(super) const fn is_worth_keeping(&self) -> bool {
        self.puts.capacity() <= Limits::ITEMS_PER_FRAME && self.names.capacity() <= Limits::BODY_BYTES
    }

    pub(super) fn copy_from(&mut self, other: &Self) {
        self.clear();
        self.puts.extend_from_slice(&other.puts);
        self.names.extend_from_slice(&other.names);
    }

    pub(super) fn get(&self, number: u32) -> (PutItem, &[u8]) {
        let entry = &self.puts[number as usize];
        let at = entry.name_at as usize;
        (entry.item, &self.names[at..at + entry.item.name_bytes()])
    }
}

impl Client {
    /// What a put says: its record and its name.
    fn put_of(&self, slice: u32) -> Option<(PutItem, Local, &[u8])> {
        let slice = self.slices.peek(slice);
        match slice.request {
            Request::Put(digest, local) => Some((PutItem::plain(digest, local.bytes), local, &[])),
            Request::PutAs(digest, local, number) | Request::PutCopy(digest, local, number) => {
                let (item, name) = self.batches.peek(slice.batch.index).puts.get(number);
                Some((PutItem { digest, bytes: local.bytes, ..item }, local, name))
            }
            _ => None,
        }
    }

    /// Sends a put with its payload.
    pub(super) fn send_put(&mut self, lane: u32, slice: u32) {
        let mut body = self.outbox.take_names();
        let Some((item, local, name)) = self.put_of(slice) else { return };
        item.encode(&mut body);
        body.extend_from_slice(name);
        self.send_payload(lane, slice, Operation::Put, local, true, &body);
        self.outbox.give_names(body);
    }

    /// Asks for room for the puts at the head of a shared lane's queue: one frame, one answer, many slices.
    pub(super) fn send_reserve(&mut self, lane: u32) {
        let id = self.lanes[lane as usize].id(lane);
        let request = self.open_wire(id, Operation::Reserve);
        let mut header = Header::request(Kind::Request(Operation::Reserve), request);
        let (start, mut count) = (self.outbox.mark(), 0);
        let mut names = self.outbox.take_names();
        while count < Limits::ITEMS_PER_FRAME && self.window_open(lane) {
            let Some(next) = self.next_queued(lane) else { break };
            let (epoch, routing) = self.routing_of(next.index);
            if count > 0 && (epoch.0, routing) != (header.argument, header.flags) {
                break;
            }
            (header.argument, header.flags) = (epoch.0, routing);
            let Some((item, _, name)) = self.put_of(next.index) else { break };
            if (count + 1) * PutItem::BYTES + names.len() + name.len() > Limits::BODY_BYTES {
                break;
            }
            names.extend_from_slice(name);
            item.encode(self.outbox.writer());
            if count == 0 {
                header.deadline_us = self.deadline_us(next.index);
            }
            self.take_queued(lane, next.index);
            self.join_wire(request, next.index);
            count += 1;
        }
        self.outbox.writer().extend_from_slice(&names);
        self.outbox.give_names(names);
        let body = self.outbox.since(start);
        self.send(id, header, body, count, &[]);
    }
}

impl Request {
    /// The memory that an object, or a range of one, is put from.
    pub(super) const fn source(&self) -> Option<Local> {
        match *self {
            Self::Put(_, local)
            | Self::PutAs(_, local, _)
            | Self::PutCopy(_, local, _)
            | Self::Fill(_, _, _, _, local) => Some(local),
            _ => None,
        }
    }
}
