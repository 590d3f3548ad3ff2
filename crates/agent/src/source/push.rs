//! Sends the memory of a frozen container, each page once: what the destination waits for first, the rest meanwhile.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tranship_coordinator::Failure;
use tranship_memory::send::{Counters, Outbox, SendError, Stream};
use tranship_sys::schedule::{self, Standing};
use tranship_sys::threads::{Given, Waiting};
use tranship_transport::{Closer, Connection, Link};
use tranship_types::{AddressSpaceId, PageRange};
use tranship_wire::ReadError;

use crate::node::failed;

/// Pages of address spaces.
pub type Pages = Vec<(AddressSpaceId, Vec<PageRange>)>;

/// The links on which the destination asks for pages and gets them.
pub struct Demand {
    /// The destination says here what it wants.
    pub wants: Connection,
    /// It gets that here.
    pub urgent: Stream<Connection>,
}

/// What is said of a thread that panicked: the log has more.
const PANICKED: &str = "the agent has failed internally in sending memory; see its log, and report it";

/// Memory on its way. Dropping it breaks the links and waits for the threads.
pub struct Push {
    counters: Arc<Counters>,
    streams: Vec<Given<Result<(), SendError>>>,
    /// Each stream has the other end until its own.
    ended: Receiver<()>,
    demand: Option<Given<Result<(), String>>>,
    closers: Vec<Closer>,
    wire: Vec<tranship_transport::Counters>,
    start: Arc<Start>,
    broken: Option<String>,
    /// What broke first is memory that cannot be read here.
    unreadable: bool,
}

/// Keeps the streams back until they shall begin, and tells them how urgent they are then.
#[derive(Default)]
struct Start {
    given: Mutex<Option<Standing>>,
    changed: Condvar,
}

impl Start {
    fn give(&self, standing: Standing) {
        self.given.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(standing);
        self.changed.notify_all();
    }

    fn wait(&self) -> Standing {
        let given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let given = self.changed.wait_while(given, |given| given.is_none()).unwrap_or_else(PoisonError::into_inner);
        given.unwrap_or(Standing::Ordinary)
    }
}

/// How much has been sent.
#[derive(Clone)]
pub struct Gauge {
    counters: Arc<Counters>,
    wire: Vec<tranship_transport::Counters>,
}

impl Gauge {
    /// For what is counted by these.
    pub fn new(counters: Arc<Counters>, wire: Vec<tranship_transport::Counters>) -> Self {
        Self { counters, wire }
    }

    /// Bytes of pages that were read for sending so far.
    pub fn read_bytes(&self) -> u64 {
        self.counters.read.load(Ordering::Relaxed)
    }

    /// Bytes on the wire so far.
    pub fn wire_bytes(&self) -> u64 {
        self.wire.iter().map(tranship_transport::Counters::sent).sum()
    }
}

/// The threads that send memory. They are made before the freeze, in which there may be none to be had.
pub fn crew(streams: u8) -> Result<Vec<Waiting>, Failure> {
    // One more answers demands.
    (0..=streams).map(|_| Waiting::start("push").map_err(failed)).collect()
}

impl Push {
    /// Answers demands from now on; sends the rest over all the streams once [`Self::begin`] is called. The pages that
    /// `ahead` finds are sent without being asked for, once the destination knows of all that follow.
    ///
    /// # Panics
    /// If the [`crew`] is not one for so many streams.
    pub fn start(
        outbox: Outbox,
        streams: Vec<Stream<Connection>>,
        demand: Option<Demand>,
        ahead: impl FnOnce() -> Pages + Send + 'static,
        mut crew: Vec<Waiting>,
    ) -> Self {
        let mut thread = || crew.pop().expect("there is a thread for each stream");
        let outbox = Arc::new(outbox);
        let counters = Arc::new(Counters::default());
        let start = Arc::new(Start::default());
        let count = streams.len();
        let (mut closers, mut wire, mut threads) = (Vec::new(), Vec::new(), Vec::new());
        let (going, ended) = mpsc::channel::<()>();
        for (number, mut stream) in streams.into_iter().enumerate() {
            closers.push(stream.link().closer());
            wire.push(stream.link().counters());
            let (outbox, counters) = (Arc::clone(&outbox), Arc::clone(&counters));
            let (start, going) = (Arc::clone(&start), going.clone());
            threads.push(thread().give(move || {
                schedule::stand(start.wait());
                let sent = outbox.send((number, count), &mut stream, &counters, Link::is_narrow);
                drop(going);
                sent
            }));
        }
        let demand = demand.map(|Demand { wants, mut urgent }| {
            closers.extend([wants.closer(), urgent.link().closer()]);
            wire.push(urgent.link().counters());
            let (outbox, counters) = (Arc::clone(&outbox), Arc::clone(&counters));
            thread().give(move || answer(wants, urgent, ahead, (&outbox, &counters)))
        });
        Self { counters, streams: threads, ended, demand, closers, wire, start, broken: None, unreadable: false }
    }

