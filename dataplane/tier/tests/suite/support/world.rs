//! Tier, device and model together: calls, events, restarts, and the checks after each.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::rng::Rng;
use kvplane_tier::{
    Ack, Event, Get, GetError, Output, Priority, Put, PutError, RecoveryReport, Removal, Span, Tier, TierConfig, Token,
};

use super::device::{Device, HostMemory};
use super::model::{Model, Promise, copied, fill, names_parts};
use super::{options, tenant_of};

/// Buffers in the pool, each as large as the largest object.
const PLACES: u64 = 40;

#[derive(Clone, Copy, Debug)]
enum Call {
    Put { digest: Digest, step: usize, place: u64, lent: bool },
    Remove { digest: Digest, step: usize, ack: Ack },
    Get { digest: Digest, floor: usize, bytes: u32, place: u64 },
    Key { digest: Digest },
}

pub(crate) struct World {
    pub(crate) config: TierConfig,
    pub(crate) tier: Tier,
    pub(crate) device: Device,
    pub(crate) memory: HostMemory,
    pub(crate) model: Model,
    pub(crate) rng: Rng,
    pub(crate) now_ns: u64,
    pub(crate) reports: Vec<RecoveryReport>,
    pub(crate) opened: bool,
    pub(crate) refused: Option<kvplane_tier::OpenError>,
    /// True if misses and failed writes are caused by the device.
    pub(crate) device_fails: bool,
    pub(crate) got: BTreeMap<u64, Option<u64>>,
    pub(crate) hits: u64,
    /// Objects that the scrubber quarantined.
    pub(crate) quarantined: BTreeSet<Digest>,
    /// True if the device returns no false results, so that objects that it surely does not have stay away.
    pub(crate) is_honest: bool,
    /// Objects that the previous incarnation surely did not have on the device, without those put since.
    surely_gone: BTreeSet<Digest>,
    /// Objects evicted since the last check began.
    evicted: BTreeSet<Digest>,
    calls: BTreeMap<u64, Call>,
    places: Vec<u64>,
    next_token: u64,
    next_version: u64,
}

impl World {
    pub(crate) fn new(config: TierConfig, seed: u64) -> Self {
        let device =
            Device::new(config.device_bytes(), config.block_bytes, config.segment_bytes, Rng::new(seed, "device"));
        let memory = HostMemory {
            staging: vec![0xa5; config.staging_bytes() as usize],
            pool: vec![0x5a; (PLACES * u64::from(config.max_object_bytes).next_multiple_of(4096)) as usize],
        };
        Self {
            tier: Tier::open(config.clone(), options()).expect("a good configuration"),
            config,
            device,
            memory,
            model: Model::default(),
            rng: Rng::new(seed, "workload"),
            now_ns: 0,
            reports: Vec::new(),
            opened: false,
            refused: None,
            device_fails: false,
            got: BTreeMap::new(),
            hits: 0,
            quarantined: BTreeSet::new(),
            is_honest: false,
            surely_gone: BTreeSet::new(),
            evicted: BTreeSet::new(),
            calls: BTreeMap::new(),
            places: (0..PLACES).collect(),
            next_token: 0,
            next_version: 0,
        }
    }

    fn span(&self, place: u64, bytes: u32) -> Span {
        Span::pool(place * u64::from(self.config.max_object_bytes).next_multiple_of(4096), bytes)
    }

    fn bytes_of(&mut self, place: u64, bytes: u32) -> &mut [u8] {
        let span = self.span(place, bytes);
        &mut self.memory.pool[span.offset as usize..][..bytes as usize]
    }

    /// Handles the tier's outputs.
    pub(crate) fn pump(&mut self) {
        while let Some(output) = self.tier.poll_output(self.now_ns, &mut self.memory) {
            match output {
                Output::Block(op) => self.device.submit(op, &self.memory),
                Output::Event(event) => self.event(event),
            }
        }
    }

    /// Completes one operation of the device, and handles its results; returns false if there is none.
    pub(crate) fn step(&mut self) -> bool {
        self.pump();
        let Some((id, result)) = self.device.step(&mut self.memory) else { return false };
        self.tier.complete(self.now_ns, id, result, &mut self.memory);
        self.pump();
        true
    }

