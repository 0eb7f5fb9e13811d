//! Credit-based flow control: limits the messages of each side so that every message finds a posted receive.
//!
//! Each side grants the other a number of receives when they connect. A consumed receive is returned by the next
//! message that is sent anyway, or by a credit message when half of the grant is owed. One credit is reserved for
//! credit messages. Thus the two sides never deadlock: the side that received the last message has a credit to answer
//! with.
//!
//! Pure: no I/O, no time.

/// Smallest grant with which both sides always make progress.
pub(in crate::rdma) const GRANT_LEAST: u16 = 4;

/// Credit state of both directions of one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) struct Credits {
    /// Receives that the peer granted us, in total.
    theirs: u16,
    /// Messages that we may send.
    available: u16,
    /// Receives that we granted the peer, in total.
    ours: u16,
    /// Received messages whose receives have not been reposted.
    held: u16,
    /// Reposted receives to return with the next message.
    owed: u16,
}

/// Violation of the credit protocol by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::rdma) struct CreditError;

impl Credits {
    /// Creates the state of a link for which we granted `ours` and the peer `theirs`, each at least [`GRANT_LEAST`].
    pub(in crate::rdma) const fn new(ours: u16, theirs: u16) -> Self {
        Self { theirs, available: theirs, ours, held: 0, owed: 0 }
    }

    /// Returns true if a message other than a credit message may be sent.
    pub(in crate::rdma) const fn may_send(&self) -> bool {
        self.available > 1
    }

    /// Returns true if a credit message is due because no other message carries the credits soon.
    pub(in crate::rdma) const fn must_return(&self) -> bool {
        self.owed >= self.ours / 2 && self.available > 0
    }

    /// Accounts for a sent message. Returns the credits that it carries.
    ///
    /// # Panics
    /// When no credit is available.
    pub(in crate::rdma) const fn send(&mut self) -> u16 {
        assert!(self.available > 0, "a message without a credit");
        self.available -= 1;
        core::mem::replace(&mut self.owed, 0)
    }

    /// Accounts for a received message and the credits that it carries.
    pub(in crate::rdma) fn arrived(&mut self, credits: u16) -> Result<(), CreditError> {
        let available = self.available.checked_add(credits).filter(|sum| *sum <= self.theirs);
        if self.held + self.owed >= self.ours {
            return Err(CreditError);
        }
        self.available = available.ok_or(CreditError)?;
        self.held += 1;
        Ok(())
    }

    /// Accounts for a received message whose receive is posted again.
    ///
    /// # Panics
    /// When no received message is held.
    pub(in crate::rdma) const fn reposted(&mut self) {
        assert!(self.held > 0, "a receive was posted again that was not taken");
        self.held -= 1;
        self.owed += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// One side, with the number of messages that it wants to send and of those received but not handled.
    struct Side {
        credits: Credits,
        wants: u32,
        inbox: u16,
        wire: VecDeque<u16>,
        sent: u32,
    }

    impl Side {
        fn new(ours: u16, theirs: u16, wants: u32) -> Self {
            Self { credits: Credits::new(ours, theirs), wants, inbox: 0, wire: VecDeque::new(), sent: 0 }
        }

        fn flush(&mut self) -> bool {
            let mut moved = false;
            while self.wants > 0 && self.credits.may_send() {
                let credits = self.credits.send();
                self.wire.push_back(credits);
                self.wants -= 1;
                self.sent += 1;
                moved = true;
            }
            if self.credits.must_return() {
                let credits = self.credits.send();
                self.wire.push_back(credits);
                moved = true;
            }
            moved
        }
    }

    /// Moves a message from one side's wire to the other side; returns false if there was none.
    fn arrive(from: &mut Side, to: &mut Side, posted: u16) -> bool {
        let Some(credits) = from.wire.pop_front() else { return false };
        assert!(to.inbox < posted, "a message without a receive");
        to.credits.arrived(credits).expect("a side that keeps the rules");
        to.inbox += 1;
        true
    }

    fn consume(side: &mut Side) -> bool {
        if side.inbox == 0 {
            return false;
        }
        side.inbox -= 1;
        side.credits.reposted();
        true
    }

    proptest! {
        #[test]
        fn every_message_finds_a_receive_and_all_arrive(
            (a_grant, b_grant) in (GRANT_LEAST..40, GRANT_LEAST..40),
            (a_wants, b_wants) in (0u32..300, 0u32..300),
            steps in proptest::collection::vec(0u8..6, 0..2000),
        ) {
            let (mut a, mut b) = (Side::new(a_grant, b_grant, a_wants), Side::new(b_grant, a_grant, b_wants));
            for step in steps {
                match step {
                    0 => { a.flush(); }
                    1 => { b.flush(); }
                    2 => { arrive(&mut a, &mut b, b_grant); }
                    3 => { arrive(&mut b, &mut a, a_grant); }
                    4 => { consume(&mut a); }
                    _ => { consume(&mut b); }
                }
            }
            // Whatever happened before, from here on everything is delivered, and then both sides are quiet.
            let mut rounds = 0;
            while [
                a.flush(), b.flush(), arrive(&mut a, &mut b, b_grant), arrive(&mut b, &mut a, a_grant),
                consume(&mut a), consume(&mut b),
            ].contains(&true) {
                rounds += 1;
                prop_assert!(rounds < 10_000, "credit messages do not end");
            }
            prop_assert_eq!((a.wants, b.wants), (0, 0));
            prop_assert_eq!((a.sent, b.sent), (a_wants, b_wants));
        }

        #[test]
        fn a_peer_that_violates_the_credit_protocol_is_detected(grant in GRANT_LEAST..40, credits in 1u16..100) {
            let mut side = Credits::new(grant, grant);
            prop_assert_eq!(side.arrived(credits), Err(CreditError), "credits for messages that were never sent");
            for _ in 0..grant {
                prop_assert_eq!(side.arrived(0), Ok(()));
            }
            prop_assert_eq!(side.arrived(0), Err(CreditError), "more messages than were granted");
        }
    }
}
