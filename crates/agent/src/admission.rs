//! How many callers may be connected at a time.
//!
//! Callers that have not shown who they are have places of their own, few and for a short time, so that strangers who connect and stay
//! silent neither keep a peer out nor wait for each other: where the places are taken, one of the address that has the most makes room, the
//! oldest that has sent nothing, or else the oldest. Links of peers are counted for each peer; those of migrations under way have places that other links cannot take,
//! and those that relay standard streams, which last as long as containers, take none of theirs.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tranship_transport::Closer;
use tranship_types::NodeName;

/// Callers that may be showing who they are at a time, and those of one address.
const HANDSHAKES: usize = 64;
const HANDSHAKES_OF_ADDRESS: usize = 16;
/// Links of a peer at a time, and those of them that belong to no migration under way.
const LINKS: usize = 512;
const UNRELATED: usize = 256;
/// Links of a peer that relay standard streams, besides those: two for each container, as long as it runs.
const RELAYS: usize = 1024;
/// How often it is logged that callers were turned away.
const LOG: Duration = Duration::from_secs(10);

/// Callers that have not shown who they are.
#[derive(Debug, Default)]
pub struct Handshakes(Mutex<Callers>);

#[derive(Debug, Default)]
struct Callers {
    /// In the order in which they came.
    waiting: Vec<Caller>,
    next: u64,
    /// Turned away since it was logged the last time.
    dropped: u64,
    logged: Option<Instant>,
}

struct Caller {
    number: u64,
    address: IpAddr,
    closer: Closer,
    is_silent: Box<dyn Fn() -> bool + Send>,
}

impl std::fmt::Debug for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Caller").field("number", &self.number).field("address", &self.address).finish_non_exhaustive()
    }
}

/// The place of a caller that has not shown who it is; free again on drop.
#[derive(Debug)]
pub struct HandshakePlace {
    handshakes: Arc<Handshakes>,
    number: u64,
}

impl Handshakes {
    fn callers(&self) -> MutexGuard<'_, Callers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a caller a place, for which another one may have to go; `is_silent` tells whether it has sent nothing yet.
    pub fn enter(
        self: &Arc<Self>,
        address: IpAddr,
        closer: Closer,
        is_silent: impl Fn() -> bool + Send + 'static,
    ) -> HandshakePlace {
        let address = network_of(address);
        let mut callers = self.callers();
        let number = callers.next;
        callers.next += 1;
        if let Some(victim) = callers.victim(address) {
            callers.waiting.remove(victim).closer.close();
            callers.dropped += 1;
            if callers.logged.is_none_or(|at| at.elapsed() > LOG) {
                let dropped = std::mem::take(&mut callers.dropped);
                callers.logged = Some(Instant::now());
                tracing::warn!(dropped, %address, "callers that did not show a certificate made room for others");
            }
        }
        callers.waiting.push(Caller { number, address, closer, is_silent: Box::new(is_silent) });
        HandshakePlace { handshakes: Arc::clone(self), number }
    }
}

impl Callers {
    /// Which caller must go for one more of this address.
    fn victim(&self, address: IpAddr) -> Option<usize> {
        let count = |of: IpAddr| self.waiting.iter().filter(|caller| caller.address == of).count();
        let crowded = match count(address) >= HANDSHAKES_OF_ADDRESS {
            true => address,
            false if self.waiting.len() < HANDSHAKES => return None,
            false => self.waiting.iter().map(|caller| caller.address).max_by_key(|of| count(*of))?,
        };
        // A peer sends something at once. However long its handshake takes, those that only hold their places go first.
        let of_crowded = |caller: &Caller| caller.address == crowded;
        let silent = self.waiting.iter().position(|caller| of_crowded(caller) && (caller.is_silent)());
        silent.or_else(|| self.waiting.iter().position(of_crowded))
    }
}

impl Drop for HandshakePlace {
    fn drop(&mut self) {
        self.handshakes.callers().waiting.retain(|caller| caller.number != self.number);
    }
}

/// What counts as one address: of IPv6 the network, all of which one machine may have.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
        v4 => v4,
    }
}

/// Links of peers.
#[derive(Debug, Default)]
pub struct Links(Mutex<HashMap<NodeName, Count>>);

#[derive(Debug, Default)]
struct Count {
    all: usize,
    unrelated: usize,
    relays: usize,
}