    /// Runs until the device has nothing to do, advancing time.
    pub(crate) fn settle(&mut self) {
        for _ in 0..100_000 {
            if !self.step() {
                match self.tier.poll_timeout() {
                    Some(at) if at > self.now_ns => self.now_ns = at,
                    Some(_) => panic!("a timeout in the past does nothing"),
                    None => return,
                }
            }
        }
        panic!("the tier does not come to rest");
    }

    pub(crate) fn until_open(&mut self) {
        while !self.opened && self.refused.is_none() {
            assert!(self.step(), "the tier does not open");
        }
    }

    pub(crate) fn until_recovered(&mut self) {
        self.until_open();
        while !self.tier.is_recovered() && self.refused.is_none() {
            assert!(self.step(), "recovery does not end");
        }
    }

    /// Checks that objects visible during recovery are no older than their acknowledgements.
    pub(crate) fn check_shown(&self, promise: Promise) -> Result<(), String> {
        for (digest, history) in &self.model.keys {
            let Some(view) = self.tier.locate(*digest) else { continue };
            let floor = history.steps.iter().rposition(|step| step.promise >= promise);
            history.judge(Some(view.version.0), floor, false).map_err(|error| format!("{digest}: {error}"))?;
        }
        Ok(())
    }

    fn token(&mut self, call: Call) -> Token {
        self.next_token += 1;
        self.calls.insert(self.next_token, call);
        Token(self.next_token)
    }

    pub(crate) fn put(&mut self, digest: Digest, bytes: u32, pinned: bool, ack: Ack) -> Result<Token, PutError> {
        self.next_version += 1;
        self.put_version(digest, self.next_version, bytes, pinned, ack)
    }

    /// Puts a version, which may exist already.
    pub(crate) fn put_version(
        &mut self,
        digest: Digest,
        version: u64,
        bytes: u32,
        pinned: bool,
        ack: Ack,
    ) -> Result<Token, PutError> {
        let Some(place) = self.places.pop() else { return Err(PutError::Busy) };
        fill(digest, version, self.bytes_of(place, bytes));
        let token = self.token(Call::Put { digest, step: 0, place, lent: true });
        let key = digest.to_string();
        let payload = self.span(place, bytes);
        let (key, version_of) = (key.as_bytes(), Version(version));
        let names_parts = names_parts(version_of);
        let (checksum, copied) = (None, copied(version_of));
        let put = Put {
            digest,
            key,
            tenant: tenant_of(key),
            version: version_of,
            payload,
            checksum,
            pinned,
            hits: 0,
            names_parts,
            copied,
            ack,
            token,
        };
        let accepted = self.tier.put(self.now_ns, &put, &mut self.memory);
        match accepted {
            Ok(accepted) => {
                self.surely_gone.remove(&digest);
                let step = self.model.put(digest, version, bytes);
                self.calls.insert(token.0, Call::Put { digest, step, place, lent: accepted.lent });
                if !accepted.lent {
                    self.give_back(place);
                }
                Ok(token)
            }
            Err(error) => {
                self.calls.remove(&token.0);
                self.give_back(place);
                Err(error)
            }
        }
    }

    /// Overwrites a lent buffer as soon as it is returned.
    fn give_back(&mut self, place: u64) {
        let bytes = self.config.max_object_bytes;
        self.bytes_of(place, bytes).fill(0x5a);
        self.places.push(place);
    }

    pub(crate) fn remove(&mut self, digest: Digest, ack: Ack) -> Result<Removal, kvplane_tier::RemoveError> {
        let token = self.token(Call::Remove { digest, step: 0, ack });
        let removal = self.tier.remove(self.now_ns, digest, ack, token, &mut self.memory);
        match removal {
            Ok(Removal::Pending) => {
                let step = self.model.remove(digest);
                self.calls.insert(token.0, Call::Remove { digest, step, ack });
            }
            Ok(Removal::Absent) => {
                let step = self.model.remove(digest);
                let history = self.model.keys.entry(digest).or_default();
                history.steps[step].promise = Promise::Durable;
                self.calls.remove(&token.0);
            }
            Err(_) => {
                self.calls.remove(&token.0);
            }
        }
        removal
    }

