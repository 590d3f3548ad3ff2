//! One container, one client; all kinds of sockets and states.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tranship_e2e::{Capture, Stage, remove, wait_until};
use tranship_lab::{CLIENT, Lab, patience};
use tranship_workloads::traffic::{Datagrams, Numbers, Service, Stream, TRAFFIC_PORT, Way};

use super::groups::failing_and_moving;
use super::{IP, NAME, PATIENCE, address, ask, connect, echoes, moves, run};

const RATE: u64 = 10_000;
const CONNECTIONS: u64 = 2000;

/// Moves the container to the other node and back.
fn to_and_fro(lab: &Lab, mut between: impl FnMut() -> Result<()>) -> Result<()> {
    for (from, to) in [("a", "b"), ("b", "a")] {
        let report = moves(lab, NAME, from, to)?;
        eprintln!("{from} → {to}: blackout {:.0} ms", report.blackout_ms.unwrap_or_default());
        between().with_context(|| format!("after the move to {to}"))?;
    }
    Ok(())
}

/// The connections of client and container as their kernels have them, for the message of a stream that has stood still.
fn connections(lab: &Lab) -> String {
    let own = ["ss", "-tinoem"];
    let within = [&["ip", "netns", "exec", NAME][..], &own].concat();
    let places = [(CLIENT, &own[..]), ("a", &within[..]), ("b", &within[..])];
    let list = |(node, command): (&str, &[&str])| {
        let listed = lab.exec(node, command).map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        format!("{node}:\n{}", listed.unwrap_or_else(|error| error.to_string()))
    };
    places.map(list).concat()
}

pub(super) fn streams_of_all_directions(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let resets = Capture::begin(&format!("host {IP} and tcp[tcpflags] & tcp-rst != 0"))?;
    let mut streams = Vec::new();
    for way in [Way::Out, Way::In, Way::Both] {
        streams.push((way, Stream::begin(connect(lab, IP)?, way, None, &[])?));
    }
    std::thread::sleep(Duration::from_millis(300));
    to_and_fro(lab, || {
        std::thread::sleep(Duration::from_millis(500));
        match streams.iter().find(|(_, stream)| !stream.goes_on()) {
            Some((way, _)) => bail!("the stream {way:?} has ended"),
            None => Ok(()),
        }
    })?;
    for (way, stream) in streams {
        let course = stream.end().with_context(|| format!("the stream {way:?}; {}", connections(lab)))?;
        eprintln!("{way:?}: {} bytes, longest gap {} ms", course.passed.iter().sum::<u64>(), course.longest_gap_ms());
    }
    let resets = resets.end()?;
    ensure!(resets.is_empty(), "resets were seen: {resets:#?}");
    remove(lab, NAME)
}

/// What the client's kernel has sent again on a connection.
fn retransmissions(lab: &Lab, port: u16) -> Result<u64> {
    let text = lab.check(CLIENT, &["ss", "-tinH", "sport", "=", &format!(":{port}")])?;
    let total = text.split_whitespace().find_map(|word| word.strip_prefix("retrans:")?.split('/').nth(1)?.parse().ok());
    ensure!(text.contains("cwnd:"), "ss does not know the connection from port {port}: {text}");
    Ok(total.unwrap_or(0))
}

pub(super) fn requests(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let streams: Vec<_> = (0..20).map(|_| ask(lab, IP, Service::Echo)).collect::<Result<_>>()?;
    streams.iter().try_for_each(|stream| echoes(stream, 0))?;
    let ports = streams.iter().map(|stream| Ok(stream.local_addr()?.port())).collect::<Result<Vec<_>>>()?;
    let sent_again = || ports.iter().map(|port| retransmissions(lab, *port)).sum::<Result<u64>>();
    let before = sent_again()?;
    let stop = AtomicBool::new(false);
    let ask_on = |stream: &TcpStream| -> Result<Duration> {
        let mut longest = Duration::ZERO;
        for word in (1..).take_while(|_| !stop.load(Ordering::SeqCst)) {
            let begun = Instant::now();
            echoes(stream, word)?;
            longest = longest.max(begun.elapsed());
            std::thread::sleep(Duration::from_millis(3));
        }
        Ok(longest)
    };
    let ask_on = &ask_on;
    let (blackout, longest) = std::thread::scope(|scope| -> Result<_> {
        let clients: Vec<_> = streams.iter().map(|stream| scope.spawn(move || ask_on(stream))).collect();
        let report = moves(lab, NAME, "a", "b");
        std::thread::sleep(Duration::from_millis(300));
        stop.store(true, Ordering::SeqCst);
        let mut longest = Duration::ZERO;
        for client in clients {
            let Ok(took) = client.join() else { bail!("a client panicked") };
            longest = longest.max(took?);
        }
        Ok((report?.blackout_ms.unwrap_or_default(), longest))
    })?;
    let again = sent_again()? - before;
    eprintln!("blackout {blackout:.0} ms, slowest reply {} ms, sent again {again}", longest.as_millis());
    // What waits for 200 ms the client's kernel sends again, whatever is done.
    ensure!(again == 0 || blackout > 190.0, "{again} segments were sent again in a blackout of {blackout:.0} ms");
    remove(lab, NAME)
}

