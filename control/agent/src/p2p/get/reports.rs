//! Reports of a get: the caller's thread reports the outcomes of orders to the catalog, and decides when the get fails.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::Status;
use kvplane_rpc::p2p::ObjectMembers;
use kvplane_sys::interrupt;

use crate::error::Error;
use crate::p2p::catalog::{Catalog, is_forgotten};
use crate::p2p::replica::{News, Replica};
use crate::p2p::replicas::Keeper;

/// Time without progress after which the control plane is queried for peers that hold the missing shards.
const IDLE: Duration = Duration::from_secs(3);
/// Consecutive queries without such a peer after which a get without a deadline fails: 12 s with the first.
const HOPELESS: u32 = 3;
/// Backoff after the control plane did not answer.
const AWAY: Duration = Duration::from_millis(200);

/// Shards that no peer holds, as a query found them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LostShards {
    shards: u32,
    /// Excluded peers, each with the reason.
    excluded: Vec<(String, String)>,
}

impl LostShards {
    fn of(found: &ObjectMembers) -> Self {
        let excluded = found.members.iter().filter(|member| !member.excluded.is_empty());
        let excluded = excluded.map(|member| (member.segment.clone(), member.excluded.clone())).collect();
        Self { shards: found.lost, excluded }
    }
}

impl fmt::Display for LostShards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} shards are held by no peer", self.shards)?;
        self.excluded.iter().try_for_each(|(segment, why)| write!(f, "; {segment} is excluded: {why}"))
    }
}

/// Reason why a get does not wait for a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum HopelessError {
    /// A peer that nothing replaces has wrong bytes.
    WrongBytes(LostShards),
    /// No peer came for a while, and the caller gave no deadline.
    NoDeadline(LostShards),
}

impl fmt::Display for HopelessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WrongBytes(lost) => write!(f, "{lost}"),
            Self::NoDeadline(lost) => {
                write!(f, "{lost}; no deadline was given: with one, the call waits until then")
            }
        }
    }
}

impl std::error::Error for HopelessError {}

/// Consecutive queries that found shards without a peer, and what the last one found.
#[derive(Debug, Default, PartialEq, Eq)]
struct LossEvidence {
    times: u32,
    lost: Option<LostShards>,
}

impl LossEvidence {
    /// Judges the members of the object, as a query found them.
    ///
    /// # Errors
    /// The reason, when there is no peer for some shards and the get does not wait for any; one that is `patient` does.
    fn judge(&mut self, found: &ObjectMembers, patient: bool) -> Result<(), HopelessError> {
        let times = std::mem::take(self).times;
        if found.lost == 0 {
            return Ok(());
        }
        // An origin with wrong bytes does not return with right ones; other peers may still hold the shard.
        let is_wrong = found.members.iter().any(|member| !member.excluded.is_empty() && (member.origin || !patient));
        let lost = LostShards::of(found);
        if is_wrong {
            return Err(HopelessError::WrongBytes(lost));
        }
        if !patient && times >= HOPELESS {
            return Err(HopelessError::NoDeadline(lost));
        }
        *self = Self { times: times + 1, lost: Some(lost) };
        Ok(())
    }
}

/// Reports of one get.
pub(super) struct Reports<'a> {
    catalog: &'a Catalog,
    keeper: &'a Keeper,
    replica: &'a Arc<Replica>,
    until: Instant,
    /// True if the caller gave a deadline, until which the get waits for peers.
    patient: bool,
    /// Time of the last arrival, or of the last query without one.
    progress: Instant,
    reported: Instant,
    evidence: LossEvidence,
}

impl<'a> Reports<'a> {
    /// Creates the reports of a get that begins now.
    pub(super) fn new(
        catalog: &'a Catalog,
        keeper: &'a Keeper,
        replica: &'a Arc<Replica>,
        until: Instant,
        patient: bool,
    ) -> Self {
        let now = Instant::now();
        Self {
            catalog,
            keeper,
            replica,
            until,
            patient,
            progress: now,
            reported: now,
            evidence: LossEvidence::default(),
        }
    }