    pub(crate) fn get(&mut self, digest: Digest, priority: Priority) -> Option<Token> {
        let current = self.model.keys.get(&digest).and_then(super::model::History::current);
        let view = self.tier.locate(digest);
        if self.tier.is_recovered() && !self.device_fails {
            assert_eq!(view.map(|view| (view.version.0, view.payload_bytes)), current, "{digest}");
        } else if let Some(view) = view {
            let history = &self.model.keys[&digest];
            assert!(history.ever.contains_key(&view.version.0), "{digest}: {view:?}");
        }
        let view = view?;
        assert_eq!((view.names_parts, view.copied), (names_parts(view.version), copied(view.version)), "{digest}");
        let bytes = view.payload_bytes;
        let place = self.places.pop()?;
        let floor = self.model.keys[&digest].steps.len();
        let token = self.token(Call::Get { digest, floor, bytes, place });
        let get = Get { digest, destination: self.span(place, bytes), priority, token };
        if let Err(error) = self.tier.get(&get) {
            assert_eq!(error, GetError::Busy);
            self.calls.remove(&token.0);
            self.give_back(place);
            return None;
        }
        self.get_key(digest);
        Some(token)
    }

    /// From time to time reads the key too.
    fn get_key(&mut self, digest: Digest) {
        if self.next_token.is_multiple_of(3) {
            let token = self.token(Call::Key { digest });
            if let Err(error) = self.tier.get_key(digest, Priority::Background, token) {
                assert_eq!(error, GetError::Busy);
                self.calls.remove(&token.0);
            }
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Opened { .. } => self.opened = true,
            Event::Refused(error) => self.refused = Some(error),
            Event::OwnershipNoted => {}
            Event::Recovered(report) => {
                assert!(self.device_fails || report.missing_segments == 0, "{report}");
                self.reports.push(report);
            }
            Event::Degraded(reason) => assert!(self.device_fails, "{reason}"),
            Event::Stored { token, ack } => self.promised(token, Some(ack)),
            Event::Removed { token } => self.promised(token, None),
            Event::StoreFailed { token, .. } | Event::RemoveFailed { token, .. } => {
                assert!(self.device_fails, "{event:?}");
                self.failed(token);
            }
            Event::Released { token } => {
                let Some(Call::Put { lent, place, .. }) = self.calls.get_mut(&token.0) else {
                    panic!("{event:?} of an unknown put");
                };
                assert!(core::mem::take(lent), "released twice");
                let place = *place;
                self.give_back(place);
            }
            Event::Got { token, version, checksum } => self.got(token, version.0, checksum),
            Event::Key { token, .. } => {
                let Some(Call::Key { digest }) = self.calls.remove(&token.0) else { panic!("{event:?}") };
                assert_eq!(self.tier.take_key(token), Some(digest.to_string().into_bytes()));
                assert_eq!(self.tier.take_key(token), None, "once");
            }
            Event::Missed { token, miss, .. } => {
                assert!(self.device_fails, "{miss:?}");
                if let Some(Call::Key { .. }) = self.calls.get(&token.0) {
                    self.calls.remove(&token.0);
                    return;
                }
                let Some(Call::Get { place, .. }) = self.calls.remove(&token.0) else { panic!("{event:?}") };
                self.give_back(place);
                self.got.insert(token.0, None);
            }
            Event::Quarantined { record, miss } => {
                assert!(self.device_fails, "{record:?}: {miss:?}");
                self.quarantined.insert(record.digest);
            }
            Event::Forgotten { .. } => assert!(self.device_fails, "{event:?}"),
            Event::Evicted { digest, .. } => {
                let history = self.model.keys.entry(digest).or_default();
                history.evicted = history.steps.len().checked_sub(1);
                self.evicted.insert(digest);
            }
        }
    }

