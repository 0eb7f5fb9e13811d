//! Dates as S3 writes them.

use std::time::Duration;

/// Year, month, day, and seconds of the day.
fn date(since: Duration) -> (i64, u64, u64, u64) {
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Civil date from days: Howard Hinnant's algorithm, with years that begin in March.
    let shifted = days as i64 + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097) as u64;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era as i64 + era * 400 + i64::from(month <= 2);
    (year, month, day, seconds)
}

/// Returns a date of a list.
pub(crate) fn iso(since: Duration) -> String {
    let (year, month, day, seconds) = date(since);
    let millis = since.subsec_millis();
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Returns a date of a header.
pub(crate) fn http(since: Duration) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let (year, month, day, seconds) = date(since);
    let (weekday, name) = (DAYS[(since.as_secs() / 86_400 % 7) as usize], MONTHS[month as usize - 1]);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{weekday}, {day:02} {name} {year:04} {hour:02}:{minute:02}:{second:02} GMT")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = Duration::from_millis(1_709_210_096_789);
        assert_eq!(iso(at), "2024-02-29T12:34:56.789Z");
        assert_eq!(http(at), "Thu, 29 Feb 2024 12:34:56 GMT");
        assert_eq!(http(Duration::ZERO), "Thu, 01 Jan 1970 00:00:00 GMT");
    }
}
