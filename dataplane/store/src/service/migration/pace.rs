//! Pacing of background fetches: objects and bytes in flight, and bytes a second.

use crate::service::fetches::FetchLimits;

/// Fetches in flight and their limits.
#[derive(Debug, Default)]
pub(super) struct Pace {
    pub(super) limits: FetchLimits,
    /// Objects being fetched in the background, and their bytes.
    objects: usize,
    bytes: u64,
    /// Bytes that may be fetched, as of `allowed_ns`; below 0 after a larger object.
    allowance_bytes: i64,
    allowed_ns: u64,
}

impl Pace {
    /// Advances the allowance to the current time.
    pub(super) fn allow(&mut self, now_ns: u64) {
        let rate = self.limits.bytes_per_s;
        let passed_ns = now_ns.saturating_sub(self.allowed_ns);
        let more = u128::from(passed_ns) * u128::from(rate) / 1_000_000_000;
        if more > 0 {
            // Unused allowance is not kept for longer than 50 ms.
            let most = i64::try_from(rate / 20).unwrap_or(i64::MAX).max(1);
            let sum = i128::from(self.allowance_bytes) + i128::try_from(more).unwrap_or(i128::MAX / 2);
            self.allowance_bytes = i64::try_from(sum).unwrap_or(i64::MAX).min(most);
            self.allowed_ns = now_ns;
        }
    }

    /// Returns true if another object may be fetched now.
    pub(super) const fn has_room(&self) -> bool {
        let full = self.objects >= self.limits.objects || self.bytes >= self.limits.bytes;
        !full && self.allowance_bytes > 0
    }

    /// Returns the time at which another object may be fetched, if the rate does not allow one yet.
    pub(super) fn next_ns(&self) -> Option<u64> {
        let rate = self.limits.bytes_per_s;
        let debt = u64::try_from(1 - self.allowance_bytes).unwrap_or(0);
        (debt > 0 && rate > 0).then(|| self.allowed_ns.saturating_add(debt.saturating_mul(1_000_000_000) / rate + 1))
    }

    /// Counts an object of this length as being fetched.
    pub(super) fn begin(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
        self.allowance_bytes = self.allowance_bytes.saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// Counts the fetch of an object as ended.
    pub(super) const fn end(&mut self, bytes: u64) {
        self.objects -= 1;
        self.bytes -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fetches_keep_to_the_rate() {
        let limits = FetchLimits { bytes_per_s: 1000, objects: 2, bytes: 1 << 20, hot_bytes_per_s: 0 };
        let mut pace = Pace { limits, ..Pace::default() };
        pace.allow(10_000_000_000);
        assert!(pace.has_room());
        pace.begin(250);
        assert!(!pace.has_room(), "a twentieth of a second's bytes is all that was kept");
        let next_ns = pace.next_ns().expect("it has a rate");
        pace.allow(next_ns - 10_000_000);
        assert!(!pace.has_room());
        pace.allow(next_ns);
        assert!(pace.has_room());
        pace.begin(1);
        pace.allow(2 * next_ns);
        assert!(!pace.has_room(), "two at a time");
        pace.end(250);
        assert!(pace.has_room());
    }
}
