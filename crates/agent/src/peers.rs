//! Answers other agents: each link has a thread of its own.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tranship_api::PassedCall;
use tranship_coordinator::damage::FromSource;
use tranship_coordinator::{self as coordinator, Failure, Journal, Record};
use tranship_memory::huge;
use tranship_memory::receive::Carries;
use tranship_network::HeldFrame;
use tranship_sys::clock::monotonic_ns;
use tranship_sys::{reserve, schedule, threads};
use tranship_transport::{Connection, Incoming, Link, Listener};
use tranship_types::{Blocker, BlockerKind, MigrationId, NodeName, Phase, SharedObject, Side};
use tranship_wire::message::{Offer, Request, Response};
use tranship_wire::{Hello, Purpose, ReadError};

use crate::admission::{HandshakePlace, Handshakes, LinkPlace, Links};
use crate::arrivals::{Arrival, Context, Inbox, Standing, lock};
use crate::control;
use crate::damaged;
use crate::demand;
use crate::destination::{self, DestinationRun};
use crate::draining;
use crate::freeze_slots::Owner;
use crate::held;
use crate::node::{Node, sentence};
use crate::paths;
use crate::policy;
use crate::probes::Probed;
use crate::registry::unix_ms;
use crate::rights::Rights;
use crate::space;
use crate::stdio;
use crate::undoing::{self, abort};
use crate::{images, logs};

/// How long the memory for pages may still be being taken when the source asks.
const MEMORY: Duration = Duration::from_secs(30);
/// How long a caller may take to show who it is.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// How long a source may be silent before its link counts as dead: longer than anything that it does in between.
const SILENCE: Duration = Duration::from_secs(300);
/// And those for pages and files: as long as a member of a group waits for its turn. A source that is gone is noticed by the
/// link itself, and one that hangs on its control link.
const IDLE: Duration = Duration::from_secs(24 * 3600);
/// Files of a skeleton.
const FILES: u32 = 4096;

/// Takes links until the listener is closed.
pub fn serve(node: &Arc<Node>, listener: &Listener) {
    let (handshakes, links) = (Arc::<Handshakes>::default(), Arc::<Links>::default());
    // Since the last link there has been an error.
    let mut failing = false;
    loop {
        let accepted = listener.accept();
        node.liveness.accepted();
        let incoming = match accepted {
            Ok(incoming) => incoming,
            Err(error) => {
                if !node.pause(Duration::from_millis(100)) {
                    return;
                }
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "links are not accepted");
                }
                continue;
            }
        };
        failing = false;
        if !reserve::fill() {
            let address = incoming.addr();
            tracing::warn!(%address, "a caller was turned away: no descriptors are to spare; {}", reserve::REMEDY);
            continue;
        }
        let place = handshakes.enter(incoming.addr().ip(), incoming.closer(), incoming.silence());
        let (node, links) = (Arc::clone(node), Arc::clone(&links));
        let spawned = threads::start("peer", move || {
            let answered = coordinator::caught("a link", || {
                answer(&node, incoming, place, &links);
                Ok(())
            });
            answered.err().into_iter().for_each(|failure| tracing::error!(%failure, "a link has ended"));
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "a caller was turned away");
        }
    }
}

