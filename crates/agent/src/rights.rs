//! Which links of a peer may decide over a migration.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the offers of this agent.
static OFFERS: AtomicU64 = AtomicU64::new(0);

/// The number of an offer that is taken now.
pub fn next_offer() -> u64 {
    OFFERS.fetch_add(1, Ordering::SeqCst) + 1
}

/// What a control link may do: a link that was open before a migration was offered on another link has no say in it.
#[derive(Debug)]
pub struct Rights {
    /// How many offers had been taken when it was opened.
    opened: u64,
    /// The offer came on this link.
    offered: bool,
}

impl Rights {
    /// Those of a link that is opened now.
    pub fn of_new_link() -> Self {
        Self { opened: OFFERS.load(Ordering::SeqCst), offered: false }
    }

    /// The link has brought the offer of its migration.
    pub fn offer(&mut self) {
        self.offered = true;
    }

    /// Whether requests about the migration of this offer are answered; `None`: there is none.
    pub fn covers(&self, offer: Option<u64>) -> bool {
        self.offered || offer.is_none_or(|offer| offer <= self.opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_from_before_an_offer_has_no_say_in_the_migration() {
        let before = Rights::of_new_link();
        let mut offering = Rights::of_new_link();
        assert!(before.covers(None), "nothing is known of the migration");
        let offer = next_offer();
        offering.offer();
        let later = Rights::of_new_link();
        assert!(!before.covers(Some(offer)) && before.covers(None));
        assert!(offering.covers(Some(offer)) && later.covers(Some(offer)));
    }
}
