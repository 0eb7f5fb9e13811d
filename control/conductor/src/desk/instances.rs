//! Instances by name: they register with an incarnation, report, are doubted when they do not, and go.

use std::sync::Arc;

use super::error::bad;
use super::{Desk, DeskError, MAX_ID_BYTES, PoolKey};
use crate::index::MAX_NAME_BYTES;
use crate::scheduler::{Foreign, InstanceNumbers};

/// The shortest and the longest time between reports, in nanoseconds.
const REPORTS_NS: (u64, u64) = (10_000_000, 60_000_000_000);
/// The most bytes of an instance's address.
const ADDRESS_BYTES: usize = 256;

/// What an instance does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Prefills.
    Prefill,
    /// Decodes.
    Decode,
    /// Both.
    Mixed,
}

/// An instance as it registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceSpec {
    /// Its name, unique among all.
    pub name: String,
    /// Its incarnation: larger each time that it starts, such as the time of its start.
    pub incarnation: u64,
    /// Whose requests it serves; empty for the default tenant's.
    pub tenant: String,
    /// The model it serves.
    pub model: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of KV cache of a token; 0 for the default.
    pub token_bytes: u64,
    /// What it does.
    pub part: Part,
    /// Tokens of KV cache that it has room for when it decodes.
    pub capacity_tokens: u64,
    /// How often it will report, in nanoseconds; 0 for never, then it is believed until it is taken out.
    pub report_ns: u64,
    /// Where routers reach it: not looked at, but told.
    pub address: String,
    /// Where its events are read; none where it reports its cache by calls, or not at all. Not looked at, but kept.
    pub events: Option<Publisher>,
}

/// Where an instance publishes what becomes of its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publisher {
    /// The address of its publisher.
    pub publisher: String,
    /// The address of its replay socket; empty for none.
    pub replay: String,
    /// The topic of its events; empty for all.
    pub topic: String,
    /// True where it hashes as vLLM does, which its first blocks prove or disprove.
    pub is_vllm: bool,
}

/// What an instance is told when it registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Whether nothing is known of its cache: it sends a snapshot.
    pub fresh: bool,
    /// True for an instance that was registered already, in the same incarnation.
    pub again: bool,
    /// After how long without a report it is not chosen any more; 0 for never.
    pub doubted_after_ns: u64,
}

/// What an instance says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Grows with each report.
    pub seq: u64,
    /// Tokens of prompts that wait there or are computed, without cached ones.
    pub queued_tokens: u64,
    /// Tokens of KV cache of requests that it decodes.
    pub decode_tokens: u64,
    /// Those requests.
    pub decodes: u32,
}

/// An instance.
pub(super) struct Instance {
    pub spec: InstanceSpec,
    pub pool: u32,
    pub prefill: Option<usize>,
    pub decode: Option<usize>,
    /// When it was heard of.
    pub heard_ns: u64,
    /// Whether it missed reports.
    pub doubted: bool,
    /// Whether an operator has taken it out: it gets nothing new, in this incarnation.
    pub held: bool,
    /// The number of its latest report.
    pub seq: u64,
    pub load: Load,
    /// The number of the next batch of events.
    pub events: Option<u64>,
    /// Whether something of its cache is not known.
    pub degraded: bool,
    /// True once its cache was reported or followed.
    pub reports_cache: bool,
    /// Whether nobody reaches what it publishes.
    pub away: bool,
    /// Times in a row that it had much less cached than it said.
    pub broken: u32,
    /// Whether it was seen to hash otherwise than it should.
    pub alien: bool,
}

