//! Sessions: conversations whose next turn is expected, and the claims of these on caches.
//!
//! When the last open turn of a session ends, the instance that prefilled it holds the beginning of the next prompt.
//! The session *claims* these tokens there until the next turn arrives, or until nine of ten sessions would have come
//! back: the think times are learned. A prompt of another request that would evict claimed blocks costs more there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::request::Request;
use super::sizes::SizeWindow;
use crate::index::ContextId;

/// Maximum number of sessions of a pool; a further one takes the place of the one that ended first.
const MOST_SESSIONS: usize = 65_536;
/// Think times that count, and those before which [`UNKNOWN_NS`] counts instead.
const WINDOW: usize = 256;
const LEAST: usize = 16;
/// Duration of a claim before think times are known.
const UNKNOWN_NS: u64 = 60_000_000_000;
/// Least and greatest duration of a claim.
const CLAIM_NS: (u64, u64) = (1_000_000_000, 600_000_000_000);
/// Quantile of the think times after which a claim ends.
const RETURNED: f64 = 0.9;
/// Time after its last turn after which a session is forgotten: until then a turn still tells a think time.
const FORGET_NS: u64 = 1_800_000_000_000;
/// Gain of the moving average of the fraction of sessions that come back.
const FOLLOW: f64 = 0.02;

type SessionKey = (ContextId, Arc<str>);

/// Claim of a session on the cache of an instance.
#[derive(Clone, Copy, Debug)]
struct Claim {
    instance: usize,
    tokens: u64,
    until_ns: u64,
}

/// State of a session.
#[derive(Clone, Debug, Default)]
struct Session {
    /// Turns that were placed or queued and have not ended.
    open: u32,
    /// Claim since its last turn ended, on the instance that prefilled it.
    claim: Option<Claim>,
    /// Instance that prefilled its last turn.
    served_by: Option<usize>,
    /// Time at which its last turn ended; none while one is open, or before the first.
    ended_ns: Option<u64>,
}

impl Session {
    /// Returns the time at which something about it ends without a call.
    fn due_ns(&self) -> Option<u64> {
        let forgotten_ns = self.ended_ns?.saturating_add(FORGET_NS);
        Some(self.claim.map_or(forgotten_ns, |claim| claim.until_ns.min(forgotten_ns)))
    }
}

/// Sessions of one pool.
pub(super) struct Sessions {
    all: BTreeMap<SessionKey, Session>,
    /// Sessions without an open turn, by [`Session::due_ns`].
    due: BTreeSet<(u64, SessionKey)>,
    /// Tokens that are claimed at each prefill instance, by number.
    claimed: Vec<u64>,
    /// Number of claims.
    claims: usize,
    /// Think times in milliseconds.
    thinks: SizeWindow,
    /// Fraction of the sessions whose turn ended that come back.
    returning: f64,
}

impl Sessions {
    pub(super) const fn new() -> Self {
        Self {
            all: BTreeMap::new(),
            due: BTreeSet::new(),
            claimed: Vec::new(),
            claims: 0,
            thinks: SizeWindow::of(WINDOW),
            returning: 0.5,
        }
    }

    /// Returns the number of sessions whose next turn is expected.
    pub(super) const fn expected(&self) -> usize {
        self.claims
    }

    /// Returns the tokens of an instance that other sessions than the request's are expected to use again.
    pub(super) fn claimed_tokens(&self, instance: usize, request: &Request) -> u64 {
        let all = self.claimed.get(instance).copied().unwrap_or(0);
        let own = self.of(request).and_then(|session| session.claim).filter(|claim| claim.instance == instance);
        ((all - own.map_or(0, |claim| claim.tokens)) as f64 * self.returning) as u64
    }

    /// Returns the instance that prefilled the last turn of a request's session.
    pub(super) fn served_by(&self, request: &Request) -> Option<usize> {
        self.of(request)?.served_by
    }

    fn of(&self, request: &Request) -> Option<&Session> {
        self.all.get(&key_of(request)?)
    }

