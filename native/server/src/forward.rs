//! Requests that the control plane answers: they go to its HTTP application over pairs of connected Unix sockets.
//!
//! Both planes are in one process, so nothing listens, and no name in the file system exists that others could reach or that a
//! kill would leave: each connection is a `socketpair`, and the number of its other descriptor is a datagram to the control plane.
//!
//! A request with a body is announced first, by its head alone: so one that is refused is answered before its body is received,
//! and what the control plane is sent is complete.

use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::net::UnixDatagram as StdUnixDatagram;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{CONTENT_LENGTH, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Request, Response, Uri, Version};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::{UnixDatagram, UnixStream};

/// Connections to the control plane that are kept.
const MAX_IDLE: usize = 64;
/// Headers that the data plane sets; a client's headers of these names are dropped.
const PREFIX: &str = "kvevents-";
const PEER: HeaderName = HeaderName::from_static("kvevents-peer");
/// Length of the body that a request has, or `chunked`: it was not received yet.
const ANNOUNCED: HeaderName = HeaderName::from_static("kvevents-announced");
/// Headers that apply to one connection only.
const HOP_BY_HOP: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "expect",
];

/// The part of a request that is sent.
pub(crate) enum Sent {
    /// Its head, with the length of the body.
    Announced(String),
    /// All of it.
    Whole(Bytes),
}

/// The control plane's HTTP application.
pub(crate) struct Upstream {
    /// Socket to which the descriptors of new connections are sent.
    acceptor: UnixDatagram,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

impl Upstream {
    /// Call it in the runtime.
    pub(crate) fn new(acceptor: StdUnixDatagram) -> std::io::Result<Self> {
        acceptor.set_nonblocking(true)?;
        Ok(Self {
            acceptor: UnixDatagram::from_std(acceptor)?,
            idle: Mutex::default(),
        })
    }

    /// Returns its answer to a request. None if it ends or fails before it answers.
    pub(crate) async fn ask(&self, head: &Parts, peer: &str, sent: Sent) -> Option<Response<Incoming>> {
        loop {
            let (mut sender, was_idle) = match self.idle() {
                Some(sender) => (sender, true),
                None => (self.connect().await?, false),
            };
            let body = match &sent {
                Sent::Announced(_) => Bytes::new(),
                Sent::Whole(body) => body.clone(),
            };
            let answer = sender.send_request(request(head, peer, &sent, body)?).await;
            match answer {
                Ok(answer) => {
                    let mut idle = self.idle.lock();
                    if idle.len() < MAX_IDLE {
                        idle.push(sender);
                    }
                    return Some(answer);
                }
                // It was closed meanwhile, before it was used.
                Err(error) if was_idle && error.is_canceled() => {}
                Err(_) => return None,
            }
        }
    }

    fn idle(&self) -> Option<SendRequest<Full<Bytes>>> {
        let mut idle = self.idle.lock();
        idle.retain(|sender| !sender.is_closed());
        let ready = idle.iter().rposition(SendRequest::is_ready)?;
        Some(idle.swap_remove(ready))
    }

    async fn connect(&self) -> Option<SendRequest<Full<Bytes>>> {
        let (ours, theirs) = UnixStream::pair().ok()?;
        let theirs = theirs.into_std().ok()?;
        self.acceptor.send(&theirs.as_raw_fd().to_ne_bytes()).await.ok()?;
        let _ = theirs.into_raw_fd(); // the control plane closes it
        let (sender, connection) = handshake(TokioIo::new(ours)).await.ok()?;
        tokio::spawn(connection);
        Some(sender)
    }
}

fn request(head: &Parts, peer: &str, sent: &Sent, body: Bytes) -> Option<Request<Full<Bytes>>> {
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = head.method.clone();
    *request.version_mut() = Version::HTTP_11;
    *request.uri_mut() = match head.uri.path_and_query() {
        Some(target) => Uri::from(target.clone()),
        None => head.uri.clone(),
    };
    let headers = request.headers_mut();
    *headers = end_to_end(&head.headers);
    headers.remove(CONTENT_LENGTH);
    headers.insert(PEER, HeaderValue::from_str(peer).ok()?);
    if let Sent::Announced(length) = sent {
        headers.insert(ANNOUNCED, HeaderValue::from_str(length).ok()?);
    }
    Some(request)
}

/// Headers without those that belong to one connection, or are ours.
pub(crate) fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut found = headers.clone();
    for name in HOP_BY_HOP {
        found.remove(name);
    }
    let ours: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with(PREFIX))
        .cloned()
        .collect();
    for name in ours {
        found.remove(name);
    }
    found
}