fn answer(node: &Arc<Node>, incoming: Incoming, place: HandshakePlace, links: &Arc<Links>) {
    let address = incoming.addr();
    let (mut place, mut of_link) = (Some(place), None);
    let admit = |hello: &Hello| {
        if !node.peers().has(&hello.node) {
            let (here, peer) = (&node.config.node, &hello.node);
            return Err(format!(
                "node {here} does not have node {peer} among its peers; add {peer} to [peers] in the configuration of \
                 {here}, and reload its agent"
            ));
        }
        let source = hello.migration.as_ref().and_then(|id| node.arrivals.peer(id));
        of_link = Some(links.enter(&hello.node, source.as_ref() == Some(&hello.node))?);
        // Before it is welcomed: nobody takes a peer's place.
        place = None;
        Ok(())
    };
    let (mut link, hello) = match incoming.handshake_if(HANDSHAKE, admit) {
        Ok(opened) => opened,
        Err(_) if node.liveness.is_probe(address) => return,
        Err(error) => return tracing::warn!(%address, %error, "a caller was turned away"),
    };
    let peer = link.peer().clone();
    let is_source = |id: &MigrationId| node.arrivals.peer(id).is_none_or(|source| source == peer);
    if hello.migration.as_ref().is_some_and(|id| !is_source(id)) && !matches!(hello.purpose, Purpose::Control) {
        return tracing::warn!(%address, %peer, "a link for a migration of another node was turned away");
    }
    match (hello.purpose, hello.migration) {
        (Purpose::Control, id) => {
            if let Err(error) = control(node, (link, of_link.as_mut()), id.as_ref()) {
                tracing::debug!(%address, %error, "a control link ended");
            }
        }
        (Purpose::Pages { stream }, Some(id)) => {
            let Some(inbox) = node.arrivals.inbox(&id) else { return };
            let (store, carries) = match inbox.begin(link.peer(), stream) {
                Ok(begun) => begun,
                Err(failure) => return tracing::warn!(%address, %id, %failure, "a stream was turned away"),
            };
            // The source will tell its user.
            let failed = |e: &dyn std::fmt::Display| Failure::new(format!("{e} (on node {})", node.config.node));
            let wanted = carries == Carries::Wanted;
            if wanted {
                schedule::stand(schedule::Standing::Realtime);
            }
            let received = link.set_timeout(Some(IDLE)).map_err(|e| failed(&e)).and_then(|()| {
                let received = || store.receive(&mut link, carries, || inbox.named()).map_err(|e| failed(&e));
                coordinator::caught("the receipt of pages", received)
            });
            if let Err(failure) = &received {
                tracing::debug!(%id, stream, %failure, "a stream of pages broke off");
            }
            // The one for what was asked for lasts as long as the source has something to give, and has no end to wait for.
            if !wanted {
                let failed = received.is_err();
                inbox.ended(received);
                // Tasks that are being restored may wait for pages that will not come, and criu for the tasks.
                if failed && !inbox.is_ready() {
                    demand::give_up(node, &id);
                }
            }
        }
        (Purpose::Wants { resume }, Some(id)) => {
            if let Err(failure) = demand::tell(node, &id, resume, &mut link) {
                tracing::debug!(%address, %id, %failure, "a link for wanted pages ended");
            }
        }
        (purpose @ (Purpose::Files | Purpose::Trees), Some(id)) => {
            let Some(inbox) = node.arrivals.inbox(&id) else { return };
            let arriving = if purpose == Purpose::Files { &inbox.tmpfs } else { &inbox.trees };
            let received = link.set_timeout(Some(IDLE)).map_err(|e| Failure::new(e.to_string())).and_then(|()| {
                let received = || arriving.receive(&mut link, &node.config.node);
                // Whoever waits for them shall not go on waiting.
                coordinator::caught("the receipt of files", received).inspect_err(|failure| arriving.fail(failure))
            });
            if let Err(failure) = received {
                tracing::warn!(%address, %id, ?purpose, %failure, "files did not arrive");
            }
        }
        (Purpose::Log, Some(id)) => logs::receive(node, &id, &mut link, IDLE),
        (Purpose::Image, Some(id)) => {
            if let Err(failure) = images::receive(node, &mut link) {
                tracing::warn!(%address, %id, %failure, "an image did not arrive");
            }
        }
        (_, None) => {}
    }
}

