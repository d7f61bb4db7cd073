//! The socket of a client. It reports received and written bytes, and replaces some answers of hyper by the service's errors.
//!
//! hyper answers a head that it cannot read with an empty 400 or 431. The socket replaces this answer by an error in the form of all other
//! errors. If a head is not complete in time, the socket passes bytes to hyper that no head can contain. Then hyper refuses the request,
//! and the socket replaces the refusal by a 408.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::connections::{Connection, Connections, Order, count};
use crate::problems::Problem;
use crate::settings::Limits;

/// Maximum number of bytes of the first line and the headers of a request: eight times the limit of common proxies.
pub(crate) const MAX_HEAD: usize = 65_536;
/// Maximum number of headers of an HTTP/1.1 request: the limit of hyper.
const MAX_HEADERS: usize = 100;
/// Bytes that make any incomplete head complete and malformed.
const MALFORMED_HEAD_END: &[u8] = b"\0\r\n\r\n";

pub(crate) struct Socket<S> {
    inner: S,
    connections: Arc<Connections>,
    connection: Arc<Connection>,
    limits: Limits,
    is_poisoned: bool,
    /// Number of bytes that were read after bytes were last written. While a head is not complete, this is the number of its bytes.
    received: usize,
    /// The answer that replaces hyper's refusal, and the number of its bytes that were written.
    refusal: Option<(Vec<u8>, usize)>,
    /// Whether the client might be sending when the last answer is written. If it might, closing the connection immediately would destroy
    /// the answer.
    lingers: bool,
    has_shut_down: bool,
}

impl<S> Socket<S> {
    pub(crate) fn new(inner: S, connections: Arc<Connections>, connection: Arc<Connection>, limits: Limits) -> Self {
        Self {
            inner,
            connections,
            connection,
            limits,
            is_poisoned: false,
            received: 0,
            refusal: None,
            lingers: false,
            has_shut_down: false,
        }
    }

    /// If `bytes` are hyper's answer to an unreadable head, returns the error that replaces it. Returns None for any other answer.
    fn refusal(&self, bytes: &[u8]) -> Option<Problem> {
        let is_short = bytes.ends_with(b"\r\n\r\n") && bytes.starts_with(b"HTTP/1.1 4");
        if !is_short || !contains(bytes, b"content-length: 0\r\n") || contains(bytes, b"content-type") {
            return None;
        }
        Some(if self.is_poisoned {
            Problem::too_slow(self.limits.request_seconds)
        } else if bytes.starts_with(b"HTTP/1.1 400") {
            Problem::malformed("Invalid HTTP request received.")
        } else if self.received >= MAX_HEAD {
            Problem::headers_too_large(&format!("{MAX_HEAD} bytes of headers"))
        } else {
            Problem::headers_too_large(&format!("{MAX_HEADERS} headers, or its Content-Length is too large"))
        })
    }
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

impl<S: AsyncWrite + Unpin> Socket<S> {
    /// Writes the remaining bytes of the refusal in place of `size` bytes that hyper has offered.
    fn write_refusal(&mut self, cx: &mut Context<'_>, size: usize) -> Poll<io::Result<usize>> {
        let Some((bytes, written)) = &mut self.refusal else {
            return Poll::Ready(Ok(size));
        };
        while *written < bytes.len() {
            let count = ready!(Pin::new(&mut self.inner).poll_write(cx, &bytes[*written..]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            *written += count;
        }
        self.refusal = None;
        Poll::Ready(Ok(size))
    }

    fn note(&mut self, result: &Poll<io::Result<usize>>, offered: usize) {
        let written = match result {
            Poll::Ready(Ok(count)) => *count,
            Poll::Ready(Err(_)) => return,
            Poll::Pending => 0,
        };
        if written > 0 {
            self.received = 0;
        }
        self.connections
            .note_written(&self.connection, written, offered - written, Instant::now());
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Socket<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.is_poisoned {
            return Poll::Ready(Ok(()));
        }
        if this.connection.order() == Order::Refuse && buf.remaining() >= MALFORMED_HEAD_END.len() {
            this.is_poisoned = true;
            buf.put_slice(MALFORMED_HEAD_END);
            return Poll::Ready(Ok(()));
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
        let now = Instant::now();
        this.received += buf.filled().len() - before;
        if buf.filled().len() > before {
            this.connections.note_received(&this.connection, now);
        } else if this.connections.note_left(&this.connection, now) {
            // If hyper read the end of the input, it would drop the answer. Hyper reads again after the answer.
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Socket<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let offered = bufs.iter().map(|buf| buf.len()).sum();
        if this.refusal.is_some() {
            return this.write_refusal(cx, offered);
        }
        if let [only] = bufs
            && let Some(problem) = this.refusal(only)
        {
            count(&this.connections.refusals, problem.reason);
            this.refusal = Some((problem.as_http1(), 0));
            this.lingers = true;
            return this.write_refusal(cx, offered);
        }
        let result = Pin::new(&mut this.inner).poll_write_vectored(cx, bufs);
        this.note(&result, offered);
        result
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.has_shut_down {
            this.connections.note_closing(&this.connection, Instant::now());
            ready!(Pin::new(&mut this.inner).poll_shutdown(cx))?;
            this.has_shut_down = true;
        }
        if !this.lingers && !this.connection.lingers() {
            return Poll::Ready(Ok(()));
        }
        // Further input is discarded until the client closes the connection or the deadline passes.
        let mut room = [0; 4_096];
        loop {
            let mut buf = ReadBuf::new(&mut room);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut buf))?;
            if buf.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }
}