impl InstanceSpec {
    pub(super) fn check(&self) -> Result<(), DeskError> {
        let name = self.name.len();
        if name == 0 || name > MAX_ID_BYTES {
            return Err(bad(format!("an instance's name has 1 to {MAX_ID_BYTES} bytes, not {name}")));
        }
        for (what, text) in [("tenant", &self.tenant), ("model", &self.model)] {
            if text.len() > MAX_NAME_BYTES {
                return Err(bad(format!("a {what} of {} bytes; at most {MAX_NAME_BYTES}", text.len())));
            }
        }
        if self.address.len() > ADDRESS_BYTES {
            return Err(bad(format!("an address of {} bytes; at most {ADDRESS_BYTES}", self.address.len())));
        }
        if let Some(events) = &self.events {
            for (what, text) in
                [("publisher", &events.publisher), ("replay socket", &events.replay), ("topic", &events.topic)]
            {
                if text.len() > ADDRESS_BYTES {
                    return Err(bad(format!("a {what} of {} bytes; at most {ADDRESS_BYTES}", text.len())));
                }
            }
        }
        if self.block_tokens == 0 || self.block_tokens > 1 << 20 {
            return Err(bad(format!("blocks of {} tokens; 1 to {}", self.block_tokens, 1 << 20)));
        }
        if self.token_bytes > 1 << 30 {
            return Err(bad(format!("{} bytes of KV cache a token; at most {}", self.token_bytes, 1 << 30)));
        }
        if self.report_ns != 0 && !(REPORTS_NS.0..=REPORTS_NS.1).contains(&self.report_ns) {
            return Err(bad(format!(
                "reports every {} ns; {} to {}, or 0",
                self.report_ns, REPORTS_NS.0, REPORTS_NS.1
            )));
        }
        Ok(())
    }

    /// The pool that it is in.
    #[must_use]
    pub fn pool(&self) -> PoolKey {
        PoolKey { tenant: self.tenant.clone(), model: self.model.clone(), block_tokens: self.block_tokens }
    }
}

impl Desk {
    /// An instance registers. The same again does no harm; a later incarnation takes the place of an earlier one.
    ///
    /// # Errors
    /// When it makes no sense, is another than one of the same name and incarnation, is of an earlier incarnation, or
    /// there are too many.
    pub fn register(&mut self, spec: InstanceSpec, now_ns: u64) -> Result<Registration, DeskError> {
        spec.check()?;
        let doubted_after_ns = spec.report_ns.saturating_mul(u64::from(self.config.missed.0));
        if let Some(known) = self.instances.get_mut(spec.name.as_str()) {
            if spec.incarnation < known.spec.incarnation {
                return Err(DeskError::StaleIncarnation { name: spec.name, incarnation: known.spec.incarnation });
            }
            if spec.incarnation == known.spec.incarnation {
                if known.spec != spec {
                    let what = format!("instance {:?} is registered otherwise in this incarnation", spec.name);
                    return Err(DeskError::Conflict { what });
                }
                known.heard_ns = now_ns;
                let fresh = known.events.is_none();
                self.believe(&spec.name)?;
                return Ok(Registration { fresh, again: true, doubted_after_ns });
            }
        } else if self.instances.len() >= self.config.max_instances {
            return Err(DeskError::Limit { what: "instances", most: self.config.max_instances });
        }
        if let Some(known) = self.pool_of(&spec.pool()).and_then(|number| self.pools.get(&number)) {
            let bytes = known.token_bytes;
            if spec.token_bytes != 0 && spec.token_bytes != bytes {
                let what = format!("{} bytes of KV cache a token; others of this model have {bytes}", spec.token_bytes);
                return Err(DeskError::Conflict { what });
            }
        }
        let name = spec.name.clone();
        self.remove(&name);
        let number = self.make_pool(spec.pool(), spec.token_bytes)?;
        match self.enter(spec, number, now_ns) {
            Ok(()) => {}
            Err(error) => {
                self.drop_pool(number);
                return Err(error);
            }
        }
        self.changed.insert(name.into());
        self.version += 1;
        self.poll(now_ns);
        Ok(Registration { fresh: true, again: false, doubted_after_ns })
    }