    /// Reports until all shards are present.
    ///
    /// # Errors
    /// When no peer holds a shard, the deadline has passed, the control plane refuses a report, or the process is
    /// interrupted.
    pub(super) fn report_all(mut self) -> Result<(), Error> {
        loop {
            let news = self.replica.fetch.take_news(self.until, self.reported);
            let missing = news.missing;
            if Instant::now() >= self.until && missing > 0 {
                let why = match &self.evidence.lost {
                    None => "deadline exceeded",
                    Some(lost) => &format!("deadline exceeded; {lost}"),
                };
                return Err(self.given_up(missing, why, Status::DeadlineExceeded));
            }
            if missing > 0 && interrupt::ended() {
                return Err(Error::interrupted());
            }
            if news.got.is_empty() && news.failed.is_empty() {
                if missing == 0 {
                    return Ok(());
                }
                if self.progress.elapsed() > IDLE {
                    self.check_hope(missing)?;
                    self.progress = Instant::now();
                }
                continue;
            }
            if !news.got.is_empty() {
                (self.progress, self.evidence) = (Instant::now(), LossEvidence::default());
            }
            self.report(news)?;
            self.reported = Instant::now();
        }
    }

    fn report(&self, news: News) -> Result<(), Error> {
        let member = self.replica.member();
        match self.catalog.report(member, &news.got, news.failed.clone()) {
            Ok(()) => Ok(()),
            Err(error) if error.is_unanswered() => {
                self.replica.fetch.keep_news(news);
                interrupt::sleep(AWAY);
                Ok(())
            }
            // The new announcement covers all shards that are present.
            Err(error) if is_forgotten(&error) => match self.keeper.hold_again(self.replica, member) {
                Err(error) if !error.is_unanswered() && !is_forgotten(&error) => Err(error),
                _ => Ok(()),
            },
            Err(error) => Err(error),
        }
    }

    /// Queries for peers that hold the missing shards. Fails when there are none and the call does not wait for any.
    fn check_hope(&mut self, missing: u32) -> Result<(), Error> {
        let Ok(found) = self.catalog.describe(&self.replica.name, Some(self.replica.version)) else {
            // While the control plane does not answer, or has forgotten the object, there is hope.
            self.evidence = LossEvidence::default();
            return Ok(());
        };
        let judged = self.evidence.judge(&found, self.patient);
        judged.map_err(|why| self.given_up(missing, &why.to_string(), Status::NotFound))
    }

    fn given_up(&self, missing: u32, why: &str, status: Status) -> Error {
        let Replica { name, version, spec, .. } = &**self.replica;
        let shards = spec.layout.shards();
        let what = format!("object {name:?} version {version}: {missing} of {shards} shards are missing: {why}");
        Error::Status { what, status, cause: self.replica.fetch.trouble() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvplane_rpc::p2p::ObjectMember;

    fn member(origin: bool, excluded: &str) -> ObjectMember {
        ObjectMember { member: 1, segment: "s1".to_owned(), origin, have: 0, need: 0, excluded: excluded.to_owned() }
    }

    fn lost(members: Vec<ObjectMember>) -> ObjectMembers {
        ObjectMembers { members, lost: 2 }
    }

    #[test]
    fn shards_without_a_peer_are_waited_for_a_few_times_or_until_the_deadline() {
        let (mut evidence, found) = (LossEvidence::default(), lost(vec![member(true, "")]));
        for _ in 0..HOPELESS {
            assert_eq!(evidence.judge(&found, false), Ok(()));
        }
        let why = evidence.judge(&found, false).unwrap_err().to_string();
        assert!(why.starts_with("2 shards are held by no peer; no deadline was given"), "{why}");
        for times in 1..10 {
            assert_eq!(evidence.judge(&found, true), Ok(()));
            let lost = evidence.lost.as_ref().map(LostShards::to_string);
            assert_eq!((evidence.times, lost.as_deref()), (times, Some("2 shards are held by no peer")));
        }
        // A peer that returned is hope again.
        assert_eq!(evidence.judge(&ObjectMembers { members: Vec::new(), lost: 0 }, false), Ok(()));
        assert_eq!(evidence, LossEvidence::default());
    }

    #[test]
    fn wrong_bytes_of_an_origin_are_not_waited_for() {
        let wrong = |origin, patient| {
            let judged = LossEvidence::default().judge(&lost(vec![member(origin, "wrong bytes")]), patient);
            judged.map_err(|why| why.to_string())
        };
        let why = "2 shards are held by no peer; s1 is excluded: wrong bytes".to_owned();
        assert_eq!((wrong(true, true), wrong(true, false)), (Err(why.clone()), Err(why.clone())));
        assert_eq!((wrong(false, true), wrong(false, false)), (Ok(()), Err(why)));
    }
}