pub(super) fn half_closed(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    const LENGTH: usize = 200_000;
    let mut bytes = vec![0; LENGTH];
    Numbers::default().write(&mut bytes);
    // Ended by the client: what the server has not even read when it is moved comes back.
    let by_client = ask(lab, IP, Service::Later(Duration::from_secs(4)))?;
    (&by_client).write_all(&bytes)?;
    by_client.shutdown(Shutdown::Write)?;
    // Ended by the server.
    let by_server = ask(lab, IP, Service::Mute)?;
    ensure!((&by_server).read(&mut [0])? == 0, "the server has not ended its direction");
    let mut halves = bytes.chunks(LENGTH / 2);
    to_and_fro(lab, || Ok((&by_server).write_all(halves.next().unwrap_or_default())?))?;
    by_server.shutdown(Shutdown::Write)?;
    let mut back = Vec::new();
    (&by_client).read_to_end(&mut back).context("what the server sends after the client's end")?;
    ensure!(back == bytes, "{} of {LENGTH} bytes came back, or wrong ones", back.len());
    wait_until("the server to have taken in all", PATIENCE, || {
        let mut count = [0; 8];
        (&ask(lab, IP, Service::Total)?).read_exact(&mut count)?;
        Ok((u64::from_le_bytes(count) == LENGTH as u64).then_some(()))
    })?;
    remove(lab, NAME)
}

pub(super) fn unread_and_unsent_data(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    // Both fill all buffers on their way, and then stand still: nobody reads.
    let to_server = connect(lab, IP)?;
    (&to_server).write_all(&Service::Later(Duration::from_secs(5)).to_bytes())?;
    to_server.set_nonblocking(true)?;
    let (mut sent, mut piece) = (Numbers::default(), vec![0; 32 << 10]);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        sent.write(&mut piece);
        match (&to_server).write(&piece) {
            Ok(length) => sent.pass(length),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(10)),
            Err(e) => return Err(e.into()),
        }
    }
    to_server.set_nonblocking(false)?;
    let from_server = ask(lab, IP, Service::Output(None))?;
    std::thread::sleep(Duration::from_millis(500));
    to_and_fro(lab, || Ok(()))?;

    let begun = Instant::now();
    let mut received = Numbers::default();
    while received.at() < 64 << 20 {
        let length = (&from_server).read(&mut piece).context("what the server had not sent")?;
        ensure!(length > 0, "the server has ended the stream");
        received.check(&piece[..length])?;
    }
    eprintln!("64 MiB that waited for a reader came in {} ms", begun.elapsed().as_millis());
    ensure!(begun.elapsed() < Duration::from_secs(5), "the server went on too late");

    // It is an echo; what comes back must be read while the rest is sent.
    to_server.shutdown(Shutdown::Write)?;
    let mut back = Numbers::default();
    loop {
        match (&to_server).read(&mut piece).context("what the server had not read")? {
            0 => break,
            length => back.check(&piece[..length])?,
        }
    }
    ensure!(back == sent, "{} bytes were sent, {} came back", sent.at(), back.at());
    remove(lab, NAME)
}

