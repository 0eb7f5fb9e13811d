//! Probability of a promise.

use core::fmt;
use core::str::FromStr;

/// Probability with which an admitted request is to have its first token in time: from 50 % to 99.9 %, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Probability(u16);

impl Probability {
    /// Probability unless an operator sets another: 99 %.
    pub const DEFAULT: Self = Self(990);
    const LEAST_PERMILLE: u16 = 500;
    const MOST_PERMILLE: u16 = 999;

    /// Returns the probability of so many thousandths; `None` outside 500 to 999.
    #[must_use]
    pub const fn of_permille(permille: u16) -> Option<Self> {
        if permille >= Self::LEAST_PERMILLE && permille <= Self::MOST_PERMILLE { Some(Self(permille)) } else { None }
    }

    /// Returns the thousandths.
    #[must_use]
    pub const fn permille(self) -> u16 {
        self.0
    }

    /// Returns the probability as a part of one.
    #[must_use]
    pub fn share(self) -> f64 {
        f64::from(self.0) / 1000.0
    }
}

impl Default for Probability {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for Probability {
    /// Writes percent, with a tenth if it is not 0.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0 / 10, self.0 % 10) {
            (percent, 0) => write!(f, "{percent}"),
            (percent, tenths) => write!(f, "{percent}.{tenths}"),
        }
    }
}

/// Error of a text that is no [`Probability`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbabilityError {
    /// The text.
    pub text: String,
}

impl fmt::Display for ProbabilityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no percentage from 50 to 99.9 with at most one decimal", self.text)
    }
}

impl core::error::Error for ProbabilityError {}

impl FromStr for Probability {
    type Err = ProbabilityError;

    /// Parses percent, such as `99` or `99.5`.
    fn from_str(text: &str) -> Result<Self, ProbabilityError> {
        let (percent, tenths) = text.split_once('.').unwrap_or((text, "0"));
        let digits = |part: &str, most: usize| {
            let is_number = (1..=most).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit());
            part.parse::<u16>().ok().filter(|_| is_number)
        };
        let permille = digits(percent, 2).zip(digits(tenths, 1)).map(|(percent, tenths)| percent * 10 + tenths);
        permille.and_then(Self::of_permille).ok_or_else(|| ProbabilityError { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_parsed_and_written() {
        for (text, permille) in [("50", 500), ("99", 990), ("99.9", 999), ("95.0", 950)] {
            let parsed: Probability = text.parse().unwrap();
            assert_eq!(parsed.permille(), permille);
            assert_eq!(parsed.to_string().parse(), Ok(parsed));
        }
        assert_eq!((Probability::DEFAULT.to_string(), Probability(995).to_string()), ("99".into(), "99.5".into()));
        for text in ["", "49.9", "100", "99.95", "+99", "99.", ".9", "nan", "0.99", "-60", "99,5"] {
            let error = text.parse::<Probability>().unwrap_err().to_string();
            assert!(error.contains("50 to 99.9"), "{error}");
        }
        assert_eq!((Probability::of_permille(499), Probability::of_permille(1000)), (None, None));
    }
}