    /// Notes that a turn arrived: its session is not expected while the turn is open.
    pub(super) fn begin(&mut self, request: &Request, now_ns: u64) {
        let Some(key) = key_of(request) else { return };
        if !self.all.contains_key(&key) && self.all.len() >= MOST_SESSIONS {
            let Some((_, first)) = self.due.first().cloned() else { return };
            self.take(&first);
        }
        let mut session = self.take(&key).unwrap_or_default();
        if let Some(ended_ns) = session.ended_ns.take() {
            self.thinks.add(now_ns.saturating_sub(ended_ns) / 1_000_000);
            self.returning += FOLLOW * (1.0 - self.returning);
        }
        session.claim = None;
        session.open += 1;
        self.put(key, session);
    }

    /// Notes that a turn ended; `served` is the instance that prefilled it and the tokens that its blocks have, if it
    /// was prefilled. After the last open one the next is expected.
    pub(super) fn end(&mut self, request: &Request, served: Option<(usize, u64)>, now_ns: u64) {
        let Some(key) = key_of(request) else { return };
        // A session beyond the maximum is not known.
        let Some(mut session) = self.take(&key) else { return };
        session.open = session.open.saturating_sub(1);
        if let Some((instance, _)) = served {
            session.served_by = Some(instance);
        }
        if session.open == 0 {
            if session.served_by.is_none() {
                return;
            }
            let until_ns = now_ns.saturating_add(self.claim_ns());
            session.claim = served.map(|(instance, tokens)| Claim { instance, tokens, until_ns });
            session.ended_ns = Some(now_ns);
        }
        self.put(key, session);
    }

    /// Notes that a turn is withdrawn, to be scheduled again: it begins anew then. A session without another open turn
    /// is forgotten until then.
    pub(super) fn withdraw(&mut self, request: &Request) {
        let Some(key) = key_of(request) else { return };
        let Some(session) = self.take(&key).filter(|session| session.open > 1) else { return };
        self.put(key, Session { open: session.open - 1, ..session });
    }

    /// Returns how long the next turn of a session is expected.
    fn claim_ns(&self) -> u64 {
        let known = Some(&self.thinks).filter(|thinks| thinks.len() >= LEAST);
        let learned_ns = known.and_then(|thinks| thinks.quantile(RETURNED)).map(|ms| ms.saturating_mul(1_000_000));
        learned_ns.unwrap_or(UNKNOWN_NS).clamp(CLAIM_NS.0, CLAIM_NS.1)
    }

    /// Ends claims, and forgets sessions, whose time is over.
    pub(super) fn expire(&mut self, now_ns: u64) {
        while self.due.first().is_some_and(|(due_ns, _)| *due_ns <= now_ns) {
            let Some((_, key)) = self.due.first().cloned() else { break };
            let Some(mut session) = self.take(&key) else { break };
            if session.ended_ns.is_some_and(|ended_ns| ended_ns.saturating_add(FORGET_NS) <= now_ns) {
                self.returning -= FOLLOW * self.returning;
                continue;
            }
            session.claim = None;
            self.put(key, session);
        }
    }

    /// Ends the claims on an instance that is gone.
    pub(super) fn lose(&mut self, instance: usize) {
        let lost = self.all.iter().filter(|(_, session)| session.served_by == Some(instance));
        let lost: Vec<SessionKey> = lost.map(|(key, _)| key.clone()).collect();
        for key in lost {
            let Some(session) = self.take(&key) else { continue };
            self.put(key, Session { claim: None, served_by: None, ..session });
        }
    }

    /// Removes a session with its claim and its due time.
    fn take(&mut self, key: &SessionKey) -> Option<Session> {
        let session = self.all.remove(key)?;
        if let Some(due_ns) = session.due_ns() {
            self.due.remove(&(due_ns, key.clone()));
        }
        if let Some(claim) = session.claim {
            self.claimed[claim.instance] -= claim.tokens;
            self.claims -= 1;
        }
        Some(session)
    }

    /// Enters a session with its claim and its due time.
    fn put(&mut self, key: SessionKey, session: Session) {
        if let Some(due_ns) = session.due_ns() {
            self.due.insert((due_ns, key.clone()));
        }
        if let Some(claim) = session.claim {
            self.claimed.resize(self.claimed.len().max(claim.instance + 1), 0);
            self.claimed[claim.instance] += claim.tokens;
            self.claims += 1;
        }
        self.all.insert(key, session);
    }
}

