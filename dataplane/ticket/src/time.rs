//! Ticket time, by which tickets are valid: seconds that only grow, whatever the clocks of hosts do.
//!
//! A control plane's [`TicketTime`] begins at its last durable value, and continues with the monotonic clock of the
//! host. The host's wall clock gives the very first value and is never read again, so the time is moved neither by a
//! jump of the wall clock nor by a takeover on a host whose clock differs. Values are reserved ahead: no value beyond
//! the durable one is ever published, so the time after a restart, or of the next leader, begins after every value that
//! was published.
//!
//! A verifier of tickets has a [`HeardTime`]: it follows the time that an authenticated control plane publishes, and
//! its own monotonic clock in between. A control plane that lost its state may publish any other time. Then another
//! [`TimeLine`] begins for the keys that it publishes, and the keys known before keep theirs. So a ticket that was just
//! issued is not taken for an expired one, and older tickets expire neither early nor late.

/// Nanoseconds in a second.
const SECOND_NS: u64 = 1_000_000_000;
/// Time for which a verifier's ticket time runs on without news from the control plane, in nanoseconds.
pub const UNHEARD_NS: u64 = 30 * SECOND_NS;
/// Grace period: time for which a ticket is accepted after its expiry, in seconds, so that a newer one can arrive.
pub const GRACE_S: u64 = 30;
// A ticket that was valid when the control plane was last heard from is valid until it is heard from again.
const _: () = assert!(UNHEARD_NS <= GRACE_S * SECOND_NS);
/// Least and most seconds that are reserved ahead.
const RESERVE_S: (u64, u64) = (2, 60);

/// Ticket time of a control plane. Its arguments `now_ns` are of a monotonic clock with any origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TicketTime {
    /// Value at the beginning, in seconds.
    began_s: u64,
    /// Monotonic clock at the beginning, in nanoseconds.
    began_ns: u64,
    /// Greatest durable value, in seconds: no greater one is published.
    reserved_s: u64,
    /// Seconds that are reserved at a time.
    reserve_s: u64,
    /// Reserved seconds left at which more are reserved: half of `reserve_s`, or 0 if every value may be published.
    wanted_s: u64,
}

impl TicketTime {
    /// Continues from the last durable value. If there is none, the time begins with `host_s`, the seconds of the
    /// host's wall clock, which earlier versions used. A tenth of a ticket's `lifetime_s` is reserved ahead, so a
    /// restart skips no more of it. No value is reserved yet: see [`Self::reserve`].
    #[must_use]
    pub const fn begin(durable_s: Option<u64>, host_s: u64, lifetime_s: u64, now_ns: u64) -> Self {
        let began_s = match durable_s {
            Some(durable_s) => durable_s,
            None => host_s,
        };
        let tenth = lifetime_s / 10;
        let reserve_s = if tenth < RESERVE_S.0 {
            RESERVE_S.0
        } else if tenth > RESERVE_S.1 {
            RESERVE_S.1
        } else {
            tenth
        };
        Self { began_s, began_ns: now_ns, reserved_s: began_s, reserve_s, wanted_s: reserve_s / 2 }
    }

    /// Creates a time that ends with its process: it is not kept, so no value has to be durable.
    #[must_use]
    pub const fn passing(host_s: u64, now_ns: u64) -> Self {
        Self { began_s: host_s, began_ns: now_ns, reserved_s: u64::MAX, reserve_s: 0, wanted_s: 0 }
    }

    const fn elapsed_s(&self, now_ns: u64) -> u64 {
        self.began_s.saturating_add(now_ns.saturating_sub(self.began_ns) / SECOND_NS)
    }

    /// Returns the time in seconds. It stops at the last durable value until more are reserved.
    #[must_use]
    pub const fn now(&self, now_ns: u64) -> u64 {
        let now_s = self.elapsed_s(now_ns);
        if now_s < self.reserved_s { now_s } else { self.reserved_s }
    }

    /// Returns the value that has to be made durable now, if any, before the caller passes it to [`Self::reserve`].
    #[must_use]
    pub const fn wanted(&self, now_ns: u64) -> Option<u64> {
        let now_s = self.elapsed_s(now_ns);
        if self.reserved_s == u64::MAX || now_s.saturating_add(self.wanted_s) < self.reserved_s {
            return None;
        }
        Some(now_s.saturating_add(self.reserve_s))
    }

    /// Reports that values up to this one, in seconds, are durable and may be published.
    pub const fn reserve(&mut self, reserved_s: u64) {
        if reserved_s > self.reserved_s {
            self.reserved_s = reserved_s;
        }
    }
}

/// Time line of a key: seconds by which it is behind the verifier's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TimeLine(i64);

impl TimeLine {
    /// Returns the time line on which these two values are the same moment.
    fn of(line_s: u64, local_s: u64) -> Self {
        let behind = i128::from(local_s) - i128::from(line_s);
        Self(behind.clamp(i64::MIN.into(), i64::MAX.into()) as i64)
    }

    /// Converts a value of this time line to the verifier's time.
    #[must_use]
    pub const fn local(self, line_s: u64) -> u64 {
        line_s.saturating_add_signed(self.0)
    }
}

/// Ticket time as a verifier of tickets knows it. Its arguments `now_ns` are of a monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeardTime {
    /// Time in seconds, and the monotonic clock at which it was received; `None` before the first.
    heard: Option<(u64, u64)>,
}

impl HeardTime {
    /// Returns the time in seconds; 0 before it was first received. Without news from the control plane it stops after
    /// [`UNHEARD_NS`]: a client that cannot reach the control plane either cannot renew its ticket.
    #[must_use]
    pub fn now(&self, now_ns: u64) -> u64 {
        let Some((seconds, at_ns)) = self.heard else { return 0 };
        seconds.saturating_add(now_ns.saturating_sub(at_ns).min(UNHEARD_NS) / SECOND_NS)
    }

    /// Follows a control plane that publishes its time, in seconds, with keys of which some were `known` on a time
    /// line. Returns the time line of those keys.
    ///
    /// Known keys stay on their time line, and so does the time. Another time line begins with keys of which none was
    /// known, because those are of a control plane without the state of the one before. Another time line also begins
    /// if known keys come with a time that is behind by more than the grace period of a ticket: monotonic clocks, and
    /// the time that runs on without news, do not diverge that far.
    pub fn hear(&mut self, told_s: u64, known: Option<TimeLine>, now_ns: u64) -> TimeLine {
        let now_s = self.now(now_ns);
        let goes_on = |line: &TimeLine| line.local(told_s).saturating_add(GRACE_S) >= now_s;
        let line = match (self.heard, known.filter(goes_on)) {
            (None, _) => TimeLine::default(),
            (Some(_), Some(line)) => line,
            (Some(_), None) => TimeLine::of(told_s, now_s),
        };
        self.heard = Some((line.local(told_s).max(now_s), now_ns));
        line
    }
}