/// One control link: requests are answered in their order until it ends.
fn control(
    node: &Arc<Node>,
    (mut link, place): (Connection, Option<&mut LinkPlace>),
    id: Option<&MigrationId>,
) -> Result<(), ReadError> {
    let peer = link.peer().clone();
    link.set_timeout(Some(SILENCE)).map_err(ReadError::Io)?;
    let of_damaged = |id| node.damaged.get(id).and_then(|one| one.peer().cloned());
    let known = |id| node.arrivals.peer(id).or_else(|| of_damaged(id));
    // Asked for each request: a link may be older than the migration that it names.
    let of_another = || id.and_then(known).is_some_and(|other| other != peer);
    let mut rights = Rights::of_new_link();
    let covered = |rights: &Rights| rights.covers(id.and_then(|id| node.arrivals.offer(id)));
    let (mut probed, mut committed) = (Probed::default(), false);
    let ended = loop {
        let request: Request = match tranship_wire::read_message(&mut link) {
            Ok(request) => request,
            Err(error) => break Err(error),
        };
        use Request as R;
        let of_no_migration = matches!(
            request,
            R::Clock
                | R::Check(_)
                | R::Probe { .. }
                | R::Api { .. }
                | R::Stdio { .. }
                | R::Addresses { .. }
                | R::Path { .. }
        );
        if !of_no_migration && (of_another() || !covered(&rights)) {
            tracing::warn!(%peer, "asked about a migration of another node, or over a link from before its offer");
            let refused =
                failure_response(Failure::new(format!("the migration is not one of this link of node {peer}")));
            let _ = tranship_wire::write_message(&mut link, &refused);
            break Err(ReadError::Io(io::ErrorKind::PermissionDenied.into()));
        }
        if let Request::Stdio { relay, session, sends } = &request {
            if let Some(Err(why)) = place.map(LinkPlace::relay) {
                let refused = failure_response(Failure::new(why));
                return tranship_wire::write_message(&mut link, &refused)
                    .map_err(|e| ReadError::Io(io::Error::other(e)));
            }
            return stdio::answer(node, (relay, *session, *sends), link).map_err(ReadError::Io);
        }
        if let Request::Api { method, path, body } = request {
            match control::answer(node, &peer, PassedCall { method, path, body }, &mut link) {
                Ok(()) => continue,
                Err(error) => break Err(ReadError::Io(error)),
            }
        }
        committed |= matches!(request, Request::Commit);
        // An offer that fails may leave something to be asked about.
        if matches!(request, Request::Offer(_)) && id.is_some_and(|id| node.arrivals.offer(id).is_none()) {
            rights.offer();
        }
        let answer = || Ok(reply(node, &peer, id, request, (&mut link, &mut probed)));
        let response = match coordinator::caught("the answer to a request", answer) {
            Ok(Ok(Some(response))) => response,
            Ok(Ok(None)) => continue,
            Ok(Err(error)) => break Err(error),
            Err(failure) => {
                tracing::error!(%peer, %failure, "a request failed");
                failure_response(failure)
            }
        };
        let response = control::understood(response, link.version());
        if let Err(error) = tranship_wire::write_message(&mut link, &response) {
            break Err(ReadError::Io(io::Error::other(error.to_string())));
        }
    };
    // Whoever has forwarded packets on it does so no more.
    if let Some(id) = id.filter(|_| committed && covered(&rights))
        && let Some(inbox) = node.arrivals.inbox(id)
    {
        take_over(inbox, id.clone(), true);
    }
    // Whoever is READY waits for the word, over whatever link it comes. Everybody else is undone.
    if let Some(id) = id.filter(|_| !of_another() && covered(&rights))
        && let Some(arrival) = node.arrivals.get(id)
        && lock(&arrival).standing == Standing::Open
    {
        drop(arrival);
        undoing::link_lost(node, id);
    }
    ended
}

