//! The counting itself: the process in the client node.
//!
//! ```text
//! idle ── time for the next ──▶ sent ── right reply ──▶ idle
//!  │ ▲                           └── wrong reply, error ──▶ ended (answers requests, never connects again)
//! pause/resume
//! ```

use std::io::{self, BufRead, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{CounterReport, Gap, Request, Window};
use crate::resp::{Connection, Reply};

/// How often requests are looked for while a reply is due.
const LOOK: Duration = Duration::from_millis(20);

struct Counter {
    connection: Connection<TcpStream>,
    key: String,
    client_id: Option<i64>,
    report: CounterReport,
    /// When the last reply came, by both clocks; `None` where the next reply ends no gap.
    last: Option<(Instant, u64)>,
    /// When the INCR was sent whose reply is due.
    sent: Option<Instant>,
}

/// Counts in `key` at `address`, one INCR every `interval`, for `duration` or until stopped; with `control`, answers the
/// requests on stdin by reports on stdout. Returns the last report.
///
/// # Errors
/// If the connection cannot be made, or stdout is closed.
pub fn count(
    address: SocketAddr,
    key: &str,
    interval: Duration,
    duration: Option<Duration>,
    control: bool,
) -> io::Result<CounterReport> {
    let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LOOK))?;
    let mut counter = Counter {
        connection: Connection::new(stream),
        key: key.to_owned(),
        client_id: None,
        report: CounterReport::default(),
        last: None,
        sent: None,
    };
    counter.begin()?;
    let requests = control.then(requests_from_stdin);
    let end = duration.map(|d| Instant::now() + d);
    let mut paused = false;
    let mut next = Instant::now();
    loop {
        let now = Instant::now();
        if end.is_some_and(|end| now >= end) {
            break;
        }
        // Between two INCRs, or while a reply is late, requests are answered; when there is nothing to send, only they are.
        let halted = paused || counter.report.error.is_some();
        let request = match &requests {
            Some(requests) if counter.sent.is_none() && halted => wait(requests, end),
            Some(requests) => match requests.try_recv() {
                Ok(request) => Some(request),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Request::Stop),
            },
            None if halted => break,
            None => None,
        };
        if let Some(request) = request {
            if matches!(request, Request::Pause | Request::Stop) {
                paused = true;
                counter.settle();
            }
            let report = counter.report(paused);
            if request == Request::Mark {
                counter.report.since_mark = Window::default();
            }
            if request == Request::Resume {
                paused = false;
                counter.last = None;
                next = Instant::now();
            }
            answer(&report)?;
            if request == Request::Stop {
                return Ok(report);
            }
        } else if counter.sent.is_some() {
            counter.receive();
        } else if !halted {
            // No burst makes up for a gap: that would measure the burst.
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            next = next.max(Instant::now()) + interval;
            counter.send();
        }
    }
    counter.settle();
    Ok(counter.report(true))
}

impl Counter {
    fn begin(&mut self) -> io::Result<()> {
        let refused = |reply: &Reply| io::Error::other(format!("unexpected reply: {reply:?}"));
        match self.patient_call(&["CLIENT", "ID"])? {
            Reply::Integer(id) => self.client_id = Some(id),
            other => return Err(refused(&other)),
        }
        let key = self.key.clone();
        match self.patient_call(&["GET", &key])? {
            Reply::Bulk(None) => {}
            Reply::Bulk(Some(value)) => {
                let value = String::from_utf8_lossy(&value).into_owned();
                self.report.value =
                    value.parse().map_err(|_| io::Error::other(format!("{key} is no number: {value:?}")))?;
            }
            other => return Err(refused(&other)),
        }
        Ok(())
    }

    /// A call that may take up to 5 s.
    fn patient_call(&mut self, arguments: &[&str]) -> io::Result<Reply> {
        self.connection.send(arguments)?;
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            match self.connection.receive() {
                Ok(Some(reply)) => return Ok(reply),
                Ok(None) => {}
                Err(e) if is_timeout(&e) && Instant::now() < deadline => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn send(&mut self) {
        match self.connection.send(&["INCR", &self.key]) {
            Ok(()) => self.sent = Some(Instant::now()),
            Err(e) => self.end(&format!("sending failed: {e}")),
        }
    }

    /// Waits a little for the reply that is due.
    fn receive(&mut self) {
        match self.connection.receive() {
            Ok(Some(Reply::Integer(value))) if value == self.report.value + 1 => {
                let (now, unix) = (Instant::now(), unix_ms());
                if let Some((before, at_unix_ms)) = self.last {
                    let gap = Gap { ms: (now - before).as_secs_f64() * 1e3, at_unix_ms };
                    self.report.total.add(gap);
                    self.report.since_mark.add(gap);
                } else {
                    self.report.total.replies += 1;
                    self.report.since_mark.replies += 1;
                }
                self.report.value = value;
                self.last = Some((now, unix));
                self.sent = None;
            }
            Ok(Some(other)) => self.end(&format!("after {} came {other:?}", self.report.value)),
            Ok(None) => {}
            Err(e) if is_timeout(&e) => {}
            Err(e) => self.end(&format!("receiving failed: {e}")),
        }
    }

    fn end(&mut self, error: &str) {
        self.report.error = Some(error.to_owned());
        self.sent = None;
    }

    /// Waits up to 4 s for the reply that is due.
    fn settle(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(4);
        while self.sent.is_some() && Instant::now() < deadline {
            self.receive();
        }
    }

    /// The report as of now. Where the counter rests, the server is asked whether it still knows the connection.
    fn report(&mut self, resting: bool) -> CounterReport {
        self.report.waiting_ms = self.sent.map_or(0.0, |sent| sent.elapsed().as_secs_f64() * 1e3);
        self.report.same_connection = self.report.error.is_none();
        if resting && self.sent.is_none() && self.report.error.is_none() {
            let id = self.patient_call(&["CLIENT", "ID"]);
            self.report.same_connection = matches!(id, Ok(Reply::Integer(id)) if Some(id) == self.client_id);
        }
        self.report.clone()
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn wait(requests: &Receiver<Request>, end: Option<Instant>) -> Option<Request> {
    let limit = end.map_or(Duration::from_secs(3600), |end| end.saturating_duration_since(Instant::now()));
    match requests.recv_timeout(limit) {
        Ok(request) => Some(request),
        Err(RecvTimeoutError::Timeout) => None,
        Err(RecvTimeoutError::Disconnected) => Some(Request::Stop),
    }
}

fn requests_from_stdin() -> Receiver<Request> {
    let (sender, requests) = channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            let Ok(request) = serde_json::from_str(&line) else { break };
            if sender.send(request).is_err() {
                break;
            }
        }
    });
    requests
}

fn answer(report: &CounterReport) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    serde_json::to_writer(&mut stdout, report)?;
    stdout.write_all(b"\n")?;
    stdout.flush()
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}
