//! Errors that belong to a connection rather than to a request; all others are the control plane's. They are problem details of
//! RFC 9457, as `kvevents.client.schemas.Problem` has them.

use bytes::Bytes;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use crate::body::Body;

pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");
const PROBLEM: &str = "application/problem+json";
pub(crate) const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// An error as clients see it.
#[derive(Debug)]
pub(crate) struct Problem {
    /// What happened, as a sentence.
    pub(crate) detail: String,
    pub(crate) reason: &'static str,
    pub(crate) hint: &'static str,
    pub(crate) status: StatusCode,
}

impl Serialize for Problem {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let words = self.reason.replace('-', " ");
        let (first, rest) = words.split_at(1);
        let mut problem = to.serialize_struct("Problem", 7)?;
        problem.serialize_field("type", &format!("urn:kvevents:problem:{}", self.reason))?;
        problem.serialize_field("title", &format!("{}{rest}", first.to_ascii_uppercase()))?;
        problem.serialize_field("status", &self.status.as_u16())?;
        problem.serialize_field("detail", &self.detail)?;
        problem.serialize_field("reason", self.reason)?;
        problem.serialize_field("hint", self.hint)?;
        problem.serialize_field("error", &self.detail)?;
        problem.end()
    }
}

impl Problem {
    pub(crate) fn too_slow(seconds: f64) -> Self {
        Self {
            detail: format!("the request was not complete after {seconds} s"),
            reason: "too-slow",
            hint: "send it faster",
            status: StatusCode::REQUEST_TIMEOUT,
        }
    }

    pub(crate) fn too_much_at_once(limit: usize) -> Self {
        Self {
            detail: format!("requests hold more than {limit} bytes together"),
            reason: "too-much-at-once",
            hint: "ask again; see limits.max_received_bytes",
            status: StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    pub(crate) fn too_many_clients(limit: usize) -> Self {
        Self {
            detail: format!("{limit} clients are connected, and each has a request in progress"),
            reason: "too-many-clients",
            hint: "ask again in a second, or raise limits.max_clients",
            status: StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    pub(crate) fn malformed(detail: impl Into<String>) -> Self {
        Self {
            detail: detail.into(),
            reason: "malformed-request",
            hint: "speak HTTP/1.1",
            status: StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn not_a_proxy() -> Self {
        Self {
            detail: "CONNECT is not supported".into(),
            reason: "not-a-proxy",
            hint: "send requests for this service itself",
            status: StatusCode::NOT_IMPLEMENTED,
        }
    }

    /// `limit` is a number with its unit.
    pub(crate) fn headers_too_large(limit: &str) -> Self {
        Self {
            detail: format!("the request has more than {limit}"),
            reason: "headers-too-large",
            hint: "send what is long in the body",
            status: StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        }
    }

    pub(crate) fn ending() -> Self {
        Self {
            detail: "the service ends, and this request was not complete".into(),
            reason: "ending",
            hint: "ask again",
            status: StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// An answer after which the connection is closed.
    pub(crate) fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::full(Bytes::from(self.json())));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM));
        headers.insert(CONNECTION, CLOSE);
        if self.reason == "too-many-clients" {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }

    /// Returns the response as bytes of HTTP/1.1.
    pub(crate) fn as_http1(&self) -> Vec<u8> {
        let (body, status) = (self.json(), self.status);
        let phrase = status.canonical_reason().unwrap_or_default();
        let mut text = format!(
            "HTTP/1.1 {} {phrase}\r\ncontent-type: {PROBLEM}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            status.as_u16(),
            body.len()
        )
        .into_bytes();
        text.extend_from_slice(&body);
        text
    }
}
