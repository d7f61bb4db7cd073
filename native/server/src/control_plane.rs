//! Requests that the control plane answers. It takes them from a queue, and answers each through a [`Request`].
//!
//! If an event is added to an empty queue, a byte in a socket wakes the control plane. So no thread of the data plane waits for the Python
//! interpreter.
//!
//! Of a refused request, the control plane gets only the head, and answers with the error before the body is received.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use hyper::Response;
use hyper::http::request::Parts;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use crate::body::{Body, PieceStream};
use crate::settings::{Access, decoded_path};

/// Maximum number of pieces of one answer that wait to be sent.
const WAITING_PIECES: usize = 2;

/// A message to the control plane.
pub enum Event {
    /// A request to answer.
    Request(Box<Request>),
    /// The ID of an answer that is sent in pieces: its client has read a piece, or has left.
    Changed(u64),
}

/// The queue of the control plane.
pub(crate) struct ControlPlane {
    /// The queue; None after the control plane has ended.
    events: Mutex<Option<VecDeque<Event>>>,
    waker: UnixStream,
    /// ID of the newest answer that is sent in pieces.
    streams: AtomicU64,
}

impl ControlPlane {
    /// `waker` receives a byte if an event is added to an empty queue.
    pub(crate) fn new(waker: UnixStream) -> std::io::Result<Self> {
        waker.set_nonblocking(true)?;
        Ok(Self {
            events: Mutex::new(Some(VecDeque::new())),
            waker,
            streams: AtomicU64::new(0),
        })
    }

    /// Adds a request to the queue, and returns its answer. Returns None if the control plane ends before the answer.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        head: &Parts,
        peer: &str,
        access: &Access,
        body: Bytes,
    ) -> Option<Response<Body>> {
        let (answer, answered) = oneshot::channel();
        self.push(Event::Request(Box::new(Request {
            head: head.clone(),
            peer: peer.to_owned(),
            access: access.clone(),
            body,
            answer: Mutex::new(Some(answer)),
            control_plane: self.clone(),
        })));
        answered.await.ok()
    }

    fn push(&self, event: Event) {
        let mut guard = self.events.lock();
        let Some(events) = guard.as_mut() else { return };
        events.push_back(event);
        if events.len() == 1 {
            // If the socket is full, the bytes in it already wake the control plane.
            let _ = (&self.waker).write(&[0]);
        }
    }

    /// Takes all events from the queue.
    pub(crate) fn take(&self) -> VecDeque<Event> {
        self.events.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Drops all events in the queue, and all later events.
    pub(crate) fn close(&self) {
        let events = self.events.lock().take();
        drop(events); // without the lock
    }
}

/// Names and values of headers.
pub type Headers = Vec<(Vec<u8>, Vec<u8>)>;

/// A request that waits for the control plane's answer. If it is dropped without an answer, the client gets an error that says that the
/// service is ending.
pub struct Request {
    head: Parts,
    peer: String,
    access: Access,
    body: Bytes,
    answer: Mutex<Option<oneshot::Sender<Response<Body>>>>,
    control_plane: Arc<ControlPlane>,
}

impl Request {
    /// The method.
    pub fn method(&self) -> &str {
        self.head.method.as_str()
    }

    /// The path of the target, without percent-encoding.
    pub fn path(&self) -> Cow<'_, str> {
        decoded_path(&self.head.uri)
    }

    /// Path and method of the endpoint, as in the table of endpoints. The path is empty if no endpoint has the request's path. The method
    /// is empty if the endpoint does not have the request's method.
    pub fn endpoint(&self) -> (&str, &str) {
        (&self.access.path, &self.access.method)
    }

    /// Name of the caller; empty if the endpoint is unknown.
    pub fn caller(&self) -> &str {
        &self.access.caller
    }

    /// The reason why the request is refused; None if the request is not refused.
    pub fn refusal(&self) -> Option<&str> {
        self.access.refusal
    }

    /// The query string of the target.
    pub fn query(&self) -> &str {
        self.head.uri.query().unwrap_or_default()
    }

    /// Names of headers in lower case, and their values.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &[u8])> {
        (self.head.headers.iter()).map(|(name, value)| (name.as_str(), value.as_bytes()))
    }

    /// Address and port of the client.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The body; empty if the request is refused.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// Answers the request. Only the first call has an effect.
    ///
    /// # Errors
    /// If the status or a header is invalid.
    pub fn respond(&self, status: u16, headers: &Headers, body: Vec<u8>) -> Result<(), hyper::http::Error> {
        self.answer(status, headers, Body::full(body.into()))
    }

    /// Begins an answer that is sent in pieces.
    ///
    /// # Errors
    /// If the status or a header is invalid.
    pub fn stream(&self, status: u16, headers: &Headers) -> Result<Stream, hyper::http::Error> {
        let (sender, receiver) = mpsc::channel(WAITING_PIECES);
        let number = self.control_plane.streams.fetch_add(1, Ordering::Relaxed);
        let is_complete = Arc::new(AtomicBool::new(false));
        let control_plane = self.control_plane.clone();
        let pieces = PieceStream::new(receiver, is_complete.clone(), move || {
            control_plane.push(Event::Changed(number));
        });
        self.answer(status, headers, Body::Pieces(pieces))?;
        Ok(Stream {
            number,
            sender: Mutex::new(Some(sender)),
            is_complete,
        })
    }

    fn answer(&self, status: u16, headers: &Headers, body: Body) -> Result<(), hyper::http::Error> {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(name.as_slice(), value.as_slice());
        }
        let response = response.body(body)?;
        if let Some(answer) = self.answer.lock().take() {
            let _ = answer.send(response); // the client might have left
        }
        Ok(())
    }
}

/// An answer that the control plane sends in pieces.
pub struct Stream {
    /// The ID of the answer in [`Event::Changed`].
    pub number: u64,
    sender: Mutex<Option<mpsc::Sender<Bytes>>>,
    is_complete: Arc<AtomicBool>,
}

impl Stream {
    /// Sends a piece. Returns false, and sends nothing, if too many pieces wait to be sent, or if the client has left. When there is room
    /// again, an [`Event::Changed`] follows.
    pub fn send(&self, piece: Bytes) -> bool {
        let sender = self.sender.lock();
        sender.as_ref().is_some_and(|sender| sender.try_send(piece).is_ok())
    }

    /// Whether the client has closed the connection.
    pub fn is_gone(&self) -> bool {
        self.sender.lock().as_ref().is_none_or(mpsc::Sender::is_closed)
    }

    /// Records that the answer is complete.
    pub fn finish(&self) {
        self.is_complete.store(true, Ordering::Release);
    }

    /// Ends the answer. If the answer is not complete, also closes the connection.
    pub fn close(&self) {
        self.sender.lock().take();
    }
}
