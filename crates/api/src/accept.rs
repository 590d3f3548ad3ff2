//! Connections are taken also where descriptors are lacking: such a caller is told so, and does not wait.

use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};

use crate::{ApiError, ErrorKind, ServiceError};

/// After an error, until the next attempt.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a caller that is turned away may take to send its request.
const REQUEST: Duration = Duration::from_secs(1);

/// One descriptor, to turn callers away with. Opened early it has a low number, which stays of use where the limit is
/// lowered later.
static SPARE: Mutex<Option<File>> = Mutex::new(None);

fn spare() -> MutexGuard<'static, Option<File>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the spare descriptor if there is none.
pub(crate) fn keep_spare() {
    let mut spare = spare();
    if spare.is_none() {
        *spare = File::open("/dev/null").ok();
    }
}

/// A listener that goes on where descriptors are lacking.
pub(crate) struct Accepting {
    listener: UnixListener,
    /// Since the last caller that was taken there has been an error.
    failing: bool,
}

impl Accepting {
    pub(crate) fn new(listener: UnixListener) -> Self {
        Self { listener, failing: false }
    }

    /// Takes the next caller with the spare descriptor, and tells it why nobody answers.
    async fn turn_away(&mut self) {
        let spare = spare().take();
        if spare.map(drop).is_some()
            && let Ok(Ok((stream, _))) = timeout(REQUEST, self.listener.accept()).await
        {
            // A caller that has gone is told nothing.
            let _ = timeout(REQUEST, refuse(stream)).await;
        } else {
            sleep(PAUSE).await;
        }
        keep_spare();
    }
}

impl axum::serve::Listener for Accepting {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok(taken) => {
                    keep_spare();
                    self.failing = false;
                    return taken;
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.failing, true) {
                        tracing::error!(%error, "callers cannot be taken");
                    }
                    // EMFILE and ENFILE have no kind.
                    match error.raw_os_error() {
                        Some(23 | 24) => self.turn_away().await,
                        _ => sleep(PAUSE).await,
                    }
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

async fn refuse(mut stream: UnixStream) -> io::Result<()> {
    // What is not read would reset the connection.
    let mut request = vec![0; 16 << 10];
    let _ = stream.read(&mut request).await?;
    let remedy = "try again when moves have ended, or raise LimitNOFILE= of the agent's unit";
    let error = ServiceError::new(ErrorKind::Unusable, "the agent has no file descriptors left", remedy);
    let body = serde_json::to_string(&ApiError { error: error.body })?;
    let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close";
    stream.write_all(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes()).await?;
    stream.shutdown().await
}
