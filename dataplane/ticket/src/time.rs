//! The time that tickets go by: seconds that only ever grow, whatever the clocks of hosts do.
//!
//! A control plane's [`TicketTime`] begins at what was made durable of it, and goes on with the monotonic clock of the
//! host. The host's wall clock gives the first value of all and is never looked at again, so neither a jump of it nor
//! another control plane whose clock differs moves the time. Values are reserved ahead: none is told beyond what is
//! durable, so the time of a restart, or of the next leader, begins after every value that was ever told.
//!
//! Who checks tickets has a [`HeardTime`]: it follows what an authenticated control plane tells it, and its own
//! monotonic clock in between. A control plane that lost its state may tell any other time. Then another [`TimeLine`]
//! begins for the keys that it gives, and the keys that were known before keep theirs: neither is a ticket that was
//! made just now taken for one that has ended, nor do older ones end before their time or last longer.

/// Nanoseconds of a second.
const SECOND_NS: u64 = 1_000_000_000;
/// How long the control plane's time runs on where it is not heard, in nanoseconds.
pub const UNHEARD_NS: u64 = 30 * SECOND_NS;
/// How long a ticket counts after its end, in seconds: time for a newer one to arrive.
pub const GRACE_S: u64 = 30;
// What was good when the control plane was last heard is good until it is heard again.
const _: () = assert!(UNHEARD_NS <= GRACE_S * SECOND_NS);
/// Least and most seconds that are reserved ahead.
const RESERVE_S: (u64, u64) = (2, 60);

/// The ticket time of a control plane. Its arguments `now_ns` are of a monotonic clock, with any beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TicketTime {
    /// The value at the beginning, in seconds.
    began_s: u64,
    /// The monotonic clock then, in nanoseconds.
    began_ns: u64,
    /// No value beyond this one is told: what is durable.
    reserved_s: u64,
    /// How many seconds are reserved at a time.
    reserve_s: u64,
    /// How many are left when more are wanted: half of it, or none where every value may be told.
    wanted_s: u64,
}

impl TicketTime {
    /// Goes on from the value that was made durable last. Where there is none, the time begins with `host_s`, the
    /// seconds of the host's wall clock, which earlier versions went by. Of a ticket's `lifetime_s` a tenth is reserved
    /// ahead, so that a restart takes no more of it. Nothing is reserved yet: see [`Self::reserve`].
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

    /// A time that ends with its process: nothing is kept of it, and nothing has to be durable.
    #[must_use]
    pub const fn passing(host_s: u64, now_ns: u64) -> Self {
        Self { began_s: host_s, began_ns: now_ns, reserved_s: u64::MAX, reserve_s: 0, wanted_s: 0 }
    }

    const fn elapsed_s(&self, now_ns: u64) -> u64 {
        self.began_s.saturating_add(now_ns.saturating_sub(self.began_ns) / SECOND_NS)
    }

    /// The time in seconds. It stands at the last value that is durable until more are.
    #[must_use]
    pub const fn now(&self, now_ns: u64) -> u64 {
        let now_s = self.elapsed_s(now_ns);
        if now_s < self.reserved_s { now_s } else { self.reserved_s }
    }

    /// The value that is to be made durable now, if any: [`Self::reserve`] it when it is.
    #[must_use]
    pub const fn wanted(&self, now_ns: u64) -> Option<u64> {
        let now_s = self.elapsed_s(now_ns);
        if self.reserved_s == u64::MAX || now_s.saturating_add(self.wanted_s) < self.reserved_s {
            return None;
        }
        Some(now_s.saturating_add(self.reserve_s))
    }

    /// Values up to this one, in seconds, are durable: they may be told.
    pub const fn reserve(&mut self, reserved_s: u64) {
        if reserved_s > self.reserved_s {
            self.reserved_s = reserved_s;
        }
    }
}

/// The time line of a key: by how much it is behind the time of who checks, in seconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TimeLine(i64);

impl TimeLine {
    /// The line on which these two are the same moment.
    fn of(line_s: u64, local_s: u64) -> Self {
        let behind = i128::from(local_s) - i128::from(line_s);
        Self(behind.clamp(i64::MIN.into(), i64::MAX.into()) as i64)
    }

    /// A value of this line, by the time of who checks.
    #[must_use]
    pub const fn local(self, line_s: u64) -> u64 {
        line_s.saturating_add_signed(self.0)
    }
}

/// The ticket time as who checks tickets knows it. Its arguments `now_ns` are of a monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeardTime {
    /// The time in seconds, and when it was heard; none before the first.
    heard: Option<(u64, u64)>,
}

impl HeardTime {
    /// The time in seconds; 0 before it was first heard. While nothing is heard, it stands still a little later: who
    /// hears nothing either cannot renew a ticket.
    #[must_use]
    pub fn now(&self, now_ns: u64) -> u64 {
        let Some((seconds, at_ns)) = self.heard else { return 0 };
        seconds.saturating_add(now_ns.saturating_sub(at_ns).min(UNHEARD_NS) / SECOND_NS)
    }

    /// A control plane tells its time, in seconds, with keys of which some were `known` on a line. On which line those
    /// keys are now.
    ///
    /// Keys that were known go on as they did, and the time with them. Another line begins with keys of which none was
    /// known, for those are of a control plane without the state of the one before. So it does where known keys come
    /// with a time that is behind by more than a ticket's grace: monotonic clocks, and the time that runs on unheard,
    /// do not come apart that far.
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