/// Does what is requested; `None`: the request has no answer.
fn reply(
    node: &Arc<Node>,
    peer: &NodeName,
    id: Option<&MigrationId>,
    request: Request,
    (link, probed): (&mut Connection, &mut Probed),
) -> Result<Option<Response>, ReadError> {
    let response = match (request, id) {
        (Request::Clock, _) => Response::Clock { now_ns: monotonic_ns() },
        (Request::Check(offer), _) => match policy::acceptable(&offer) {
            Err(failure) => failure_response(failure),
            Ok(()) => match policy::check(node, peer, &offer) {
                refused if !refused.is_empty() => {
                    Response::Checked { blockers: refused, notes: Vec::new(), image: None }
                }
                _ => Response::Checked {
                    blockers: destination::check(node, &offer),
                    notes: Vec::new(),
                    image: images::to_send(node, &offer),
                },
            },
        },
        (Request::Offer(offer), Some(id)) => offered(node, id, peer, *offer, link),
        (Request::Shared { objects }, Some(id)) => {
            describe(node, id, &objects);
            return Ok(None);
        }
        (Request::HugePages { pages }, Some(id)) => {
            if let Some(arrival) = node.arrivals.get(id) {
                huge::take_in(&mut lock(&arrival).run.huge_pages, pages);
            }
            return Ok(None);
        }
        (Request::Skeleton { files, early, tmpfs }, Some(id)) => {
            match skeleton(node, id, (files, early, tmpfs), link) {
                Ok(()) => return Ok(None),
                Err(failure) => failure_response(failure),
            }
        }
        (Request::Held { frames, last_datagrams, last_to_groups }, Some(id)) => {
            let Some(inbox) = node.arrivals.inbox(id) else { return Ok(None) };
            held(&inbox, id, frames);
            if last_datagrams || last_to_groups {
                take_over(inbox, id.clone(), last_to_groups);
            }
            return Ok(None);
        }
        (Request::Ready { all_pages }, Some(id)) => ready(node, id, all_pages),
        (Request::Commit, Some(id)) => commit(node, id),
        (Request::Abort, Some(id)) => undoing::called_off(node, id),
        (Request::Drained { released, account }, Some(id)) => {
            account.into_iter().for_each(|account| draining::keep_account(node, id, *account));
            draining::answer(node, id, released)
        }
        (Request::FreezeSlot { group }, Some(id)) => match node.arrivals.inbox(id) {
            // A request that is late must not take a slot that nobody gives back.
            Some(_) if node.arrivals.get(id).is_none_or(|arrival| lock(&arrival).standing != Standing::Open) => {
                failure_response(Failure::new("the migration is past that point"))
            }
            Some(inbox) => {
                let owner = group.map_or_else(|| Owner::Move(id.clone()), Owner::Group);
                Response::FreezeSlot { taken: inbox.slot.take(|| node.arriving_slots.queue(owner)) }
            }
            None => failure_response(Failure::new(format!("node {} knows no migration {id}", node.config.node))),
        },
        (Request::Holding, Some(id)) => undoing::holding(node, id),
        (Request::Void, Some(id)) => undoing::void(node, id),
        (Request::Known { of, container }, Some(id)) => damaged::answer(node, id, peer, of, &container),
        (Request::Streams, Some(id)) => match streams(node, id) {
            Err(failure) => failure_response(failure),
            Ok(()) => Response::Streams,
        },
        (Request::Api { .. } | Request::Stdio { .. }, _) => {
            failure_response(Failure::new("the request has an answer of its own"))
        }
        (Request::Addresses { container, engine, addresses }, _) => {
            held::state(node, (&container, &engine), &addresses)
                .map_or_else(failure_response, |state| Response::Addresses { state })
        }
        (Request::Path { id }, _) => paths::answer(node, peer, id).unwrap_or_else(failure_response),
        (Request::Probe { bytes }, _) => match probed.receive(link, bytes) {
            Ok(()) => Response::Probed,
            Err(error) => return Err(error),
        },
        (_, None) => failure_response(Failure::new("the request belongs to no migration")),
    };
    Ok(Some(response))
}

pub fn failure_response(failure: Failure) -> Response {
    Response::Failed { message: failure.message, blockers: failure.blockers, waiting: None }
}

fn offered(node: &Arc<Node>, id: &MigrationId, peer: &NodeName, offer: Offer, link: &Connection) -> Response {
    if node.arrivals.get(id).is_some() {
        return failure_response(Failure::new(format!("migration {id} was offered already")));
    }
    if let Err(failure) = policy::acceptable(&offer) {
        return failure_response(failure);
    }
    let Ok(claim) = node.claim(&offer.container, id) else {
        // Whose migration has it is not for every peer to know.
        let (container, here) = (&offer.container, &node.config.node);
        let cause = format!("{container} is being moved already, on node {here}");
        let blocker =
            Blocker::new(BlockerKind::Busy, cause, format!("wait for it; see `tranship status` on node {here}"));
        return Response::Failed { message: blocker.to_string(), blockers: vec![blocker], waiting: None };
    };
    let context = Context { offer, began_unix_ms: unix_ms() };
    let begin = Record::Begin {
        id: id.clone(),
        side: Side::Destination,
        container: context.offer.container.clone(),
        peer: peer.clone(),
        context: serde_json::to_value(&context).unwrap_or_default(),
    };
    let journal = match Journal::create(&node.journals(), id, &begin) {
        Ok(journal) => journal,
        Err(error) => return failure_response(Failure::new(format!("node {}: {error}", node.config.node))),
    };
    let inbox = Arc::new(Inbox::default());
    let report = node.registry.begin(context.report(node, id, peer));
    let mut run = DestinationRun::new(node, id, peer, context.offer, Arc::clone(&inbox));
    run.cut_by(link.closer());
    tracing::info!(%id, container = run.container(), from = %peer, "preparing");
    let (peer, standing) = (peer.clone(), Standing::Open);
    let (journal, claim) = (Some(journal), Some(claim));
    let arrival = Arrival { peer, run, journal, begun: Vec::new(), standing, claim, report };
    // Known from the first step on: an abort that comes on another link meanwhile waits, and then undoes it.
    let arrival = node.arrivals.insert(id, arrival, Arc::clone(&inbox));
    let mut working = lock(&arrival);
    let preparation = node.arriving_slots.prepare(&|| inbox.failed().is_some());
    let prepared = match &mut *working {
        Arrival { run, journal: Some(journal), begun, .. } => coordinator::prepare(run, journal, &node.faults, begun),
        _ => Err(Failure::new("the migration has ended")),
    };
    drop((preparation, working));
    match prepared {
        Ok(()) => Response::Prepared {
            shared: crate::layout::preload().is_some(),
            keeps_datagrams: true,
            shares_networks: true,
            shares_memory: true,
            gives_slots: true,
            keeps_log: true,
        },
        Err(failure) => {
            abort(node, id, &failure);
            failure_response(failure)
        }
    }
}