fn key_of(request: &Request) -> Option<SessionKey> {
    Some((request.context, Arc::clone(request.terms.session.as_ref()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{IndexConfig, PrefixIndex, PromptContext};
    use crate::scheduler::{ExcludedInstances, ServiceTerms};

    const SECOND: u64 = 1_000_000_000;

    fn turn(session: &str) -> Request {
        let config = IndexConfig { max_blocks: 16, max_records: 16, max_holders: 2, ..IndexConfig::default() };
        let context = PrefixIndex::new(config).and_then(|mut index| index.context(&PromptContext::default()));
        Request {
            id: 1,
            arrival_ns: 0,
            tokens: 100,
            context: context.expect("the first context"),
            hashes: Arc::from([]),
            barred: ExcludedInstances::default(),
            admitted: false,
            terms: ServiceTerms { session: Some(session.into()), ..ServiceTerms::default() },
        }
    }

    #[test]
    fn claim_lasts_until_the_next_turn_or_its_time_is_over() {
        let (mut sessions, one, other) = (Sessions::new(), turn("a"), turn("b"));
        sessions.begin(&one, 0);
        assert_eq!(sessions.expected(), 0);
        sessions.end(&one, Some((3, 1_000)), SECOND);
        assert_eq!((sessions.expected(), sessions.served_by(&one)), (1, Some(3)));
        assert_eq!(sessions.claimed_tokens(3, &other), 500, "half of the sessions come back, as far as is known");
        assert_eq!((sessions.claimed_tokens(3, &one), sessions.claimed_tokens(2, &other)), (0, 0));
        sessions.begin(&one, 5 * SECOND);
        assert_eq!((sessions.expected(), sessions.claimed_tokens(3, &other)), (0, 0));
        sessions.end(&one, Some((2, 2_000)), 6 * SECOND);
        sessions.expire(6 * SECOND + UNKNOWN_NS);
        assert_eq!((sessions.expected(), sessions.served_by(&one)), (0, Some(2)), "still known, not expected");
        sessions.expire(6 * SECOND + FORGET_NS);
        assert!(sessions.all.is_empty() && sessions.due.is_empty());
    }

    #[test]
    fn think_times_are_learned() {
        let (mut sessions, one) = (Sessions::new(), turn("a"));
        for at in 0..40 {
            sessions.begin(&one, at * 10 * SECOND);
            sessions.end(&one, Some((0, 10)), at * 10 * SECOND + 3 * SECOND);
        }
        assert_eq!(sessions.claim_ns(), 7 * SECOND);
        assert!(sessions.returning > 0.7);
    }

    #[test]
    fn two_open_turns_are_one_session_and_a_turn_that_is_not_prefilled_claims_nothing() {
        let (mut sessions, one) = (Sessions::new(), turn("a"));
        sessions.begin(&one, 0);
        sessions.begin(&one, 0);
        sessions.end(&one, Some((0, 10)), SECOND);
        assert_eq!(sessions.expected(), 0, "one turn is open");
        sessions.end(&one, Some((1, 20)), 2 * SECOND);
        assert_eq!((sessions.expected(), sessions.served_by(&one)), (1, Some(1)));
        sessions.begin(&one, 3 * SECOND);
        sessions.end(&one, None, 4 * SECOND);
        assert_eq!((sessions.expected(), sessions.served_by(&one)), (0, Some(1)));
        // An end too many is ignored.
        sessions.end(&one, None, 4 * SECOND);
        let never = turn("never placed");
        sessions.begin(&never, 0);
        sessions.end(&never, None, 0);
        assert!(sessions.of(&never).is_none());
        sessions.lose(1);
        assert_eq!((sessions.served_by(&one), sessions.claimed_tokens(1, &never)), (None, 0));
    }

    #[test]
    fn sessions_are_bounded() {
        let mut sessions = Sessions::new();
        let mut request = turn("");
        for at in 0..MOST_SESSIONS as u64 + 10 {
            request.terms.session = Some(format!("s{at}").into());
            sessions.begin(&request, at);
            sessions.end(&request, Some((0, 1)), at);
        }
        assert_eq!(
            (sessions.all.len(), sessions.due.len(), sessions.expected()),
            (MOST_SESSIONS, MOST_SESSIONS, MOST_SESSIONS)
        );
        request.terms.session = Some("s0".into());
        assert!(sessions.of(&request).is_none(), "the oldest were forgotten");
    }
}
