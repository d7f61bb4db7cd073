//! Messages of three frames, many in one call, by the libzmq that pyzmq has loaded: each call of pyzmq costs more than libzmq's own.

use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The library whose functions these are the declarations of.
const MAJOR: c_int = 4;
const DONTWAIT: c_int = 1;
const SNDMORE: c_int = 2;
/// Frames of a message: topic, number, payload.
const FRAMES: usize = 3;
/// Bytes of payloads that are read in one call, about: to copy them takes less time than another thread would wait for Python's lock.
const MOST_BYTES: usize = 1 << 20;

/// `zmq_msg_t`.
#[repr(C, align(8))]
struct Message([u8; 64]);

type Found = NonNull<c_void>;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int);
type Send = unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int) -> c_int;
type OnMessage = unsafe extern "C" fn(*mut Message) -> c_int;
type Receive = unsafe extern "C" fn(*mut Message, *mut c_void, c_int) -> c_int;
type Data = unsafe extern "C" fn(*mut Message) -> *mut c_void;
type Size = unsafe extern "C" fn(*const Message) -> usize;
type Errno = unsafe extern "C" fn() -> c_int;

/// Calls many functions of libzmq at a time. A socket is given as the address that pyzmq calls `underlying`.
#[pyclass(frozen, module = "kvevents._native")]
pub(super) struct Libzmq {
    send: Send,
    init: OnMessage,
    receive: Receive,
    data: Data,
    size: Size,
    close: OnMessage,
    errno: Errno,
}

/// A socket of pyzmq's that is open, for as long as one call takes.
#[derive(Clone, Copy)]
struct Socket(*mut c_void);

// SAFETY: libzmq's sockets may be used from another thread than before, one at a time; the caller's is the only one.
unsafe impl std::marker::Send for Socket {}
// SAFETY: as above.
unsafe impl Sync for Socket {}

/// A frame that was received, closed when it goes.
struct Frame<'a> {
    library: &'a Libzmq,
    message: Message,
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        // SAFETY: it was initialised.
        unsafe { (self.library.close)(&mut self.message) };
    }
}

impl Frame<'_> {
    fn bytes(&mut self) -> &[u8] {
        // SAFETY: it was initialised, and its data stay where they are as long as it does.
        unsafe {
            let size = (self.library.size)(&self.message);
            match NonNull::new((self.library.data)(&mut self.message)) {
                Some(data) => std::slice::from_raw_parts(data.as_ptr().cast(), size),
                None => &[],
            }
        }
    }
}

/// What came of trying to read a frame.
enum Came<'a> {
    Frame(Frame<'a>),
    /// There is none.
    Nothing,
    /// Something that only an exception can say.
    Refused,
}

impl Libzmq {
    fn frame(&self, socket: Socket) -> Came<'_> {
        let mut message = MaybeUninit::uninit();
        // SAFETY: libzmq initialises it.
        let message = unsafe {
            (self.init)(message.as_mut_ptr());
            message.assume_init()
        };
        let mut frame = Frame { library: self, message };
        // SAFETY: the socket is open, and the message initialised.
        if unsafe { (self.receive)(&mut frame.message, socket.0, DONTWAIT) } >= 0 {
            return Came::Frame(frame);
        }
        // SAFETY: it takes nothing.
        match unsafe { (self.errno)() } {
            libc::EAGAIN => Came::Nothing,
            _ => Came::Refused,
        }
    }

    /// Whether libzmq took a frame.
    fn put(&self, socket: Socket, frame: &[u8], flags: c_int) -> bool {
        // SAFETY: the socket is open, and libzmq copies the bytes.
        unsafe { (self.send)(socket.0, frame.as_ptr().cast(), frame.len(), flags) >= 0 }
    }

    /// Sends messages up to the first frame that is refused: how many frames were not.
    fn put_all(&self, socket: Socket, topic: &[u8], messages: &[(u64, &[u8])]) -> usize {
        for (at, (number, payload)) in messages.iter().enumerate() {
            let frames = [(topic, SNDMORE), (&number.to_be_bytes()[..], SNDMORE), (payload, 0)];
            let refused = frames.iter().position(|&(frame, flags)| !self.put(socket, frame, flags));
            if let Some(refused) = refused {
                return FRAMES * at + refused;
            }
        }
        FRAMES * messages.len()
    }
}