fn arrival(node: &Node, id: &MigrationId) -> Result<Arc<Mutex<Arrival>>, Failure> {
    node.arrivals.get(id).ok_or_else(|| Failure::new(format!("node {} knows no migration {id}", node.config.node)))
}

/// Takes note of shared memory whose pages are to come.
fn describe(node: &Node, id: &MigrationId, objects: &[SharedObject]) {
    let Some(inbox) = node.arrivals.inbox(id) else { return };
    let described = inbox.store().and_then(|s| s.describe_shared(objects).map_err(|e| Failure::new(e.to_string())));
    if let Err(failure) = described {
        // There is no answer that could carry it; whoever waits for the pages will say it.
        inbox.ended(Err(failure));
    }
}

fn skeleton(
    node: &Node,
    id: &MigrationId,
    (files, early, tmpfs): (u32, bool, bool),
    link: &mut Connection,
) -> Result<(), Failure> {
    let arrival = arrival(node, id)?;
    let inbox = node.arrivals.inbox(id).ok_or_else(|| Failure::new("the migration has ended"))?;
    let _sender = inbox.images.enter()?;
    if tmpfs {
        inbox.tmpfs.expect();
    }
    let images = lock(&arrival).run.images();
    if files > FILES {
        return Err(Failure::new(format!("a skeleton of {files} files is not believable")));
    }
    if !early {
        // The engine was given a file of its own making to start with; the source's takes its place.
        let _ = std::fs::remove_file(images.join("descriptors.json"));
    }
    // The images are in memory.
    let own = inbox.files_to_come();
    let (start, mut room) = (monotonic_ns(), destination::available_memory().saturating_add(own));
    for _ in 0..files {
        let file = tranship_wire::receive_file(link, &images, room).map_err(|e| {
            let why = format!("the skeleton cannot be received on node {}: {}", node.config.node, sentence(&e));
            space::explained(node, Failure::new(why))
        })?;
        room -= file.size;
    }
    if !early {
        lock(&arrival).run.timeline.note("skeleton: received", start, monotonic_ns());
    }
    Ok(())
}

/// Whether pages can be received: no stream has failed, and there is memory for what will come. That may still be being taken, which is waited for; what is
/// left then is hardly needed, since pages of zeros take none.
fn streams(node: &Node, id: &MigrationId) -> Result<(), Failure> {
    let Some(inbox) = node.arrivals.inbox(id) else { return Ok(()) };
    inbox.failed().map_or(Ok(()), Err)?;
    let Ok(store) = inbox.store() else { return Ok(()) };
    let there = store.populated_until(Instant::now() + MEMORY);
    there.map(drop).map_err(|error| match (inbox.failed(), arrival(node, id)) {
        (Some(failure), _) | (None, Err(failure)) => failure,
        (None, Ok(found)) => lock(&found).run.no_memory(&error),
    })
}