    pub(super) fn enter(&mut self, spec: InstanceSpec, number: u32, heard_ns: u64) -> Result<(), DeskError> {
        let pool = self.pools.get_mut(&number).ok_or_else(|| bad("the pool is gone"))?;
        let name: Arc<str> = spec.name.as_str().into();
        let note = |names: &mut Vec<Arc<str>>, at: usize| {
            names.resize(names.len().max(at + 1), "".into());
            names[at] = Arc::clone(&name);
        };
        let prefill = match spec.part {
            Part::Prefill | Part::Mixed => Some(pool.conductor.add_prefill()?),
            Part::Decode => None,
        };
        if let Some(at) = prefill {
            note(&mut pool.prefill, at);
        }
        let decode = match spec.part {
            Part::Decode | Part::Mixed => Some(pool.conductor.add_decode(spec.capacity_tokens)),
            Part::Prefill => None,
        };
        if let Some(at) = decode {
            note(&mut pool.decode, at);
        }
        pool.instances += 1;
        let reports_cache = spec.events.is_some();
        let instance = Instance {
            spec,
            pool: number,
            prefill,
            decode,
            heard_ns,
            doubted: false,
            held: false,
            seq: 0,
            load: Load::default(),
            events: None,
            degraded: false,
            reports_cache,
            away: false,
            broken: 0,
            alien: false,
        };
        self.instances.insert(name, instance);
        Ok(())
    }