/// Payloads, the frames that came in the place of the next one, and whether there was no more.
type Run<'py> = (Vec<Bound<'py, PyBytes>>, Vec<Bound<'py, PyBytes>>, bool);

#[pymethods]
impl Libzmq {
    /// Of the library that `module`, a file that is loaded, is linked to. Raises `OSError` where its functions are not found.
    #[new]
    fn new(module: &str) -> PyResult<Self> {
        let path = CString::new(module)?;
        // SAFETY: a file that is loaded is not loaded again; the handle is never closed, so what is found stays.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            return Err(PyOSError::new_err(format!("{module} is not loaded")));
        }
        let find = |name: &CStr| {
            // SAFETY: the handle is of a file that is loaded.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            NonNull::new(found).ok_or_else(|| PyOSError::new_err(format!("{module} leads to no {}", name.to_string_lossy())))
        };
        let version = find(c"zmq_version")?;
        // SAFETY: these are the declarations of zmq.h, the same in all releases of this major version.
        unsafe {
            let version = std::mem::transmute::<Found, Version>(version);
            let (mut major, mut minor, mut patch) = (0, 0, 0);
            version(&mut major, &mut minor, &mut patch);
            if major != MAJOR {
                return Err(PyOSError::new_err(format!(
                    "libzmq is {major}.{minor}.{patch}, and not {MAJOR}"
                )));
            }
            Ok(Self {
                send: std::mem::transmute::<Found, Send>(find(c"zmq_send")?),
                init: std::mem::transmute::<Found, OnMessage>(find(c"zmq_msg_init")?),
                receive: std::mem::transmute::<Found, Receive>(find(c"zmq_msg_recv")?),
                data: std::mem::transmute::<Found, Data>(find(c"zmq_msg_data")?),
                size: std::mem::transmute::<Found, Size>(find(c"zmq_msg_size")?),
                close: std::mem::transmute::<Found, OnMessage>(find(c"zmq_msg_close")?),
                errno: std::mem::transmute::<Found, Errno>(find(c"zmq_errno")?),
            })
        }
    }

    /// Sends messages of a topic, a number and a payload up to the first frame that is refused, and returns how many frames were not.
    fn send(&self, py: Python<'_>, socket: usize, topic: &[u8], batches: Vec<(u64, Bound<'_, PyBytes>)>) -> PyResult<usize> {
        let socket = open(socket)?;
        let messages: Vec<(u64, &[u8])> = batches
            .iter()
            .map(|(number, payload)| (*number, payload.as_bytes()))
            .collect();
        Ok(py.detach(|| self.put_all(socket, topic, &messages)))
    }

    /// Takes messages of this topic, numbered from `first` on, at most `limit`, without waiting.
    ///
    /// Their payloads; the frames of what came in the place of the next one, none if nothing did; and whether there was nothing left.
    fn receive<'py>(&self, py: Python<'py>, socket: usize, topic: &[u8], first: u64, limit: usize) -> PyResult<Run<'py>> {
        let socket = open(socket)?;
        let (mut payloads, mut bytes) = (Vec::new(), 0);
        let mut frames = Vec::with_capacity(FRAMES);
        for number in (first..).take(limit) {
            frames.clear();
            let mut outcome = None;
            while frames.len() < FRAMES && outcome.is_none() {
                match self.frame(socket) {
                    Came::Frame(frame) => frames.push(frame),
                    Came::Nothing => outcome = Some(true),
                    Came::Refused => outcome = Some(false),
                }
            }
            let due = outcome.is_none() && frames[0].bytes() == topic && frames[1].bytes() == number.to_be_bytes();
            if !due {
                let odd = frames.iter_mut().map(|frame| PyBytes::new(py, frame.bytes())).collect();
                return Ok((payloads, odd, outcome.unwrap_or(false)));
            }
            let payload = frames[2].bytes();
            bytes += payload.len();
            payloads.push(PyBytes::new(py, payload));
            if bytes >= MOST_BYTES {
                break;
            }
        }
        Ok((payloads, Vec::new(), false))
    }
}

fn open(address: usize) -> PyResult<Socket> {
    match address {
        0 => Err(PyValueError::new_err("the socket is closed")),
        _ => Ok(Socket(std::ptr::with_exposed_provenance_mut(address))),
    }
}
