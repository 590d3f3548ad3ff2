//! Connections are taken also where descriptors are lacking: such a caller is told so, and does not wait.

use std::fs::File;
use std::io;
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

/// A listener that keeps one descriptor to turn callers away with.
pub(crate) struct Accepting {
    listener: UnixListener,
    spare: Option<File>,
}

impl Accepting {
    pub(crate) fn new(listener: UnixListener) -> Self {
        Self { listener, spare: spare() }
    }

    /// Takes the next caller with the spare descriptor, and tells it why nobody answers.
    async fn turn_away(&mut self) {
        if self.spare.take().is_some()
            && let Ok(Ok((stream, _))) = timeout(REQUEST, self.listener.accept()).await
        {
            // A caller that has gone is told nothing.
            let _ = timeout(REQUEST, refuse(stream)).await;
        } else {
            sleep(PAUSE).await;
        }
        self.spare = spare();
    }
}

impl axum::serve::Listener for Accepting {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok(taken) => {
                    self.spare = self.spare.take().or_else(spare);
                    return taken;
                }
                // EMFILE and ENFILE have no kind.
                Err(error) if matches!(error.raw_os_error(), Some(23 | 24)) => {
                    tracing::error!(%error, "a caller is turned away");
                    self.turn_away().await;
                }
                Err(error) => {
                    tracing::error!(%error, "a caller cannot be taken");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
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