    /// An instance goes; its requests are told so. One that is not there does no harm.
    ///
    /// # Errors
    /// When a later incarnation of it is there.
    pub fn deregister(&mut self, name: &str, incarnation: u64, now_ns: u64) -> Result<bool, DeskError> {
        match self.instances.get(name) {
            Some(known) if known.spec.incarnation > incarnation => {
                Err(DeskError::StaleIncarnation { name: name.to_owned(), incarnation: known.spec.incarnation })
            }
            Some(_) => {
                self.remove(name);
                self.poll(now_ns);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    fn remove(&mut self, name: &str) {
        let Some(instance) = self.instances.remove(name) else { return };
        self.changed.insert(name.into());
        self.version += 1;
        let Some(pool) = self.pools.get_mut(&instance.pool) else { return };
        pool.instances -= 1;
        // Both numbers are of this pool, and alive until now.
        let mut lost = instance.prefill.and_then(|at| pool.conductor.lose_prefill(at).ok()).unwrap_or_default();
        lost.extend(instance.decode.and_then(|at| pool.conductor.lose_decode(at).ok()).unwrap_or_default());
        for request in lost {
            self.orphan(request);
        }
        self.drop_pool(instance.pool);
    }

    /// Whose an instance is.
    #[must_use]
    pub fn tenant_of(&self, name: &str) -> Option<&str> {
        self.instances.get(name).map(|known| known.spec.tenant.as_str())
    }

    pub(super) fn known(&mut self, name: &str, incarnation: u64) -> Result<&mut Instance, DeskError> {
        match self.instances.get_mut(name) {
            Some(known) if known.spec.incarnation == incarnation => Ok(known),
            Some(known) if known.spec.incarnation > incarnation => {
                Err(DeskError::StaleIncarnation { name: name.to_owned(), incarnation: known.spec.incarnation })
            }
            _ => Err(DeskError::UnknownInstance { name: name.to_owned() }),
        }
    }

    /// An instance reports. A report older than the latest one says only that it lives.
    ///
    /// # Errors
    /// When it is not registered in this incarnation.
    pub fn report(&mut self, name: &str, incarnation: u64, load: Load, now_ns: u64) -> Result<(), DeskError> {
        let known = self.known(name, incarnation)?;
        known.heard_ns = now_ns;
        let (number, prefill, decode) = (known.pool, known.prefill, known.decode);
        if load.seq <= known.seq && known.seq != 0 {
            self.counts.stale_reports += 1;
            return self.believe(name);
        }
        (known.seq, known.load) = (load.seq, load);
        let foreign =
            Foreign { queued_tokens: load.queued_tokens, decode_tokens: load.decode_tokens, decodes: load.decodes };
        if let Some(pool) = self.pools.get_mut(&number) {
            pool.conductor.report_load(InstanceNumbers { prefill, decode }, foreign)?;
        }
        self.believe(name)?;
        self.poll_pool(number, now_ns);
        Ok(())
    }

    pub(super) fn believe(&mut self, name: &str) -> Result<(), DeskError> {
        self.set_takes(name, true)
    }

    /// Takes an instance out, or lets it take requests again. What it has goes on, and others may fetch from it. Its
    /// next incarnation begins like any other. Returns the requests that are booked there.
    ///
    /// # Errors
    /// When there is no such instance.
    pub fn hold(&mut self, name: &str, held: bool, now_ns: u64) -> Result<u32, DeskError> {
        let unknown = || DeskError::UnknownInstance { name: name.to_owned() };
        let known = self.instances.get_mut(name).ok_or_else(unknown)?;
        if std::mem::replace(&mut known.held, held) != held {
            self.changed.insert(name.into());
        }
        self.version += 1;
        self.let_take(name)?;
        self.poll(now_ns);
        let known = self.instances.get(name).ok_or_else(unknown)?;
        let Some(pool) = self.pools.get(&known.pool) else { return Ok(0) };
        let prefills = known.prefill.map_or(0, |at| pool.conductor.prefill_booked(at, now_ns).0);
        let decodes = known.decode.map_or(0, |at| pool.conductor.decode_booked(at, now_ns).1);
        Ok(prefills + decodes)
    }

    pub(super) fn set_takes(&mut self, name: &str, takes: bool) -> Result<(), DeskError> {
        let Some(instance) = self.instances.get_mut(name) else { return Ok(()) };
        if instance.doubted != takes {
            return Ok(());
        }
        instance.doubted = !takes;
        self.version += 1;
        self.let_take(name)
    }

    /// Who is neither doubted nor held takes requests.
    pub(super) fn let_take(&mut self, name: &str) -> Result<(), DeskError> {
        let Some(instance) = self.instances.get(name) else { return Ok(()) };
        let takes = !instance.doubted && !instance.held;
        let Some(pool) = self.pools.get_mut(&instance.pool) else { return Ok(()) };
        let numbers = InstanceNumbers { prefill: instance.prefill, decode: instance.decode };
        Ok(pool.conductor.set_takes(numbers, takes)?)
    }

    /// Doubts who missed reports, and gives up who missed many. When the next will have.
    pub(super) fn look_at_instances(&mut self, now_ns: u64) -> Option<u64> {
        let (doubt, lose) = self.config.missed;
        let (mut doubted, mut lost, mut next_ns) = (Vec::new(), Vec::new(), None::<u64>);
        for (name, instance) in &self.instances {
            let report_ns = instance.spec.report_ns;
            if report_ns == 0 {
                continue;
            }
            let lost_ns = instance.heard_ns.saturating_add(report_ns.saturating_mul(u64::from(lose)));
            let doubted_ns = instance.heard_ns.saturating_add(report_ns.saturating_mul(u64::from(doubt)));
            let due_ns = if instance.doubted { lost_ns } else { doubted_ns };
            if now_ns >= lost_ns {
                lost.push(Arc::clone(name));
            } else if now_ns >= doubted_ns && !instance.doubted {
                doubted.push(Arc::clone(name));
                next_ns = Some(next_ns.map_or(lost_ns, |next| next.min(lost_ns)));
            } else {
                next_ns = Some(next_ns.map_or(due_ns, |next| next.min(due_ns)));
            }
        }
        for name in doubted {
            // It was just found.
            let _ = self.set_takes(&name, false);
        }
        for name in lost {
            self.remove(&name);
        }
        next_ns
    }
}