/// The place of a link; free again on drop.
#[derive(Debug)]
pub struct LinkPlace {
    links: Arc<Links>,
    peer: NodeName,
    kind: LinkKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkKind {
    /// Of a migration under way.
    Related,
    Unrelated,
    /// Of standard streams.
    Relay,
}

impl Count {
    fn change(&mut self, kind: LinkKind, change: fn(usize, usize) -> usize) {
        match kind {
            LinkKind::Related => self.all = change(self.all, 1),
            LinkKind::Unrelated => (self.all, self.unrelated) = (change(self.all, 1), change(self.unrelated, 1)),
            LinkKind::Relay => self.relays = change(self.relays, 1),
        }
    }
}

impl LinkPlace {
    /// The link relays standard streams from now on.
    ///
    /// # Errors
    /// Why there is no place for that, for the peer.
    pub fn relay(&mut self) -> Result<(), String> {
        let mut counts = self.links.counts();
        let count = counts.entry(self.peer.clone()).or_default();
        if count.relays >= RELAYS {
            let (open, peer) = (count.relays, &self.peer);
            tracing::warn!(%peer, open, "a link of standard streams was turned away: its node has too many");
            let remedy = "end or move back some of the containers that came from there";
            return Err(format!("{open} links of node {peer} relay standard streams already; {remedy}"));
        }
        count.change(std::mem::replace(&mut self.kind, LinkKind::Relay), usize::saturating_sub);
        count.change(LinkKind::Relay, usize::saturating_add);
        Ok(())
    }
}

impl Links {
    fn counts(&self) -> MutexGuard<'_, HashMap<NodeName, Count>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a link of a peer a place; `related` says that it belongs to a migration under way.
    ///
    /// # Errors
    /// Why there is none, for the peer.
    pub fn enter(self: &Arc<Self>, peer: &NodeName, related: bool) -> Result<LinkPlace, String> {
        let mut counts = self.counts();
        let count = counts.entry(peer.clone()).or_default();
        if count.all >= LINKS || (!related && count.unrelated >= UNRELATED) {
            let why = format!("{} links of node {peer} are open already; wait until moves have ended", count.all);
            tracing::warn!(%peer, open = count.all, "a link was turned away: its node has too many");
            return Err(why);
        }
        let kind = if related { LinkKind::Related } else { LinkKind::Unrelated };
        count.change(kind, usize::saturating_add);
        Ok(LinkPlace { links: Arc::clone(self), peer: peer.clone(), kind })
    }
}

impl Drop for LinkPlace {
    fn drop(&mut self) {
        let mut counts = self.links.counts();
        if let Some(count) = counts.get_mut(&self.peer) {
            count.change(self.kind, usize::saturating_sub);
            if count.all + count.relays == 0 {
                counts.remove(&self.peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn counted(closed: &Arc<AtomicUsize>) -> Closer {
        let closed = Arc::clone(closed);
        Closer::calling(move || {
            closed.fetch_add(1, Ordering::Relaxed);
        })
    }

    #[test]
    fn a_caller_always_gets_a_place_and_those_of_the_crowded_address_go() {
        let handshakes = Arc::new(Handshakes::default());
        let (strangers, peers) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let mut places = Vec::new();
        for number in 0..300 {
            places.push(handshakes.enter(IpAddr::from([10, 0, 0, 1]), counted(&strangers), || false));
            if number % 100 == 0 {
                places.push(handshakes.enter(IpAddr::from([10, 0, 0, 2]), counted(&peers), || false));
            }
        }
        assert_eq!(strangers.load(Ordering::Relaxed), 300 - HANDSHAKES_OF_ADDRESS);
        assert_eq!(peers.load(Ordering::Relaxed), 0, "another address is not touched");
        drop(places);
        assert!(handshakes.callers().waiting.is_empty());
    }

    #[test]
    fn those_that_have_sent_nothing_go_first() {
        let handshakes = Arc::new(Handshakes::default());
        let (strangers, peers) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let address = IpAddr::from([10, 0, 0, 1]);
        let _peer = handshakes.enter(address, counted(&peers), || false);
        let _strangers: Vec<_> = (0..300).map(|_| handshakes.enter(address, counted(&strangers), || true)).collect();
        assert_eq!(peers.load(Ordering::Relaxed), 0);
        assert_eq!(strangers.load(Ordering::Relaxed), 301 - HANDSHAKES_OF_ADDRESS);
    }

    #[test]
    fn from_many_addresses_no_more_than_the_bound_wait_and_the_oldest_go() {
        let handshakes = Arc::new(Handshakes::default());
        let closed = Arc::<AtomicUsize>::default();
        let enter = |n: u8| handshakes.enter(IpAddr::from([10, 0, n, 1]), counted(&closed), || false);
        let places: Vec<_> = (0..200).map(enter).collect();
        assert_eq!(handshakes.callers().waiting.len(), HANDSHAKES);
        assert_eq!(closed.load(Ordering::Relaxed), 200 - HANDSHAKES);
        assert_eq!(handshakes.callers().waiting.last().map(|caller| caller.number), Some(199));
        drop(places);
        assert!(handshakes.callers().waiting.is_empty());
    }

    #[test]
    fn a_network_of_ipv6_is_one_address_and_a_mapped_one_is_that_of_ipv4() {
        let [a, b, c] = ["2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"].map(|a| network_of(a.parse().unwrap()));
        assert_eq!(a, b);
        assert_ne!(a, c);
        assert_eq!(network_of("::ffff:10.0.0.1".parse().unwrap()), IpAddr::from([10, 0, 0, 1]));
    }

    #[test]
    fn links_of_migrations_have_places_that_others_cannot_take() {
        let links = Arc::new(Links::default());
        let (a, b): (NodeName, NodeName) = ("a".parse().unwrap(), "b".parse().unwrap());
        let mut places: Vec<_> = (0..UNRELATED).map(|_| links.enter(&a, false).unwrap()).collect();
        assert!(links.enter(&a, false).is_err());
        places.push(links.enter(&b, false).unwrap());
        places.extend((UNRELATED..LINKS).map(|_| links.enter(&a, true).unwrap()));
        assert!(links.enter(&a, true).is_err());
        drop(places);
        assert!(links.counts().is_empty());
    }

    #[test]
    fn links_of_standard_streams_take_no_places_of_others() {
        let links = Arc::new(Links::default());
        let peer: NodeName = "a".parse().unwrap();
        let relay = || {
            let mut place = links.enter(&peer, false).unwrap();
            place.relay().map(|()| place)
        };
        let relays: Vec<_> = (0..RELAYS).map(|_| relay().unwrap()).collect();
        assert!(relay().unwrap_err().contains("relay standard streams"));
        let others: Vec<_> = (0..UNRELATED).map(|_| links.enter(&peer, false).unwrap()).collect();
        assert!(links.enter(&peer, false).is_err());
        drop(others);
        assert_eq!(links.counts()[&peer].all, 0);
        drop(relays);
        assert!(links.counts().is_empty());
    }
}
