//! The destination's demands: pages that its tasks wait for and that are still at the source.

use std::io::Write;
use std::time::Duration;

use tranship_coordinator::Failure;
use tranship_memory::pager::PagerHandle;
use tranship_memory::receive::Store;
use tranship_sys::schedule;
use tranship_transport::{Connection, Link};
use tranship_types::MigrationId;
use tranship_wire::{FrameHeader, runs};

use crate::arrivals::{Standing, lock};
use crate::inspection::STREAMS;
use crate::layout::Layout;
use crate::node::{Node, failed};

/// How long a pager may take to say how it stands.
const ANSWER: Duration = Duration::from_secs(5);
/// How often a link on which nothing is wanted is looked after.
const IDLE: Duration = Duration::from_secs(1);

/// The longest time from the opening of the link until all pages are named: that of the rounds, which may go on for days. A stream that breaks ends it.
const NAMING: Duration = Duration::from_secs(365 * 86_400);

/// Tells the source, over one of its links, what is wanted; first, where it begins again, everything that is lacking. Ends
/// when nothing is lacking any more, or the link breaks, or the source has opened another one.
pub fn tell(node: &Node, id: &MigrationId, resume: bool, link: &mut Connection) -> Result<(), Failure> {
    if node.arrivals.peer(id).as_ref() != Some(link.peer()) {
        return Err(Failure::new(format!("node {} is not the source of migration {id}", link.peer())));
    }
    let root = Layout::new(&node.config.run_dir, id).root().to_owned();
    let pager = || PagerHandle::connect_within(&root, ANSWER).map_err(failed);
    if resume {
        let arrival = node.arrivals.get(id).ok_or_else(|| failed("the migration is over"))?;
        if lock(&arrival).standing != Standing::Running {
            return Err(failed("the container does not run here, so that nothing is lacking"));
        }
        let inbox = node.arrivals.inbox(id).ok_or_else(|| failed("the migration is over"))?;
        inbox.open_again(&link.peer().clone(), STREAMS, || {
            Store::attach(PagerHandle::connect(&root).map_err(failed)?).map_err(failed)
        })?;
        for (space, ranges) in pager()?.missing(ANSWER).map_err(failed)? {
            runs::write_want(link, space, &ranges).map_err(failed)?;
        }
        tranship_wire::write_header(link, &FrameHeader::Named).map_err(failed)?;
        link.flush().map_err(failed)?;
    }
    schedule::stand(schedule::Standing::Realtime);
    let wishes = pager()?;
    wishes.subscribe().map_err(failed)?;
    if !resume && all_named(node, id) {
        // Nothing is wanted before. The source now sends the pages that restored threads use first.
        tranship_wire::write_header(link, &FrameHeader::Named).map_err(failed)?;
        link.flush().map_err(failed)?;
    }
    loop {
        // The pager hangs up when nothing is lacking, or another link has taken over.
        let Ok(wanted) = wishes.wanted(IDLE) else { return Ok(()) };
        if let Some((space, ranges)) = wanted {
            runs::write_want(link, space, &ranges).map_err(failed)?;
            link.flush().map_err(failed)?;
        }
    }
}

/// Waits until all pages that come later are named; false if they never will be.
fn all_named(node: &Node, id: &MigrationId) -> bool {
    let Some(inbox) = node.arrivals.inbox(id) else { return false };
    inbox.wait_named(NAMING).is_ok()
}

/// Ends the pager of a copy that nobody will need: tasks that wait in it for pages see zeros, and are ended before they run.
pub fn give_up(node: &Node, id: &MigrationId) {
    let layout = Layout::new(&node.config.run_dir, id);
    if let Ok(pager) = PagerHandle::connect_within(layout.root(), ANSWER)
        && let Err(error) = pager.quit()
    {
        tracing::warn!(%id, %error, "the pager of a copy that is not needed could not be ended");
    }
}