    /// Lets the streams begin: where the container runs elsewhere already, as ordinary threads; where it waits for them, before
    /// those.
    pub fn begin(&self, standing: Standing) {
        self.start.give(standing);
    }

    /// What it has sent so far, to be looked at from any thread.
    pub fn gauge(&self) -> Gauge {
        Gauge { counters: Arc::clone(&self.counters), wire: self.wire.clone() }
    }

    /// Whether every stream has come to its end; what was asked for is still answered.
    pub fn is_sent(&self) -> bool {
        self.streams.iter().all(Given::is_finished)
    }

    /// Disconnected when every stream has come to its end.
    pub fn ended(&self) -> &Receiver<()> {
        &self.ended
    }

    /// Waits until everything is sent.
    pub fn wait(&mut self) -> Result<(), Failure> {
        for stream in std::mem::take(&mut self.streams) {
            self.joined(stream);
        }
        self.broken.clone().map_or(Ok(()), |why| Err(Failure::new(why)))
    }

    /// Why it does not go on, if a link broke.
    pub fn broken(&mut self) -> Option<String> {
        let (ended, going): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.streams).into_iter().partition(Given::is_finished);
        self.streams = going;
        ended.into_iter().for_each(|stream| self.joined(stream));
        if let Some(demand) = self.demand.take_if(|demand| demand.is_finished())
            && let Err(why) = demand.join().unwrap_or_else(|_| Err(PANICKED.to_owned()))
        {
            self.broken.get_or_insert(why);
        }
        self.broken.clone()
    }

    /// Whether it does not go on because memory cannot be read here: then the destination has nothing to add.
    pub fn is_unreadable(&self) -> bool {
        self.unreadable
    }

    /// Breaks all links at once.
    pub fn cut(&self) {
        self.closers.iter().for_each(Closer::close);
    }

    fn joined(&mut self, stream: Given<Result<(), SendError>>) {
        match stream.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                self.unreadable |= self.broken.is_none() && !matches!(error, SendError::Send(_));
                self.broken.get_or_insert_with(|| error.to_string());
            }
            Err(_) => drop(self.broken.get_or_insert_with(|| PANICKED.to_owned())),
        }
    }
}

impl Drop for Push {
    fn drop(&mut self) {
        self.cut();
        self.begin(Standing::Ordinary);
        let _ = self.wait();
        if let Some(demand) = self.demand.take() {
            let _ = demand.join();
        }
    }
}

/// Sends what is asked for until the destination has ended the link in good order: when it has everything. The first frame, with which the destination confirms that all
/// pages that follow are named (older peers ask for a page), starts the sending of those that a restore touches: before it, the destination would go on waiting for them.
fn answer(
    mut wants: Connection,
    mut urgent: Stream<Connection>,
    ahead: impl FnOnce() -> Pages,
    (outbox, counters): (&Outbox, &Counters),
) -> Result<(), String> {
    schedule::stand(Standing::Realtime);
    let mut ahead = ahead();
    loop {
        match tranship_wire::runs::read_wants(&mut wants) {
            Ok(wanted) => {
                if let Some((space, ranges)) = wanted {
                    outbox.send_wanted(space, &ranges, &mut urgent, counters).map_err(|e| e.to_string())?;
                }
                for (space, ranges) in std::mem::take(&mut ahead) {
                    outbox.send_ahead(space, &ranges, &mut urgent, counters).map_err(|e| e.to_string())?;
                }
            }
            Err(ReadError::Closed) => return Ok(()),
            Err(error) => return Err(format!("the destination's wishes cannot be read: {error}")),
        }
    }
}