pub(super) fn backlog(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    // A client that connects, asks and leaves, every few milliseconds: there is always somebody about to be accepted.
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let knocking = lab.within(CLIENT, None, move || {
        Ok(std::thread::spawn(move || -> Result<u64> {
            let mut count = 0;
            while !flag.load(Ordering::SeqCst) {
                let stream = TcpStream::connect_timeout(&address(IP), PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                (&stream).write_all(&Service::Echo.to_bytes())?;
                echoes(&stream, count).with_context(|| format!("connection {count}"))?;
                count += 1;
            }
            Ok(count)
        }))
    })??;
    let moved = to_and_fro(lab, || Ok(())).and_then(|()| to_and_fro(lab, || Ok(())));
    stop.store(true, Ordering::SeqCst);
    let Ok(served) = knocking.join() else { bail!("the client panicked") };
    moved?;
    eprintln!("{} connections were served", served?);
    remove(lab, NAME)
}

pub(super) fn new_connections(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    // Each of them begins 5 ms after the one before, so that some fall into each stage of the blackout.
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let knocking = lab.within(CLIENT, None, move || {
        Ok(std::thread::spawn(move || {
            std::thread::scope(|scope| -> Result<Vec<Duration>> {
                let mut callers = Vec::new();
                while !flag.load(Ordering::SeqCst) {
                    callers.push(scope.spawn(|| -> Result<Duration> {
                        let begun = Instant::now();
                        let stream = TcpStream::connect_timeout(&address(IP), PATIENCE)?;
                        stream.set_read_timeout(Some(PATIENCE))?;
                        (&stream).write_all(&Service::Echo.to_bytes())?;
                        echoes(&stream, 7)?;
                        Ok(begun.elapsed())
                    }));
                    std::thread::sleep(Duration::from_millis(5));
                }
                let each = callers.into_iter().enumerate().map(|(n, caller)| {
                    let Ok(took) = caller.join() else { bail!("caller {n} panicked") };
                    took.with_context(|| format!("caller {n}"))
                });
                each.collect()
            })
        }))
    })??;
    let moved = moves(lab, NAME, "a", "b");
    stop.store(true, Ordering::SeqCst);
    let Ok(served) = knocking.join() else { bail!("the callers' thread panicked") };
    let blackout = Duration::from_secs_f64(moved?.blackout_ms.context("the report tells no blackout")? / 1e3);
    let served = served?;
    let longest = served.iter().max().copied().unwrap_or_default();
    let late = served.iter().filter(|took| **took > blackout + Duration::from_millis(50)).count();
    eprintln!(
        "blackout {} ms; {} callers were served, the slowest after {} ms, {late} later than 50 ms after the blackout",
        blackout.as_millis(),
        served.len(),
        longest.as_millis()
    );
    ensure!(served.len() > 50, "only {} callers came", served.len());
    // A SYN that was lost is sent again after a second.
    ensure!(longest < blackout + Duration::from_millis(900), "the slowest caller was served after {longest:?}");
    remove(lab, NAME)
}

/// What asks for a connection gets it also where the freeze would have come between its request and its acknowledgement: those
/// handshakes come to their end before.
pub(super) fn handshakes(stage: &mut Stage) -> Result<()> {
    /// How often the acknowledgements may come too late: on a busy machine it takes long to start the programs that let them through.
    const ATTEMPTS: usize = 6;
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    for (from, to) in [("a", "b"), ("b", "a")].into_iter().cycle().take(ATTEMPTS) {
        if made_in_time(lab, from, to)? {
            return remove(lab, NAME);
        }
    }
    bail!("the acknowledgements came too late {ATTEMPTS} times")
}

/// Moves the container while connections to it are being made, and has them answered. False: the clients' acknowledgements were later than a
/// move waits for them.
fn made_in_time(lab: &Lab, from: &str, to: &str) -> Result<bool> {
    const CALLERS: u64 = 5;
    /// How long the clients' acknowledgements are on their way, once the gate is closed to newcomers.
    const LATE: Duration = Duration::from_millis(90);
    /// How long a move waits for them, less what it takes to look.
    const PATIENCE_OF_A_MOVE: Duration = Duration::from_millis(180);
    // All that the client sends is lost but its SYNs: so it has its connections, and the server does not yet.
    let port = TRAFFIC_PORT.to_string();
    let firewall = |change: &str| {
        let rule = ["OUTPUT", "-p", "tcp", "--dport", &port, "!", "--syn", "-j", "DROP"];
        lab.check(CLIENT, &[&["iptables-legacy", change][..], &rule].concat()).map(drop)
    };
    firewall("-A")?;
    let streams = (0..CALLERS).map(|_| connect(lab, IP)).collect::<Result<Vec<_>>>();
    let (report, answers, late) = std::thread::scope(|scope| -> Result<_> {
        let mover = scope.spawn(|| moves(lab, NAME, from, to));
        // When it was not closed yet.
        let mut open = Instant::now();
        let closed = wait_until("the gate to be closed to newcomers", PATIENCE, || {
            let asked = Instant::now();
            let listed = lab.exec(from, &["ip", "netns", "exec", NAME, "nft", "list", "tables"])?;
            let closed = String::from_utf8_lossy(&listed.stdout).contains("tranship");
            open = if closed { open } else { asked };
            Ok(closed.then_some(()))
        });
        std::thread::sleep(LATE);
        firewall("-D")?;
        let late = open.elapsed() > PATIENCE_OF_A_MOVE;
        let answers = streams.and_then(|streams| {
            streams.iter().zip(0..).try_for_each(|(stream, n)| {
                let mut asks = stream;
                asks.write_all(&Service::Echo.to_bytes())?;
                echoes(stream, n).with_context(|| format!("caller {n}"))
            })
        });
        closed?;
        let Ok(report) = mover.join() else { bail!("the thread that moves it panicked") };
        Ok((report?, answers, late))
    })?;
    let given_up = report.ways.iter().any(|way| way.contains("handshake"));
    if late && given_up {
        return Ok(false);
    }
    answers?;
    ensure!(!given_up, "{:?}", report.ways);
    Ok(true)
}

/// What the server sends before it closes a connection arrives whole, also where that was just before the freeze: nobody has
/// such a connection any more but the kernel.
pub(super) fn closed_connections(stage: &mut Stage) -> Result<()> {
    const CALLERS: usize = 4;
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let stop = Arc::new(AtomicBool::new(false));
    let callers = (0..CALLERS).map(|_| {
        let stop = Arc::clone(&stop);
        lab.within(CLIENT, None, move || {
            Ok(std::thread::spawn(move || -> Result<u64> {
                let mut served = 0;
                while !stop.load(Ordering::SeqCst) {
                    let begun = Instant::now();
                    farewell().with_context(|| format!("call {served}, begun {:?} ago", begun.elapsed()))?;
                    served += 1;
                }
                Ok(served)
            }))
        })?
        .map_err(Into::into)
    });
    let callers = callers.collect::<Result<Vec<_>>>()?;
    let reports = [("a", "b"), ("b", "a"), ("a", "b")].map(|(from, to)| moves(lab, NAME, from, to));
    stop.store(true, Ordering::SeqCst);
    for caller in callers {
        let Ok(served) = caller.join() else { bail!("a caller panicked") };
        eprintln!("{} connections came to their end", served?);
    }
    for report in reports {
        let ways = report?.ways;
        ensure!(!ways.iter().any(|way| way.contains("had not sent all")), "{ways:?}");
    }
    remove(lab, NAME)
}

/// Has the server send, says that it is enough, and reads to the end.
fn farewell() -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&address(IP), PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&Service::Output(None).to_bytes())?;
    let (mut numbers, mut piece) = (Numbers::default(), vec![0; 64 << 10]);
    loop {
        match stream.read(&mut piece)? {
            0 => break,
            length => numbers.check(&piece[..length])?,
        }
        // The end is asked for once, after the first of it.
        let _ = stream.shutdown(Shutdown::Write);
    }
    ensure!(numbers.at() > 0 && numbers.at() % (64 << 10) == 0, "it ended in the middle, after {} bytes", numbers.at());
    Ok(())
}

