//! Scatter-gather: puts and gets of objects from and into several pieces of registered memory, with one request and one
//! checksum per object.

use kvplane_client::{Local, Request};
use kvplane_engine::{MemoryRange, Slice};
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Limits, Status, Version};

use super::namespace::Namespace;
use super::objects::Objects;
use super::outcome::{Got, Put};
use super::puts::Puts;
use crate::error::{ArgumentError, Error};

/// Puts and gets of objects whose bytes are in several pieces of registered memory:
/// [`Client::scatter_gather`](super::Client::scatter_gather).
pub struct ScatterGather<'a> {
    pub(super) objects: &'a mut Objects,
    pub(super) namespace: &'a Namespace,
    pub(super) puts: &'a mut Puts,
}

impl ScatterGather<'_> {
    /// Stores one object from several pieces of registered memory, in order.
    ///
    /// # Errors
    /// When it cannot be stored: the status says why.
    pub fn put_from(&mut self, key: &[u8], pieces: &[Slice], options: &PutOptions) -> Result<Put, Error> {
        let mut outcomes = self.batch_put_from(&[(key, pieces)], options)?;
        outcomes.pop().unwrap_or(Ok(Put::Exists))
    }

    /// Stores many objects, each from several pieces of registered memory; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: an object of more pieces than a frame names, or of 0 bytes.
    pub fn batch_put_from(
        &mut self,
        items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        let (list, locals) = self.gather(items.iter().map(|(_, pieces)| pieces.as_ref()))?;
        let slices: Vec<_> = items.iter().zip(locals).map(|((key, _), local)| (key, Slice::new(local))).collect();
        let outcomes = self.puts.put(&slices, options, self.namespace, self.objects);
        self.objects.requester_mut().initiator().remove_parts(list);
        outcomes
    }

    /// Reads one object into several pieces of registered memory, in order; `None` when there is none. The pieces may
    /// be longer than the object: memory beyond its end is left unchanged.
    ///
    /// # Errors
    /// When the memory is too small, the pieces overlap, or the owner does not answer.
    pub fn get_into(&mut self, key: &[u8], pieces: &[Slice]) -> Result<Option<Got>, Error> {
        let mut outcomes = self.batch_get_into(&[(key, pieces)])?;
        outcomes.pop().unwrap_or(Ok(None))
    }

    /// Reads many objects, each into several pieces of registered memory; one outcome for each.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: pieces that overlap, of one object or of two, or more of them than a
    /// frame names.
    pub fn batch_get_into(
        &mut self,
        items: &[(impl AsRef<[u8]>, impl AsRef<[Slice]>)],
    ) -> Result<Vec<Result<Option<Got>, Error>>, Error> {
        check_apart(items.iter().flat_map(|(_, pieces)| pieces.as_ref()))?;
        let (list, locals) = self.gather(items.iter().map(|(_, pieces)| pieces.as_ref()))?;
        let slices: Vec<Slice> = locals.into_iter().map(Slice::new).collect();
        let gets = items.iter().zip(&slices).map(|((key, _), slice)| self.namespace.get(key.as_ref(), *slice));
        let gets: Result<Vec<Request>, Error> = gets.collect();
        let outcomes = gets.and_then(|gets| self.objects.get_into(&gets, slices.into_iter()));
        self.objects.requester_mut().initiator().remove_parts(list);
        outcomes
    }

    /// Reads one object into several pieces of registered memory that are exactly as long as the object; returns its
    /// version, or `None` when there is none.
    ///
    /// # Errors
    /// When the pieces are not as long as the object, overlap, or the owner does not answer.
    pub fn get_exact(&mut self, key: &[u8], pieces: &[Slice]) -> Result<Option<Version>, Error> {
        let wanted: u64 = pieces.iter().map(|piece| piece.local().bytes).sum();
        match self.get_into(key, pieces)? {
            Some(got) if got.bytes < wanted => {
                let what = format!("get of {} bytes into {} pieces of {wanted}", got.bytes, pieces.len());
                Err(self.objects.requester().problem(what, Status::OutOfRange))
            }
            got => Ok(got.map(|got| got.version)),
        }
    }

    /// Registers the pieces of all objects as one scatter list; returns its number and the range of each object in it.
    fn gather<'a>(&mut self, objects: impl Iterator<Item = &'a [Slice]>) -> Result<(u32, Vec<Local>), Error> {
        let (mut pieces, mut ranges, mut offset) = (Vec::<MemoryRange>::new(), Vec::new(), 0);
        for object in objects {
            if object.len() > Limits::RANGES_PER_FRAME {
                return Err(ArgumentError::Pieces { pieces: object.len() }.into());
            }
            let bytes: u64 = object.iter().map(|piece| piece.local().bytes).sum();
            ranges.push((offset, bytes));
            offset += bytes;
            for piece in object {
                pieces.push(self.memory_of(piece.local())?);
            }
        }
        let added = self.objects.requester_mut().initiator().add_parts(pieces);
        let buffer = added.map_err(ArgumentError::PieceMemory)?;
        let locals = ranges.into_iter().map(|(offset, bytes)| Local { buffer, offset, bytes });
        Ok((buffer, locals.collect()))
    }

    /// Returns the memory of a slice.
    fn memory_of(&mut self, local: Local) -> Result<MemoryRange, Error> {
        let found = self.objects.requester_mut().initiator().memory(local);
        Ok(found.ok_or(ArgumentError::UnregisteredSlice)?)
    }
}

/// Rejects pieces that overlap.
fn check_apart<'a>(pieces: impl Iterator<Item = &'a Slice>) -> Result<(), ArgumentError> {
    let mut ranges: Vec<(u32, u64, u64)> =
        pieces.map(|piece| piece.local()).map(|local| (local.buffer, local.offset, local.bytes)).collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let ((buffer, offset, bytes), (next_buffer, next_offset, _)) = (pair[0], pair[1]);
        if buffer == next_buffer && offset + bytes > next_offset {
            return Err(ArgumentError::PiecesOverlap { bytes, offset, next_offset });
        }
    }
    Ok(())
}
