//! A connection to a publisher, read where its bytes arrive: no other thread is woken for them.

use std::os::raw::c_int;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::zmtp::{Arrivals, Broken};

/// Bytes that are taken in one call, about: to copy them takes less time than another thread would wait for Python's lock.
const MOST_BYTES: usize = 1 << 20;

type Frames<'py> = Vec<Bound<'py, PyBytes>>;
/// What came of a call, as `Zmtp.receive` says.
type Received<'py> = (Frames<'py>, Vec<Frames<'py>>, Frames<'py>, bool, bool, Option<&'static str>);

/// What arrives over one connection.
#[pyclass(module = "kvevents._native")]
pub(super) struct Zmtp {
    arrivals: Arrivals,
}

/// What came of asking the system.
enum Read {
    Some,
    /// All that there is.
    Last,
    Nothing,
    Ended(&'static str),
}

#[pymethods]
impl Zmtp {
    /// For messages of at most `most` bytes.
    #[new]
    fn new(most: usize) -> Self {
        Self {
            arrivals: Arrivals::new(most),
        }
    }

    /// Takes what has arrived at a descriptor, at most `limit` messages and about 1 MiB, without waiting.
    ///
    /// Payloads of batches with this topic, numbered from `first` on, at most `due` of them, up to the first message that is
    /// anything else; the messages from that one on; commands; whether any bytes came; whether there may be more; and why the
    /// connection has ended, if it has. All that arrived before its end is told.
    fn receive<'py>(
        &mut self,
        py: Python<'py>,
        descriptor: c_int,
        topic: &[u8],
        first: u64,
        due: usize,
        limit: usize,
    ) -> Received<'py> {
        let (mut payloads, mut messages, mut commands) = (Vec::new(), Vec::<Frames<'py>>::new(), Vec::new());
        let (mut bytes, mut came, mut is_last) = (0, false, false);
        let mut number = first;
        let (more, end) = loop {
            match self.arrivals.take() {
                Ok(true) => {}
                Ok(false) if is_last => break (false, None),
                Ok(false) => {
                    match self.read(descriptor) {
                        Read::Some => came = true,
                        Read::Last => (came, is_last) = (true, true),
                        Read::Nothing => is_last = true,
                        Read::Ended(why) => break (false, Some(why)),
                    }
                    continue;
                }
                Err(broken) => break (false, Some(told(broken))),
            }
            bytes += self.arrivals.frames().map(<[u8]>::len).sum::<usize>();
            let is_due = messages.is_empty() && payloads.len() < due;
            if let Some(payload) = self.arrivals.third(topic, &number.to_be_bytes()).filter(|_| is_due) {
                payloads.push(PyBytes::new(py, payload));
                number = number.wrapping_add(1);
            } else {
                let mut frames = self.arrivals.frames().map(|frame| PyBytes::new(py, frame));
                if self.arrivals.is_command() {
                    commands.extend(frames.next());
                } else {
                    messages.push(frames.collect());
                }
            }
            if payloads.len() + messages.len() + commands.len() >= limit || bytes >= MOST_BYTES {
                break (true, None);
            }
        };
        (payloads, messages, commands, came, more, end)
    }
}

impl Zmtp {
    fn read(&mut self, descriptor: c_int) -> Read {
        let room = self.arrivals.room();
        let asked = room.len();
        // SAFETY: the room is there to be written to, and the system writes no more than its length.
        let read = unsafe { libc::recv(descriptor, room.as_mut_ptr().cast(), asked, libc::MSG_DONTWAIT) };
        match usize::try_from(read) {
            Ok(0) => Read::Ended("it was closed"),
            Ok(bytes) => {
                self.arrivals.arrived(bytes);
                // More may have come since; then the descriptor says so.
                if bytes < asked { Read::Last } else { Read::Some }
            }
            Err(_) => match std::io::Error::last_os_error().raw_os_error() {
                // A signal: Python sees to it, and comes back.
                Some(libc::EAGAIN | libc::EINTR) => Read::Nothing,
                Some(libc::ETIMEDOUT) => Read::Ended("the network does not answer"),
                _ => Read::Ended("it was closed"),
            },
        }
    }
}

fn told(broken: Broken) -> &'static str {
    match broken {
        Broken::Flags => "the peer sends what is no ZMTP",
        Broken::Large => "the peer sends a message that is larger than max_message_bytes",
        Broken::Frames => "the peer sends a message of more than 64 frames",
    }
}