/// A stream of datagrams from the client to a container.
pub(super) fn begin_datagrams(lab: &Lab, ip: Ipv4Addr) -> Result<Datagrams> {
    let socket = lab.within(CLIENT, None, move || {
        let socket = UdpSocket::bind(("0.0.0.0", 0))?;
        nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBuf, &(4 << 20))?;
        socket.connect((ip, TRAFFIC_PORT))?;
        Ok(socket)
    })??;
    Datagrams::begin(socket, RATE)
}

/// How many datagrams may be late at this rate where a gate is opened so often: those that come while it is. That takes 0.1 ms, and a few on a machine that
/// does something else just then. Without an order some 40 ms of them would be late each time.
pub(super) fn late(rate: u64, openings: u64) -> u64 {
    let each = rate as f64 * patience(Duration::from_millis(5)).as_secs_f64();
    (each as u64).max(1) * openings
}

/// Checks that all came back, once and in their order, but for those that came just when the gate was opened.
pub(super) fn end_datagrams(datagrams: Datagrams, openings: u64) -> Result<()> {
    let tally = datagrams.end()?;
    eprintln!(
        "{} datagrams, {} lost {:?}, {} doubled, {} out of order",
        tally.sent, tally.lost, tally.lost_range, tally.doubled, tally.reordered
    );
    let wrong = (tally.lost, tally.doubled, tally.reordered);
    ensure!(
        wrong.0 + wrong.1 == 0 && wrong.2 <= late(RATE, openings),
        "lost, doubled, out of order: {wrong:?} of {}",
        tally.sent
    );
    Ok(())
}

pub(super) fn datagrams(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let datagrams = begin_datagrams(lab, IP)?;
    let moved = failing_and_moving(lab, Duration::from_millis(300));
    end_datagrams(datagrams, 4)?;
    moved?;
    remove(lab, NAME)
}

pub(super) fn many_connections(stage: &mut Stage) -> Result<()> {
    let lab = &stage.lab;
    run(lab, "a", NAME, IP, false)?;
    let mut streams = Vec::new();
    for n in 0..CONNECTIONS {
        let stream = ask(lab, IP, Service::Echo).with_context(|| format!("connection {n}"))?;
        echoes(&stream, n)?;
        streams.push(stream);
    }
    to_and_fro(lab, || {
        streams.iter().zip(0..).try_for_each(|(stream, n)| echoes(stream, n).with_context(|| format!("connection {n}")))
    })?;
    remove(lab, NAME)
}
