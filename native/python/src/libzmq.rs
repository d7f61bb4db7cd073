//! Sends and receives many messages of three frames in one call, with the libzmq that pyzmq has loaded. One such call is faster than many
//! calls of pyzmq, since a call of pyzmq takes longer than the calls of libzmq inside it.

use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Major version of libzmq for which the declarations in this module are correct.
const MAJOR_VERSION: c_int = 4;
const DONTWAIT: c_int = 1;
const SNDMORE: c_int = 2;
/// Number of frames of a message: topic, sequence number and payload.
const FRAMES_PER_MESSAGE: usize = 3;
/// Approximate maximum number of payload bytes that one call reads. Copying so many bytes takes less time than waiting for the GIL.
const MAX_BYTES: usize = 1 << 20;

/// A `zmq_msg_t`. libzmq initialises only some of its bytes. The value can be moved, since libzmq copies messages byte by byte and does not
/// store their addresses.
#[repr(C, align(8))]
struct Message([MaybeUninit<u8>; 64]);

type Found = NonNull<c_void>;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int);
type Send = unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int) -> c_int;
type OnMessage = unsafe extern "C" fn(*mut Message) -> c_int;
type Receive = unsafe extern "C" fn(*mut Message, *mut c_void, c_int) -> c_int;
type Data = unsafe extern "C" fn(*mut Message) -> *mut c_void;
type Size = unsafe extern "C" fn(*const Message) -> usize;
type Errno = unsafe extern "C" fn() -> c_int;

/// Calls libzmq for many messages at once. Python passes a socket by its address, which is `Socket.underlying` in pyzmq.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct Libzmq {
    send: Send,
    init: OnMessage,
    receive: Receive,
    data: Data,
    size: Size,
    more: OnMessage,
    close: OnMessage,
    errno: Errno,
}

/// An open socket of pyzmq, for the duration of one call.
#[derive(Clone, Copy)]
struct Socket(*mut c_void);

// SAFETY: a libzmq socket can be passed to another thread, but only one thread at a time can use it. Callers ensure this, as pyzmq
// requires: the thread that owns the socket makes the call, and waits until the call ends.
unsafe impl std::marker::Send for Socket {}

/// A received frame. It is closed when it is dropped.
struct Frame<'a> {
    library: &'a Libzmq,
    message: Message,
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        // SAFETY: the message was initialised.
        unsafe { (self.library.close)(&mut self.message) };
    }
}

impl Frame<'_> {
    fn bytes(&mut self) -> &[u8] {
        // SAFETY: the message was initialised, and its data stay at their address as long as the message exists.
        unsafe {
            let size = (self.library.size)(&self.message);
            match NonNull::new((self.library.data)(&mut self.message)) {
                Some(data) => std::slice::from_raw_parts(data.as_ptr().cast(), size),
                None => &[],
            }
        }
    }

    /// Whether another frame of the same message follows.
    fn has_more(&mut self) -> bool {
        // SAFETY: the message was received.
        unsafe { (self.library.more)(&mut self.message) != 0 }
    }
}

/// Why a message was not received completely.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MessageEnd {
    /// No message is waiting.
    Nothing,
    /// An error, which becomes a Python exception.
    Refused,
}

impl Libzmq {
    fn frame(&self, socket: Socket) -> Result<Frame<'_>, MessageEnd> {
        let mut message = Message([MaybeUninit::uninit(); 64]);
        // SAFETY: the memory has the size of a message, and this call initialises it as an empty message.
        unsafe { (self.init)(&mut message) };
        let mut frame = Frame { library: self, message };
        // SAFETY: the socket is open, and the message initialised.
        if unsafe { (self.receive)(&mut frame.message, socket.0, DONTWAIT) } >= 0 {
            return Ok(frame);
        }
        // SAFETY: the function has no arguments.
        match unsafe { (self.errno)() } {
            libc::EAGAIN => Err(MessageEnd::Nothing),
            _ => Err(MessageEnd::Refused),
        }
    }

    /// Receives the frames of one message into `frames`. If the message is not complete, returns the reason.
    fn message<'a>(&'a self, socket: Socket, frames: &mut Vec<Frame<'a>>) -> Result<(), MessageEnd> {
        frames.clear();
        loop {
            let mut frame = self.frame(socket)?;
            let has_more = frame.has_more();
            frames.push(frame);
            if !has_more {
                return Ok(());
            }
        }
    }

    /// Sends a frame. Returns whether libzmq accepted the frame.
    fn put(&self, socket: Socket, frame: &[u8], flags: c_int) -> bool {
        // SAFETY: the socket is open, and libzmq copies the bytes.
        unsafe { (self.send)(socket.0, frame.as_ptr().cast(), frame.len(), flags) >= 0 }
    }

    /// Sends messages up to the first frame that libzmq refuses. Returns the number of frames that were sent.
    fn put_all(&self, socket: Socket, topic: &[u8], messages: &[(u64, &[u8])]) -> usize {
        for (at, (number, payload)) in messages.iter().enumerate() {
            let frames = [(topic, SNDMORE), (&number.to_be_bytes()[..], SNDMORE), (payload, 0)];
            let refused = frames.iter().position(|&(frame, flags)| !self.put(socket, frame, flags));
            if let Some(refused) = refused {
                return FRAMES_PER_MESSAGE * at + refused;
            }
        }
        FRAMES_PER_MESSAGE * messages.len()
    }
}