fn ready(node: &Arc<Node>, id: &MigrationId, all_pages: bool) -> Response {
    let found = match arrival(node, id) {
        Ok(found) => found,
        Err(failure) => return failure_response(failure),
    };
    let made = {
        let mut arrival = lock(&found);
        let Arrival { run, journal, begun, standing, report, .. } = &mut *arrival;
        if *standing != Standing::Open {
            return failure_response(Failure::new("the migration is past that point"));
        }
        let Some(journal) = journal else { return failure_response(Failure::new("the migration has ended")) };
        run.all_pages = all_pages;
        report.change(|r| r.phase = Phase::Transfer);
        let ready = coordinator::make_ready(run, journal, &node.faults, begun)
            .and_then(|()| node.arrivals.inbox(id).map_or(Ok(()), |inbox| inbox.made_ready()));
        ready.map(|()| {
            *standing = Standing::Ready;
            report.change(|r| r.phase = Phase::Ready);
            run.timeline.take(Side::Destination)
        })
    };
    match made {
        Ok(parts) => {
            tracing::info!(%id, "ready");
            Response::Ready { parts }
        }
        Err(failure) => {
            abort(node, id, &failure);
            failure_response(failure)
        }
    }
}

/// The word to commit; it may come again, also after a restart.
pub fn commit(node: &Arc<Node>, id: &MigrationId) -> Response {
    if let Err(failure) = damaged::told(node, id, FromSource::Committed) {
        return failure_response(failure);
    }
    let found = match arrival(node, id) {
        Ok(found) => found,
        // A destination forgets a migration only when the source has asked whether it has drained. If it knows nothing
        // now it holds no copy, and the source must keep its own.
        Err(failure) => return failure_response(failure),
    };
    let mut arrival = lock(&found);
    match arrival.standing {
        Standing::Open => return failure_response(Failure::new("there is nothing to commit: it was never ready")),
        Standing::Running | Standing::Drained => {}
        Standing::Ready => {
            let Arrival { run, journal: Some(journal), begun, report, .. } = &mut *arrival else {
                return failure_response(Failure::new("the migration has ended"));
            };
            report.change(|r| r.phase = Phase::Resume);
            if let Err(failure) = coordinator::commit(run, journal, &node.faults, begun) {
                tracing::warn!(%id, %failure, "the commit will be tried again");
                return failure_response(failure);
            }
            arrival.standing = Standing::Running;
            arrival.report.change(|r| r.phase = Phase::Drain);
            tracing::info!(%id, "running");
            node.arrivals.inbox(id).iter().for_each(|inbox| inbox.slot.linger());
            let (its_node, its_id, found) = (Arc::clone(node), id.clone(), Arc::clone(&found));
            node.start_or_lend("drain", move || draining::watch(&its_node, &its_id, &found));
        }
    }
    let resumed_ns = arrival.run.resumed_ns.unwrap_or_else(monotonic_ns);
    Response::Running { resumed_ns, parts: arrival.run.timeline.take(Side::Destination) }
}

/// Packets that reached the source while the container was stopped. They are worth an attempt, and no more: whoever sent them
/// sends them again, or expected that some are lost.
fn held(inbox: &Inbox, id: &MigrationId, frames: serde_json::Value) {
    let delivered = serde_json::from_value::<Vec<HeldFrame>>(frames)
        .map_err(|e| e.to_string())
        .and_then(|frames| inbox.deliver(frames).map_err(|e| e.to_string()));
    match delivered {
        Ok(count) => tracing::debug!(%id, count, "held packets delivered"),
        Err(error) => tracing::warn!(%id, %error, "held packets could not be delivered"),
    }
}

/// Opens the gate to packets, on a thread of its own: it takes some 20 ms, and what it is late for comes out of order.
fn take_over(inbox: Arc<Inbox>, id: MigrationId, groups: bool) {
    let open = move || {
        schedule::stand(schedule::Standing::Realtime);
        match groups {
            true => inbox.take_over_groups(&id),
            false => inbox.take_over_packets(&id),
        }
    };
    if let Err(refused) = threads::start_or_back("takeover", open) {
        schedule::keeping(refused.work);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranship_wire::Versions;

    #[test]
    fn an_older_peer_is_sent_a_kind_that_it_can_read() {
        let refused = || Failure::blocked(vec![Blocker::new(BlockerKind::Policy, "a", "b")]).unwrap();
        for (version, kind) in [(Versions::OPTIONS - 1, BlockerKind::Engine), (Versions::OPTIONS, BlockerKind::Policy)]
        {
            let Response::Failed { blockers, .. } = control::understood(failure_response(refused()), version) else {
                panic!()
            };
            assert_eq!(blockers[0].kind, kind, "version {version}");
        }
    }
}
