//! Slots that move: what was in them goes along.
//!
//! A shard that loses a slot to another keeps its objects, frozen, for the new owner alone (*exports*). The shard that
//! gets the slot serves it at once (*imports*): what it does not have it asks the former owner for, and in the
//! background it fetches everything that is left, object by object, and has the former owner drop what has moved. So an
//! object is taken over at most once, by its owner, and only the owner answers for it.
//!
//! What makes it right:
//! * The former owner tells of a slot only once it has heard that it lost it, by a map at least as new as the peer's.
//!   From then on nobody changes what it has of it.
//! * What was put or removed at the new owner counts, whatever the former one has: such an object is *masked* until the
//!   former owner has dropped it, and a fetch of it under way comes to nothing.
//! * A fetch belongs to one layout of the cluster. When the slot moves on, when either side begins another incarnation,
//! or
//!   when the new owner may have missed a layout, everything that was fetched and not taken over yet is void.
//! * Whatever cannot be fetched counts as evicted: nothing waits for a former owner for long.
//!
//! Not here: who owned what before ([`kvplane_proto::map::SlotOwners`]), and how to ask: the host's client does that.

mod asks;
mod changes;
mod exports;
mod imports;
mod pump;
mod room;

pub(super) use changes::Changes;
use changes::Witness;
use exports::Exports;
pub(super) use imports::Call;
use imports::Imports;
pub use imports::{Fetch, FetchDone, FetchLimits, Want};

use kvplane_proto::ids::Slot;
use kvplane_proto::map::ShardKey;

use super::Service;

/// What moved so far, and what is on its way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MoveCounters {
    /// Slots that others fetch from here.
    pub exporting_slots: u64,
    /// Slots of which not all is here yet.
    pub importing_slots: u64,
    /// Objects that were taken over.
    pub imported: u64,
    /// Their bytes.
    pub imported_bytes: u64,
    /// Of them, those that somebody waited for.
    pub fetched: u64,
    /// Questions that the former owner answered with no.
    pub misses: u64,
    /// Fetches that came to nothing: the former owner did not answer, or there was no room.
    pub failures: u64,
    /// Fetches that were void, as the object was put or removed here, or its slot moved on.
    pub void: u64,
    /// Whether nothing is to come any more by the maps that were heard of, and what lacks copies by them was gone
    /// through. Where nothing is fetched by itself, that is always so.
    pub settled: bool,
    /// Imports that were given up, as too much was written while the former owner did not answer.
    pub abandoned: u64,
}

/// Both sides of moves.
#[derive(Debug)]
pub(super) struct Moves {
    pub(super) exports: Exports,
    imports: Imports,
    /// What changed in slots whose owner before is away.
    pub(super) witness: Witness,
    counters: MoveCounters,
}

impl Moves {
    pub(super) fn new() -> Self {
        Self {
            exports: Exports::new(),
            imports: Imports::new(),
            witness: Witness::default(),
            counters: MoveCounters::default(),
        }
    }

    /// A question to another shard.
    pub(super) fn ask(&mut self, shard: ShardKey, want: Want, call: Call) -> Fetch {
        self.imports.ask(shard, want, call)
    }

    /// What the next question will be called.
    pub(super) const fn next_token(&self) -> u64 {
        self.imports.next_token + 1
    }

    /// Grows whenever a slot may be fetched from somebody else than before, or from nobody.
    pub(super) const fn source_generation(&self) -> u64 {
        self.imports.generation
    }

    /// How much is moved in the background.
    pub(super) const fn limits(&self) -> FetchLimits {
        self.imports.limits
    }
}

impl Service {
    /// Whether the objects of a slot are kept here for its new owner.
    #[must_use]
    pub fn exports(&self, slot: Slot) -> bool {
        self.moves.exports.has_slot(slot)
    }

    fn has_settled(&self) -> bool {
        let all_here = self.moves.imports.sources.is_empty() && self.copies.walked();
        all_here || self.moves.limits().bytes_per_s == 0
    }

    /// What moved so far, and what is on its way.
    #[must_use]
    pub fn move_counters(&self) -> MoveCounters {
        MoveCounters {
            exporting_slots: self.moves.exports.len() as u64,
            importing_slots: self.moves.imports.slots() as u64,
            settled: self.has_settled(),
            ..self.moves.counters
        }
    }
}
