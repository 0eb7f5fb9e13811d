//! Workload of the clients' users: batches of all operations, on few keys or many, with short and long deadlines, some
//! cancelled.

use kvplane_client::{Local, PutBook, Request, SubmitOptions};
use kvplane_proto::digest::tenant_number;
use kvplane_proto::ids::BatchId;
use kvplane_proto::message::{ObjectName, PutItem, PutOptions};

use crate::world::World;
use crate::world::check::memory::Loan;
use crate::world::check::results::{OpenBatch, TrackedTask, What};
use crate::world::check::shadow::Shadow;
use crate::world::check::{Rule, broken};
use crate::world::queue::Event;
use crate::world::scenario::MS;

/// Longest deadline of a batch.
pub(crate) const LONGEST_NS: u64 = 2000 * MS;

impl World {
    /// Submits a user's batch, and schedules the next.
    pub(crate) fn act(&mut self, client: usize, incarnation: u32) {
        if !self.is_client(client, incarnation) || self.clients[client].batches_left == 0 || self.trouble.calm {
            return;
        }
        // A user waits for the first map and a ticket, as the real client does when it connects.
        let lacks_ticket = self.scenario.tickets && !self.clients[client].has_ticket;
        if lacks_ticket || self.clients[client].client.epoch().0 == 0 {
            self.after(5 * MS, Event::Act(client, incarnation));
            return;
        }
        self.clients[client].batches_left -= 1;
        let rng = &mut self.streams.workload;
        let count = 1 + rng.below(self.scenario.batch_requests);
        let twice = rng.chance(0.1);
        let deadline_ns = self.now_ns
            + if rng.chance(0.2) { MS + rng.below(20 * MS) } else { 100 * MS + rng.below(LONGEST_NS - 100 * MS) };
        // Bursts, with pauses that stretch the work over the time of the faults.
        let pause_ns = self.scenario.faults_until_ns / self.scenario.batches;
        let think_ns = if rng.chance(0.7) { rng.below(self.scenario.think_ns) } else { rng.below(6 * pause_ns) };
        let mut asked = Vec::new();
        let mut last_key = 0;
        for position in 0..count {
            let key = if twice && position > 0 { last_key } else { self.draw_key() };
            last_key = key;
            if let Some(request) = self.draw_request(client, key) {
                asked.push(request);
            }
        }
        if self.streams.segments.chance(0.4) {
            self.write_cells(client);
        }
        if !asked.is_empty() {
            self.submit(client, asked, deadline_ns);
        }
        self.after(think_ns, Event::Act(client, incarnation));
    }

    /// Draws a key; some keys are drawn more often than others.
    fn draw_key(&mut self) -> usize {
        let keys = self.scenario.keys as u64;
        let rng = &mut self.streams.workload;
        rng.below(keys).min(rng.below(keys)) as usize
    }

    fn draw_request(&mut self, client: usize, key: usize) -> Option<TrackedTask> {
        let limit = self.scenario.object_bytes;
        let remove = self.scenario.remove_weight;
        let rng = &mut self.streams.workload;
        let drawn = rng.below(90 + remove);
        let bytes = if rng.chance(0.3) { 1 + rng.below(limit.min(600)) } else { limit / 2 + 1 + rng.below(limit / 2) };
        let small = rng.chance(0.05);
        let replace = rng.chance(self.scenario.replace_chance);
        let what = match drawn {
            0..40 => What::Get { capacity: if small { 1 + rng.below(limit) } else { limit } },
            40..75 => What::Put { write: self.shadow.write(key, bytes), bytes, replace },
            75..83 => What::Exists,
            83..90 => What::Size,
            _ => What::Remove,
        };
        self.ask(client, key, what)
    }

    /// Allocates memory for a request; `None` if there is none.
    pub(crate) fn ask(&mut self, client: usize, key: usize, what: What) -> Option<TrackedTask> {
        let loan = match what {
            What::Get { capacity } => Loan::Get(capacity),
            What::Put { write, bytes, .. } | What::Write { write, bytes, .. } => Loan::Put { write, bytes },
            What::Exists | What::Size | What::Remove => return Some(TrackedTask { key, what, offset: None }),
        };
        match self.clients[client].memory.lend(loan, self.shadow.digest(key)) {
            Ok(offset) => Some(TrackedTask { key, what, offset: Some(offset?) }),
            Err(violation) => {
                self.violate(violation);
                None
            }
        }
    }

    pub(crate) fn submit(&mut self, client: usize, asked: Vec<TrackedTask>, deadline_ns: u64) -> Option<BatchId> {
        if self.scenario.wishes {
            asked.iter().filter(|asked| asked.what == What::Size).for_each(|asked| self.wish(asked.key));
        }
        let mut puts = PutBook::new();
        let requests: Vec<Request> = asked.iter().map(|asked| self.request_of(asked, &mut puts)).collect();
        let now_ns = self.now_ns;
        let options = SubmitOptions::until(deadline_ns);
        let fell_over = self.clients[client].client.counters().second_asked;
        match self.clients[client].client.submit_puts(&requests, &puts, &options, now_ns) {
            Ok(batch) => {
                let size = asked.len();
                self.detail(u64::from(batch.index), || format!("client {client} submits {batch:?} x{size}: {asked:?}"));
                let open = OpenBatch { asked, started_ns: now_ns, deadline_ns, cancelled: false, fell_over };
                let former = self.clients[client].batches.insert(batch, open);
                if former.is_some() {
                    self.violate(broken(Rule::Batch, format!("{batch:?} was assigned while it was open")));
                }
                if !self.trouble.calm && self.streams.workload.chance(self.scenario.chances.cancel) {
                    let wait_ns = self.streams.workload.below(30 * MS);
                    let incarnation = self.clients[client].incarnation;
                    self.after(wait_ns, Event::Cancel(client, incarnation, batch));
                }
                self.drain_client(client);
                Some(batch)
            }
            Err(error) => {
                self.violate(broken(Rule::Protocol, format!("a valid batch was refused: {error}")));
                None
            }
        }
    }

    fn request_of(&self, asked: &TrackedTask, puts: &mut PutBook) -> Request {
        let digest = self.shadow.digest(asked.key);
        let offset = asked.offset.unwrap_or(0);
        match asked.what {
            What::Get { capacity } => Request::Get(digest, Local { buffer: 0, offset, bytes: capacity }),
            What::Put { bytes, replace, .. } => {
                let key = Shadow::name(asked.key);
                let tenant = self.scenario.tenant_of(asked.key);
                let name = ObjectName { tenant, key: key.as_bytes() };
                let (tenant, priority) = (tenant_number(tenant), Shadow::priority(asked.key));
                let options = PutOptions { replace, tenant, priority, ..self.copies_wanted(asked) };
                let item = PutItem::named(&name, bytes, &options);
                Request::PutAs(digest, Local { buffer: 0, offset, bytes }, puts.push(item, &name))
            }
            What::Write { bytes, target, .. } => Request::Write(target, Local { buffer: 0, offset, bytes }),
            What::Exists => Request::Exists(digest),
            What::Size => Request::Size(digest),
            What::Remove => Request::Remove(digest),
        }
    }

    /// Cancels a user's batch.
    pub(crate) fn cancel(&mut self, client: usize, incarnation: u32, batch: BatchId) {
        if !self.is_client(client, incarnation) {
            return;
        }
        if let Some(open) = self.clients[client].batches.get_mut(&batch) {
            open.cancelled = true;
        }
        self.clients[client].client.cancel(batch, self.now_ns);
        self.drain_client(client);
    }
}