type Frames<'py> = Vec<Bound<'py, PyBytes>>;
/// The three values that `Libzmq.receive` returns.
type Received<'py> = (Frames<'py>, Vec<Frames<'py>>, bool);

#[pymethods]
impl Libzmq {
    /// Uses the libzmq to which the loaded file `module` is linked. Raises `OSError` if the file does not export its functions.
    #[new]
    fn new(module: &str) -> PyResult<Self> {
        let path = CString::new(module)?;
        // SAFETY: the file is already loaded, so opening it runs no code; the handle is never closed, so its symbols stay valid.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return Err(PyOSError::new_err(format!("{module} is not loaded")));
        }
        let find = |name: &CStr| {
            // SAFETY: the handle belongs to a loaded file.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            NonNull::new(found)
                .ok_or_else(|| PyOSError::new_err(format!("{module} does not export {}", name.to_string_lossy())))
        };
        let version = find(c"zmq_version")?;
        // SAFETY: the types are those of zmq.h, which are the same in all releases of this major version.
        unsafe {
            let version = std::mem::transmute::<Found, Version>(version);
            let (mut major, mut minor, mut patch) = (0, 0, 0);
            version(&mut major, &mut minor, &mut patch);
            if major != MAJOR_VERSION {
                return Err(PyOSError::new_err(format!(
                    "libzmq is {major}.{minor}.{patch}, and not {MAJOR_VERSION}"
                )));
            }
            Ok(Self {
                send: std::mem::transmute::<Found, Send>(find(c"zmq_send")?),
                init: std::mem::transmute::<Found, OnMessage>(find(c"zmq_msg_init")?),
                receive: std::mem::transmute::<Found, Receive>(find(c"zmq_msg_recv")?),
                data: std::mem::transmute::<Found, Data>(find(c"zmq_msg_data")?),
                size: std::mem::transmute::<Found, Size>(find(c"zmq_msg_size")?),
                more: std::mem::transmute::<Found, OnMessage>(find(c"zmq_msg_more")?),
                close: std::mem::transmute::<Found, OnMessage>(find(c"zmq_msg_close")?),
                errno: std::mem::transmute::<Found, Errno>(find(c"zmq_errno")?),
            })
        }
    }

    /// Sends each batch as a message of topic, sequence number and payload, up to the first frame that libzmq refuses. Returns the number
    /// of sent frames.
    fn send(&self, py: Python<'_>, socket: usize, topic: &[u8], batches: Vec<(u64, Bound<'_, PyBytes>)>) -> PyResult<usize> {
        let socket = open(socket)?;
        let messages: Vec<(u64, &[u8])> = batches
            .iter()
            .map(|(number, payload)| (*number, payload.as_bytes()))
            .collect();
        Ok(py.detach(move || self.put_all(socket, topic, &messages)))
    }

    /// Receives waiting messages without blocking: at most `limit` messages, and about 1 MiB.
    ///
    /// Returns three values. The first is the payloads of the leading messages that are batches with this topic, numbered from `first` on,
    /// at most `due` of them. The second is the frames of all further messages. The third is whether no message waits at the socket any
    /// more.
    fn receive<'py>(
        &self,
        py: Python<'py>,
        socket: usize,
        topic: &[u8],
        first: u64,
        due: usize,
        limit: usize,
    ) -> PyResult<Received<'py>> {
        let socket = open(socket)?;
        let (mut payloads, mut messages, mut bytes) = (Vec::new(), Vec::<Frames<'py>>::new(), 0);
        let mut frames = Vec::with_capacity(FRAMES_PER_MESSAGE);
        let mut number = first;
        while payloads.len() + messages.len() < limit && bytes < MAX_BYTES {
            let ended = self.message(socket, &mut frames).err();
            bytes += frames.iter_mut().map(|frame| frame.bytes().len()).sum::<usize>();
            let is_due = ended.is_none() && messages.is_empty() && payloads.len() < due;
            if let Some(payload) = batch(&mut frames, topic, number).filter(|_| is_due) {
                payloads.push(PyBytes::new(py, payload));
                number = number.wrapping_add(1);
            } else if !frames.is_empty() {
                messages.push(frames.iter_mut().map(|frame| PyBytes::new(py, frame.bytes())).collect());
            }
            if let Some(ended) = ended {
                return Ok((payloads, messages, ended == MessageEnd::Nothing));
            }
        }
        Ok((payloads, messages, false))
    }
}

/// If the frames are a batch with this topic and sequence number, returns its payload.
fn batch<'a>(frames: &'a mut [Frame<'_>], topic: &[u8], number: u64) -> Option<&'a [u8]> {
    let [sender, numbered, payload] = frames else {
        return None;
    };
    (sender.bytes() == topic && numbered.bytes() == number.to_be_bytes()).then(|| payload.bytes())
}

fn open(address: usize) -> PyResult<Socket> {
    match address {
        0 => Err(PyValueError::new_err("the socket is closed")),
        _ => Ok(Socket(std::ptr::with_exposed_provenance_mut(address))),
    }
}