    fn promised(&mut self, token: Token, ack: Option<Ack>) {
        let (digest, step, asked) = match self.calls.remove(&token.0) {
            Some(Call::Put { digest, step, lent: false, .. }) => (digest, step, ack),
            Some(Call::Remove { digest, step, ack }) => (digest, step, Some(ack)),
            other => panic!("{token:?} is {other:?}"),
        };
        let history = self.model.keys.entry(digest).or_default();
        history.steps[step].promise = match asked {
            Some(Ack::Durable) => Promise::Durable,
            _ => Promise::Buffered,
        };
    }

    fn failed(&mut self, token: Token) {
        match self.calls.remove(&token.0) {
            Some(Call::Put { digest, step, .. } | Call::Remove { digest, step, .. }) => {
                let history = self.model.keys.entry(digest).or_default();
                history.steps[step].failed = true;
            }
            other => panic!("{token:?} is {other:?}"),
        }
    }

    fn got(&mut self, token: Token, version: u64, checksum: u64) {
        let Some(Call::Get { digest, floor, bytes, place }) = self.calls.remove(&token.0) else {
            panic!("{token:?} got something twice");
        };
        let history = &self.model.keys[&digest];
        assert_eq!(history.ever.get(&version), Some(&bytes), "{digest}: a version that is none");
        if !self.device_fails {
            let step = history.step_of(version).expect("a version of this incarnation");
            assert!(step + 1 >= floor, "{digest}: version {version} was replaced before the get");
        }
        let mut expected = vec![0; bytes as usize];
        fill(digest, version, &mut expected);
        assert_eq!(kvplane_proto::checksum::payload_checksum(&expected), checksum, "{digest}");
        assert!(self.bytes_of(place, bytes) == expected, "{digest}: wrong bytes of version {version}");
        self.give_back(place);
        self.got.insert(token.0, Some(version));
        self.hits += 1;
    }

    /// Ends the process, with or without a power failure, and starts another.
    pub(crate) fn restart(&mut self, power: bool) {
        let keys = self.model.keys.keys().copied();
        self.surely_gone = keys.filter(|digest| self.is_honest && !self.tier.may_have(*digest)).collect();
        if power {
            self.device.power_failure(&self.memory);
        } else {
            self.device.kill(&self.memory);
        }
        self.reopen();
    }

    pub(crate) fn reopen(&mut self) {
        self.calls.clear();
        self.places = (0..PLACES).collect();
        self.memory.staging.fill(0xa5);
        self.memory.pool.fill(0x5a);
        (self.opened, self.refused) = (false, None);
        self.tier = Tier::open(self.config.clone(), options()).expect("a good configuration");
    }

    /// Reads every key and compares it with its acknowledgements. Strict: no durable object may be missing.
    pub(crate) fn verify(&mut self, promise: Promise, strict: bool) -> Result<(), String> {
        if let Some(digest) = self.surely_gone.iter().find(|digest| self.tier.locate(**digest).is_some()) {
            return Err(format!("{digest} is there, and the incarnation before was sure that it could not be"));
        }
        let keys: Vec<_> = self.model.keys.keys().copied().collect();
        let mut found = BTreeMap::new();
        self.evicted.clear();
        let device_fails = core::mem::replace(&mut self.device_fails, true);
        for digest in keys {
            let token = loop {
                if self.tier.locate(digest).is_none() {
                    break None;
                }
                match self.get(digest, Priority::Background) {
                    Some(token) => break Some(token),
                    None => assert!(self.step(), "all reads are in use, and none is in flight"),
                }
            };
            while token.is_some_and(|token| !self.got.contains_key(&token.0)) {
                assert!(self.step(), "a get has no end");
            }
            found.insert(digest, token.and_then(|token| self.got[&token.0]));
        }
        self.device_fails = device_fails;
        for (digest, found) in found {
            let history = self.model.keys.get_mut(&digest).expect("a key of the model");
            history
                .restarted(found, promise, strict, self.tier.degraded().is_none())
                .map_err(|error| format!("{digest}: {error}"))?;
            if self.evicted.contains(&digest) {
                // Reclaim evicted the object during this check.
                history.evicted = history.steps.len().checked_sub(1);
            }
        }
        Ok(())
    }
}
