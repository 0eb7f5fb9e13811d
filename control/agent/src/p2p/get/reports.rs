//! Reports of a get: the caller's thread reports the outcomes of orders to the catalog, and decides when the get fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::Status;
use kvplane_rpc::p2p::ObjectMembers;
use kvplane_sys::interrupt;

use crate::error::Error;
use crate::p2p::catalog::{Catalog, is_away, is_forgotten};
use crate::p2p::replica::{News, Replica};
use crate::p2p::replicas::Keeper;

/// Time without progress after which the control plane is queried for peers that hold the missing shards.
const IDLE: Duration = Duration::from_secs(3);
/// Consecutive queries without such a peer after which a get without a deadline fails: 12 s with the first.
const HOPELESS: u32 = 3;
/// Backoff after the control plane did not answer.
const AWAY: Duration = Duration::from_millis(200);

/// Consecutive queries that found shards without a peer, and the reason as reported then.
#[derive(Debug, Default, PartialEq, Eq)]
struct LossEvidence {
    times: u32,
    why: String,
}

impl LossEvidence {
    /// Judges the members of the object, as a query found them.
    ///
    /// # Errors
    /// The reason, when there is no peer for some shards and the get does not wait for any; one that is `patient` does.
    fn judge(&mut self, found: &ObjectMembers, patient: bool) -> Result<(), String> {
        let times = std::mem::take(self).times;
        if found.lost == 0 {
            return Ok(());
        }
        // An origin with wrong bytes does not return with right ones; other peers may still hold the shard.
        let is_wrong = found.members.iter().any(|member| !member.excluded.is_empty() && (member.origin || !patient));
        let excluded = found.members.iter().filter(|member| !member.excluded.is_empty());
        let wrong: Vec<String> =
            excluded.map(|member| format!("{} is excluded: {}", member.segment, member.excluded)).collect();
        let why = format!("{} shards are held by no peer; {}", found.lost, wrong.join("; "));
        let why = why.trim_end_matches("; ").to_owned();
        if !is_wrong && (patient || times < HOPELESS) {
            *self = Self { times: times + 1, why };
            return Ok(());
        }
        let advice = if is_wrong { "" } else { "; no deadline was given: with one, the call waits until then" };
        Err(format!("{why}{advice}"))
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
                let why = if self.evidence.why.is_empty() {
                    "deadline exceeded"
                } else {
                    &format!("deadline exceeded; {}", self.evidence.why)
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
            Err(error) if is_away(&error) => {
                self.replica.fetch.keep_news(news);
                interrupt::sleep(AWAY);
                Ok(())
            }
            // The new announcement covers all shards that are present.
            Err(error) if is_forgotten(&error) => match self.keeper.hold_again(self.replica, member) {
                Err(error) if !is_away(&error) && !is_forgotten(&error) => Err(error),
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
        judged.map_err(|why| self.given_up(missing, &why, Status::NotFound))
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
        let why = evidence.judge(&found, false).unwrap_err();
        assert!(why.starts_with("2 shards are held by no peer; no deadline was given"), "{why}");
        for times in 1..10 {
            assert_eq!(evidence.judge(&found, true), Ok(()));
            assert_eq!(evidence, LossEvidence { times, why: "2 shards are held by no peer".to_owned() });
        }
        // A peer that returned is hope again.
        assert_eq!(evidence.judge(&ObjectMembers { members: Vec::new(), lost: 0 }, false), Ok(()));
        assert_eq!(evidence, LossEvidence::default());
    }

    #[test]
    fn wrong_bytes_of_an_origin_are_not_waited_for() {
        let wrong =
            |origin, patient| LossEvidence::default().judge(&lost(vec![member(origin, "wrong bytes")]), patient);
        let why = "2 shards are held by no peer; s1 is excluded: wrong bytes".to_owned();
        assert_eq!((wrong(true, true), wrong(true, false)), (Err(why.clone()), Err(why.clone())));
        assert_eq!((wrong(false, true), wrong(false, false)), (Ok(()), Err(why)));
    }
}
