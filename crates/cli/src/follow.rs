//! Following a move, or a group's moves, from its first report to its end, through Ctrl-C and an agent's restart.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tranship_api::{Client, ClientError, Events, Watched};
use tranship_types::Outcome;

use crate::plain::plain;
use crate::progress::{Shows, TICK};

/// How long an agent may be away: systemd restarts one that died after a second, and it then reads its journal.
pub const AWAY_AT_MOST: Duration = Duration::from_secs(30);
/// How often one that is away is tried.
pub const TRY_EVERY: Duration = Duration::from_millis(200);

/// How following came to an end; each with the last report that was seen.
pub enum Followed<R> {
    /// The move has ended.
    Ended(R),
    /// Ctrl-C; the move goes on.
    Interrupted(R),
    /// The agent went away and did not come back, or knows the move no more.
    Lost(R, ClientError),
}

enum News<R> {
    Report(Box<R>),
    Away,
    Lost(ClientError),
}

/// Follows the move whose report is `first` until it has ended.
pub async fn follow<R: Watched>(client: &Client, first: R, progress: &mut impl Shows<R>) -> Followed<R> {
    let (sender, mut news) = mpsc::channel(1);
    let reader = tokio::spawn(read(client.clone(), first.id().clone(), sender));
    let mut ticks = tokio::time::interval_at(Instant::now() + TICK, TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut interrupt = std::pin::pin!(interrupted());
    let mut latest = first;
    progress.show(&plain(&latest));
    let mut away = false;
    let followed = loop {
        if latest.outcome() != Outcome::Running {
            break Followed::Ended(latest);
        }
        tokio::select! {
            Some(news) = news.recv() => match news {
                News::Report(report) => {
                    (latest, away) = (*report, false);
                    progress.show(&plain(&latest));
                }
                News::Away => {
                    away = true;
                    let patience = AWAY_AT_MOST.as_secs();
                    progress.note(&format!("the agent does not answer any more; waiting up to {patience} s for it …"));
                }
                News::Lost(error) => break Followed::Lost(latest, error),
            },
            // The rate of a report from before the agent went away is no rate any more.
            _ = ticks.tick(), if !away => progress.tick(&plain(&latest)),
            () = &mut interrupt => break Followed::Interrupted(latest),
        }
    };
    reader.abort();
    progress.finish();
    followed
}

/// Completes at Ctrl-C; never where the signal cannot be had, because then it kills the process, which is right too.
pub async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Reads reports until the receiver is gone or there is no hope of another.
async fn read<R: Watched>(client: Client, id: R::Id, news: mpsc::Sender<News<R>>) {
    let mut events: Option<Events<R>> = None;
    let mut away_since: Option<Instant> = None;
    loop {
        let next = match &mut events {
            Some(events) => events.next().await,
            None => match client.events(&id).await {
                Ok(fresh) => {
                    events = Some(fresh);
                    continue;
                }
                Err(e) => Err(e),
            },
        };
        let message = match next {
            Ok(report) => {
                away_since = None;
                News::Report(Box::new(report))
            }
            Err(error) => {
                events = None;
                let first = away_since.is_none();
                let since = *away_since.get_or_insert_with(Instant::now);
                if !error.is_unreachable() || since.elapsed() > AWAY_AT_MOST {
                    News::Lost(error)
                } else if first {
                    News::Away
                } else {
                    tokio::time::sleep(TRY_EVERY).await;
                    continue;
                }
            }
        };
        let last = matches!(message, News::Lost(_));
        if news.send(message).await.is_err() || last {
            return;
        }
    }
}
