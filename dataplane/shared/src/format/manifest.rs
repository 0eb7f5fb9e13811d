//! Manifest of a shard: what counts of its objects, for which slots, and as of which map.

use kvplane_proto::ids::{Epoch, SLOTS};
use kvplane_tier::SlotSet;

use super::{Flaw, Stream, check_start, put64, seeded, start, word64};

const MAGIC: [u8; 4] = *b"KVSM";
const OWNED_AT: usize = 64;
const RELEASED_AT: usize = OWNED_AT + SLOTS / 8;
const CHECKSUM_AT: usize = RELEASED_AT + SLOTS / 8;
/// Length of a manifest.
pub const MANIFEST_BYTES: usize = CHECKSUM_AT + 8;

/// Manifest of a shard in one incarnation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Manifest {
    /// Epoch of the map that the shard followed when it wrote the manifest.
    pub epoch: Epoch,
    /// Number of the checkpoint; 0 if there is none.
    pub checkpoint: u64,
    /// Number of the last pack that the checkpoint takes in; later ones count on top of it.
    pub after: u64,
    /// Number of the last pack that was written before the manifest.
    pub upto: u64,
    /// Slots of which the checkpoint and the later packs have everything.
    pub owned: SlotSet,
    /// The same for slots that the shard has lost in its latest changes of owners: of them nothing after pack `upto`
    /// counts.
    pub released: SlotSet,
    /// Lost slots that a later manifest releases: the shard still takes them over itself. In the bytes they are among
    /// the owned and among the released ones.
    pub releasing: SlotSet,
}

impl Manifest {
    /// Returns its bytes under this number.
    #[must_use]
    pub fn encode(&self, stream: Stream, number: u64) -> Vec<u8> {
        let mut bytes = vec![0; MANIFEST_BYTES];
        start(&mut bytes, MAGIC);
        put64(&mut bytes, 8, self.epoch.0);
        put64(&mut bytes, 16, self.checkpoint);
        put64(&mut bytes, 24, self.after);
        put64(&mut bytes, 32, self.upto);
        for (at, set) in [(OWNED_AT, &self.owned), (RELEASED_AT, &self.released)] {
            let set = set.with(&self.releasing, |set, releasing| set | releasing);
            set.0.iter().enumerate().for_each(|(word, slots)| put64(&mut bytes, at + word * 8, *slots));
        }
        let sum = seeded(stream, number, &[&bytes[..CHECKSUM_AT]]);
        put64(&mut bytes, CHECKSUM_AT, sum);
        bytes
    }

    /// Decodes a manifest of this stream and number.
    ///
    /// # Errors
    /// If the bytes are not whole, or of another stream.
    pub fn decode(stream: Stream, number: u64, bytes: &[u8]) -> Result<Self, Flaw> {
        check_start(bytes, MAGIC)?;
        if bytes.len() != MANIFEST_BYTES {
            return Err(Flaw::Short);
        }
        if word64(bytes, CHECKSUM_AT) != seeded(stream, number, &[&bytes[..CHECKSUM_AT]]) {
            return Err(Flaw::Checksum);
        }
        let set = |at: usize| SlotSet(Box::new(core::array::from_fn(|word| word64(bytes, at + word * 8))));
        let (owned, released) = (set(OWNED_AT), set(RELEASED_AT));
        let releasing = owned.with(&released, |owned, released| owned & released);
        let manifest = Self {
            epoch: Epoch(word64(bytes, 8)),
            checkpoint: word64(bytes, 16),
            after: word64(bytes, 24),
            upto: word64(bytes, 32),
            owned: owned.with(&releasing, |owned, releasing| owned & !releasing),
            released: released.with(&releasing, |released, releasing| released & !releasing),
            releasing,
        };
        if manifest.after > manifest.upto { Err(Flaw::Values) } else { Ok(manifest) }
    }
}
