//! Ledger of the ranges of a shard's pool that are in use, as seen from outside the store: written for a put, or read
//! for a get.
//!
//! The store keeps its own accounts; this ledger knows only what the shard granted to its peers and how the hosts
//! really used the memory. A range that is written must overlap no other; a range that is read may overlap other read
//! ranges.

use super::{CheckResult, Rule, Violation, broken};

/// Purpose of a lent range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    Read,
    Write,
}

#[derive(Clone, Copy, Debug)]
struct Loan {
    connection: u32,
    usage: Use,
    offset: u64,
    bytes: u64,
}

/// Lent ranges of one pool.
#[derive(Default)]
pub(crate) struct Ledger {
    loans: Vec<Loan>,
}

impl Ledger {
    pub(crate) fn lend(&mut self, connection: u32, usage: Use, offset: u64, bytes: u64) -> CheckResult {
        let end = offset + bytes;
        let clash = self.loans.iter().find(|loan| {
            (usage == Use::Write || loan.usage == Use::Write) && loan.offset < end && offset < loan.offset + loan.bytes
        });
        if let Some(loan) = clash {
            let what = format!("{offset}+{bytes} is lent to connection {connection} for {usage:?} but is {loan:?}");
            return Err(broken(Rule::Ledger, what));
        }
        self.loans.push(Loan { connection, usage, offset, bytes });
        Ok(())
    }

    /// Ends one loan.
    pub(crate) fn end(&mut self, connection: u32, usage: Use, offset: u64) {
        let same = |loan: &Loan| loan.connection == connection && loan.usage == usage && loan.offset == offset;
        if let Some(position) = self.loans.iter().position(same) {
            self.loans.swap_remove(position);
        }
    }

    /// Ends all loans of a connection.
    pub(crate) fn end_all(&mut self, connection: u32) {
        self.loans.retain(|loan| loan.connection != connection);
    }

    /// Checks that a connection may use a range in this way now.
    pub(crate) fn check(&self, connection: u32, usage: Use, offset: u64, bytes: u64) -> CheckResult {
        let covers = |loan: &Loan| {
            loan.connection == connection
                && loan.usage == usage
                && loan.offset <= offset
                && offset + bytes <= loan.offset + loan.bytes
        };
        if self.loans.iter().any(covers) { Ok(()) } else { Err(not_lent(connection, usage, offset, bytes)) }
    }

    /// Checks that no peer reads or writes a range in which the shard itself writes.
    pub(crate) fn is_free(&self, offset: u64, bytes: u64) -> CheckResult {
        let end = offset + bytes;
        match self.loans.iter().find(|loan| loan.offset < end && offset < loan.offset + loan.bytes) {
            Some(loan) => {
                Err(broken(Rule::Ledger, format!("a tail is written to {offset}+{bytes}, which is {loan:?}")))
            }
            None => Ok(()),
        }
    }

    /// Checks that no peer uses either place of bytes that the shard moves.
    pub(crate) fn may_move(&self, from: u64, to: u64, bytes: u64) -> CheckResult {
        let is_in = |loan: &Loan, at: u64| loan.offset < at + bytes && at < loan.offset + loan.bytes;
        match self.loans.iter().find(|loan| is_in(loan, from) || is_in(loan, to)) {
            Some(loan) => {
                Err(broken(Rule::Ledger, format!("{bytes} bytes move from {from} to {to}, which is {loan:?}")))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.loans.len()
    }
}

fn not_lent(connection: u32, usage: Use, offset: u64, bytes: u64) -> Violation {
    broken(Rule::Ledger, format!("connection {connection}: {usage:?} of {offset}+{bytes}, which it was not lent"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_excludes_all_others_and_readers_only_writers() {
        let mut ledger = Ledger::default();
        ledger.lend(1, Use::Read, 0, 100).unwrap();
        ledger.lend(2, Use::Read, 50, 100).unwrap();
        assert!(ledger.lend(3, Use::Write, 149, 1).is_err());
        ledger.lend(3, Use::Write, 150, 10).unwrap();
        assert!(ledger.lend(1, Use::Read, 159, 1).is_err());
        assert!(ledger.check(3, Use::Write, 150, 10).is_ok());
        assert!(ledger.check(3, Use::Write, 150, 11).is_err());
        assert!(ledger.check(2, Use::Write, 150, 10).is_err());
        ledger.end(3, Use::Write, 150);
        assert!(ledger.check(3, Use::Write, 150, 10).is_err());
        ledger.end_all(1);
        ledger.end_all(2);
        assert_eq!(ledger.len(), 0);
    }
}
