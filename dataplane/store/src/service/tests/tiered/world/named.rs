//! Objects with names, and clients whose tickets are for one tenant.

use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Bitmap, Kind, ObjectName, Operation, PutItem, PutOptions};
use kvplane_proto::{Digest, Status};

use super::super::super::rig::body_of;
use super::{OpenRequest, Path, PayloadTo, PeerKey, ReceivedAnswer, World};

impl World {
    /// Opens a welcomed connection whose ticket is for this tenant.
    pub(in super::super) fn join_bound(&mut self, peer: PeerKey, tenant: u32) {
        self.join(peer, Path::Stream);
        self.hear();
        self.service.control().bind(peer, tenant);
    }

    /// Puts an object: under a name, or, if the name has no key, under a digest.
    pub(in super::super) fn put_named(
        &mut self,
        peer: PeerKey,
        (name, digest): (&ObjectName<'_>, Digest),
        bytes: &[u8],
        options: &PutOptions,
    ) -> Status {
        let length = bytes.len() as u64;
        let item = match name.key.is_empty() {
            true => PutItem::plain(digest, length).with_options(options),
            false => PutItem::named(name, length, options),
        };
        let mut body = body_of([item]);
        if !name.key.is_empty() {
            body.extend_from_slice(name.tenant);
            body.extend_from_slice(name.key);
        }
        let (request, sum) = (self.next_request(), payload_checksum(bytes));
        self.asked.insert(request.index, OpenRequest::Other);
        let header =
            Header::request(Kind::Request(Operation::Put), request).with_body(&body, 1).with_payload(length, Some(sum));
        let to = self.service.request(peer, &header, &body, self.now_ns);
        self.write_tails();
        if let PayloadTo::Extent(extent) = to {
            self.memory.pool[extent.offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        self.service.payload_done(peer, Some(sum), self.now_ns);
        self.settle();
        self.answered.take().expect("it was answered").status
    }

    /// Drops objects from memory that the SSD has.
    pub(in super::super) fn forget(&mut self, digests: &[Digest]) {
        for digest in digests {
            assert!(self.service.objects.local.on_ssd(*digest).is_some(), "the SSD has it");
            self.service.objects.local.shard.store.drop_copy(*digest);
        }
    }

    /// Sends a request for many items.
    pub(in super::super) fn begin_bits(&mut self, peer: PeerKey, operation: Operation, (body, items): (&[u8], usize)) {
        let request = self.next_request();
        let header = Header::request(Kind::Request(operation), request).with_body(body, items);
        self.asked.insert(request.index, OpenRequest::Other);
        self.service.request(peer, &header, body, self.now_ns);
    }

    /// Takes the last reply, if there is one.
    pub(in super::super) fn take_answered(&mut self) -> Option<ReceivedAnswer> {
        self.answered.take()
    }

    /// Returns the bits of the reply to a request of many items.
    pub(in super::super) fn answer_bits(
        &mut self,
        peer: PeerKey,
        operation: Operation,
        (body, items): (&[u8], usize),
    ) -> (ReceivedAnswer, Vec<bool>) {
        self.begin_bits(peer, operation, (body, items));
        self.settle();
        let answered = self.take_answered().expect("it was answered");
        let bits = Bitmap::decode_two(&answered.body, items as u32)
            .map_or(Vec::new(), |(bits, _)| (0..items).map(|at| bits.get(at)).collect());
        (answered, bits)
    }
}
