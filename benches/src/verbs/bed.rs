//! Two drivers in one thread, over software devices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::SegmentId;
use kvplane_soft_verbs::{Loopback, SoftPort, null_verbs};
use kvplane_sys::device::Backing;
use kvplane_sys::verbs::Device;
use kvplane_sys::{HugePages, Poller, Region, RegionOptions, cpu};
use kvplane_transport::{CloseCause, ConnectionId, CopyCompletions, Event, Rdma, RdmaCopy, RdmaCounters, RdmaOptions};

use crate::Failure;

/// Time limit of a connection or a reply.
const PATIENCE: Duration = Duration::from_secs(10);
/// Segment that is written.
const SEGMENT: SegmentId = SegmentId { index: 1, generation: 1 };
/// Number of slices in flight, each to a range of its own: as many as a connection takes beside its messages.
const BATCH: usize = 120;

/// End of a connection.
pub(super) struct End {
    pub(super) rdma: Rdma,
    /// Numbers of connections that are up, and that are gone.
    pub(super) up: usize,
    pub(super) gone: usize,
    /// Poller that devices wake; the benchmark spins and never waits for it.
    _poller: Poller,
}

impl End {
    pub(super) fn new(device: &Device, options: RdmaOptions) -> Result<Self, Failure> {
        let (poller, mut rdma) = (Poller::new()?, Rdma::new(options));
        rdma.add_device(&poller, device)?;
        Ok(Self { rdma, up: 0, gone: 0, _poller: poller })
    }

    /// Runs a round of a spinning host, without copies.
    pub(super) fn round(&mut self) {
        self.rdma.poll(cpu::monotonic_ns());
        while let Some(event) = self.rdma.poll_event() {
            match event {
                Event::Accepted(_) | Event::Connected(_) => self.up += 1,
                Event::Gone(..) => self.gone += 1,
                Event::Sent(_) => {}
            }
        }
        while self.rdma.next_ready().is_some() {}
        self.rdma.flush();
    }
}

/// Sets up a connection; the messages of the host are passed on directly.
pub(super) fn connect(asking: &mut End, asked: &mut End) -> Result<(ConnectionId, ConnectionId), Failure> {
    let (ask, offer) = asking.rdma.offer(0, 0)?;
    let (serve, answer) = asked.rdma.accept(&offer);
    let serve = serve.ok_or("the offer was refused")?;
    asking.rdma.complete(ask, &answer);
    Ok((ask, serve))
}

/// Returns two devices that reach each other and move bytes.
pub(super) fn loopback() -> Result<Vec<Device>, Failure> {
    let fabric = Loopback::new(&[SoftPort::default(), SoftPort::default()]);
    Ok(fabric.verbs().devices()?)
}

pub(super) fn region(bytes: usize) -> Result<Arc<Region>, Failure> {
    Ok(Region::allocate(&RegionOptions { huge: HugePages::Never, ..RegionOptions::new("verbs", bytes) })?)
}

/// Cost of a number of slices.
pub(super) struct SliceCost {
    pub(super) elapsed: Duration,
    pub(super) counters: RdmaCounters,
}

/// Connection over the null device, with the segment's key known on it, and memory to copy from.
pub(super) struct Stream {
    asking: End,
    connection: ConnectionId,
    memory: Backing,
    slice_bytes: usize,
    copied: CopyCompletions,
    // Its device has the receives of the other end.
    _asked: End,
}

impl Stream {
    pub(super) fn new(slice_bytes: usize) -> Result<Self, Failure> {
        let device = null_verbs().device("null0")?;
        let options = RdmaOptions { endpoints: 8, ..RdmaOptions::default() };
        let (mut asking, mut asked) = (End::new(&device, options)?, End::new(&device, options)?);
        let (connection, _) = connect(&mut asking, &mut asked)?;
        let (ours, theirs) = (region(BATCH * slice_bytes)?, region(BATCH * slice_bytes)?);
        asked.rdma.publish(SEGMENT, &theirs.clone().into(), (BATCH * slice_bytes) as u64, true);
        let mut stream = Self {
            asking,
            connection,
            memory: ours.into(),
            slice_bytes,
            copied: CopyCompletions::default(),
            _asked: asked,
        };
        stream.learn_key()?;
        Ok(stream)
    }

    /// Sends the first copy, which requests the key.
    fn learn_key(&mut self) -> Result<(), Failure> {
        self.submit(0..1);
        let until = Instant::now() + PATIENCE;
        loop {
            self.asking.round();
            self._asked.round();
            self.asking.rdma.take_copied(&mut self.copied);
            let first = self.copied.iter().next();
            if let Some(copied) = first {
                self.copied.clear();
                return copied.outcome.map_err(|status| format!("the first copy: {status}").into());
            }
            if Instant::now() > until {
                return Err("the segment's key did not arrive".into());
            }
        }
    }

    fn submit(&mut self, places: impl Iterator<Item = usize>) {
        let (memory, bytes) = (&self.memory, self.slice_bytes);
        let copy = |place: usize| {
            let at = place * bytes;
            RdmaCopy { token: place as u64, segment: SEGMENT, offset: at as u64, memory, at, bytes, write: true }
        };
        self.asking.rdma.copy_many(self.connection, places.map(copy));
    }

    /// Writes this number of slices, like a spinning host: submits as many as fit, flushes, polls, takes completions.
    pub(super) fn run(&mut self, slices: u64) -> Result<SliceCost, Failure> {
        let before = *self.asking.rdma.counters();
        let start = Instant::now();
        let (mut submitted, mut done) = (0, 0);
        while done < slices {
            let until = slices.min(done + BATCH as u64);
            // Copies of a connection complete in order.
            self.submit((submitted..until).map(|slice| slice as usize % BATCH));
            submitted = until;
            self.asking.round();
            self.asking.rdma.take_copied(&mut self.copied);
            for (_, outcome, tokens) in self.copied.runs() {
                outcome.map_err(|status| format!("slice {done}: {status}"))?;
                done += tokens.len() as u64;
            }
            self.copied.clear();
        }
        let (elapsed, after) = (start.elapsed(), *self.asking.rdma.counters());
        let counters = RdmaCounters {
            messages: after.messages - before.messages,
            requests: after.requests - before.requests,
            doorbells: after.doorbells - before.doorbells,
            signalled: after.signalled - before.signalled,
            ..RdmaCounters::default()
        };
        Ok(SliceCost { elapsed, counters })
    }
}

/// Closes connections and waits for their completion.
pub(super) fn part(ends: [(&mut End, ConnectionId); 2]) -> Result<(), Failure> {
    let until = Instant::now() + PATIENCE;
    let mut gone = Vec::new();
    let [(asking, ask), (asked, serve)] = ends;
    for (end, id) in [(&mut *asking, ask), (&mut *asked, serve)] {
        gone.push(end.gone);
        end.rdma.close(id, CloseCause::Closed);
    }
    while asking.gone == gone[0] || asked.gone == gone[1] {
        asking.round();
        asked.round();
        if Instant::now() > until {
            return Err("a connection did not end".into());
        }
    }
    Ok(())
}
