//! A subscription to one worker: a task that calls the worker, and a queue of arrivals.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_prost::ProstCodec;

use crate::messages;
use crate::numbers::SequenceNumbers;
use crate::payload;

/// The paths of the method; each engine has its own service.
const METHODS: [&str; 4] = [
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
    "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents",
    "/tokenspeed.grpc.scheduler.TokenSpeedScheduler/SubscribeKvEvents",
    "/trtllm.TrtllmService/SubscribeKvEvents",
];
/// Maximum number of batches that wait for the application. At this limit the subscription stops reading, so that the flow control of
/// HTTP/2 stops the servicer.
const MAX_WAITING_BATCHES: usize = 1_024;
/// Maximum number of payload bytes that wait for the application. A payload that exceeds it waits until the queue has no other payload.
const MAX_WAITING_BYTES: u32 = 64 << 20;
/// Maximum number of bytes of a message: the limit of SMG itself.
const MAX_MESSAGE_BYTES: usize = 64 << 20;
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// Time without a message after which the connection is checked, to notice a worker that is frozen or cannot be reached.
const QUIET_TIME: Duration = Duration::from_secs(2);
/// Time within which the worker must answer such a check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(3);
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// A message of the call, or a change of the call, in the order of arrival.
#[derive(Debug, PartialEq)]
pub enum Arrival {
    /// A call has begun; the sequence numbers of its batches begin at 0.
    Connected,
    /// A batch: its sequence number in the call, and its payload as vLLM would encode it.
    Batch(u64, Vec<u8>),
    /// A snapshot has begun whose further parts follow: until `Complete`, the batches do not have the whole state of the engine.
    Incomplete,
    /// The last part of each snapshot has arrived.
    Complete,
    /// The call has ended or could not begin; the text is the reason.
    Disconnected(String),
}

/// A subscription to the events of one worker. It ends when this value is dropped.
pub struct Subscription {
    arrivals: Mutex<mpsc::Receiver<QueuedArrival>>,
    endpoint: Endpoint,
    outlet: ArrivalSender,
    /// The task that calls the worker.
    task: Mutex<JoinHandle<()>>,
}

/// An arrival, with the permit for its bytes, which is released when the arrival is taken from the queue.
type QueuedArrival = (Arrival, Option<OwnedSemaphorePermit>);

/// The end of the queue to which the task adds arrivals.
#[derive(Clone)]
struct ArrivalSender {
    sender: mpsc::Sender<QueuedArrival>,
    room: Arc<Semaphore>,
    waker: Arc<Waker>,
}

/// A socket; its other end is readable while arrivals wait.
struct Waker {
    socket: UnixStream,
    is_awake: AtomicBool,
}

fn runtime() -> Result<&'static Runtime, String> {
    static RUNTIME: OnceLock<Result<Runtime, String>> = OnceLock::new();
    let start = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).thread_name("kvevents-smg").enable_all();
        builder.build().map_err(|error| error.to_string())
    };
    RUNTIME.get_or_init(start).as_ref().map_err(Clone::clone)
}

impl Subscription {
    /// Starts the task that calls the worker at `host:port`. When an item arrives, the other end of `waker` becomes readable.
    pub fn open(address: &str, waker: UnixStream) -> Result<Self, String> {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| error.to_string())?;
        let endpoint = endpoint
            .connect_timeout(CONNECT_TIME)
            .http2_keep_alive_interval(QUIET_TIME)
            .keep_alive_timeout(CHECK_TIMEOUT)
            .keep_alive_while_idle(true);
        waker.set_nonblocking(true).map_err(|error| error.to_string())?;
        let (sender, arrivals) = mpsc::channel(MAX_WAITING_BATCHES);
        let waker = Arc::new(Waker {
            socket: waker,
            is_awake: AtomicBool::new(false),
        });
        let room = Arc::new(Semaphore::new(MAX_WAITING_BYTES as usize));
        let outlet = ArrivalSender { sender, room, waker };
        let task = runtime()?.spawn(follow(endpoint.clone(), outlet.clone()));
        Ok(Self {
            arrivals: Mutex::new(arrivals),
            endpoint,
            outlet,
            task: Mutex::new(task),
        })
    }

    /// Takes up to `limit` arrivals from the queue. The caller must first have read all bytes from the other end of the waker.
    pub fn take(&self, limit: usize) -> Vec<Arrival> {
        let mut arrivals = self.arrivals.lock();
        // The flag is reset before the queue is read, so that a later arrival wakes the application again.
        self.outlet.waker.is_awake.store(false, Ordering::SeqCst);
        let mut taken = Vec::new();
        while taken.len() < limit {
            match arrivals.try_recv() {
                Ok((arrival, _)) => taken.push(arrival),
                Err(_) => return taken,
            }
        }
        self.outlet.waker.wake();
        taken
    }

    /// Ends the call and begins another one, in which the worker sends all batches again.
    pub fn restart(&self) {
        let mut task = self.task.lock();
        task.abort();
        let (endpoint, outlet) = (self.endpoint.clone(), self.outlet.clone());
        if let Ok(runtime) = runtime() {
            *task = runtime.spawn(async move {
                outlet
                    .put(Arrival::Disconnected(
                        "the call was restarted: all batches are requested again".to_owned(),
                    ))
                    .await;
                follow(endpoint, outlet).await;
            });
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.task.get_mut().abort();
    }
}

impl Waker {
    fn wake(&self) {
        if !self.is_awake.swap(true, Ordering::SeqCst) {
            // If the buffer is full, the other end is readable; if an error occurs, it is closed.
            let _ = (&self.socket).write(&[0]);
        }
    }
}

impl ArrivalSender {
    /// Adds an arrival to the queue as soon as the queue has room. If the receiver was dropped, drops the arrival, since the task is about
    /// to end.
    async fn put(&self, arrival: Arrival) {
        let bytes = match &arrival {
            Arrival::Batch(_, payload) => u32::try_from(payload.len()).unwrap_or(u32::MAX),
            _ => 0,
        };
        let room = Arc::clone(&self.room).acquire_many_owned(bytes.min(MAX_WAITING_BYTES));
        let _ = self.sender.send((arrival, room.await.ok())).await;
        self.waker.wake();
    }
}

/// Calls the worker repeatedly, until the task is aborted.
async fn follow(endpoint: Endpoint, outlet: ArrivalSender) {
    let mut pause = MIN_PAUSE;
    loop {
        let mut has_begun = false;
        let ended = call(&endpoint, &outlet, &mut has_begun).await;
        outlet.put(Arrival::Disconnected(ended)).await;
        pause = if has_begun { MIN_PAUSE } else { MAX_PAUSE.min(pause * 2) };
        tokio::time::sleep(pause).await;
    }
}

/// Makes one call, and returns the reason why it has ended.
async fn call(endpoint: &Endpoint, outlet: &ArrivalSender, has_begun: &mut bool) -> String {
    let channel = match endpoint.connect().await {
        Ok(channel) => channel,
        Err(error) => return causes(&error),
    };
    let mut batches = match subscribe(channel).await {
        Ok(batches) => batches,
        Err(status) => return message_of(&status),
    };
    outlet.put(Arrival::Connected).await;
    *has_begun = true;
    let mut numbers = SequenceNumbers::default();
    let mut is_complete = true;
    loop {
        match batches.message().await {
            Ok(None) => return "the worker has ended the stream".to_owned(),
            Err(status) => return message_of(&status),
            Ok(Some(batch)) => {
                if batch.load.as_ref().is_some_and(|load| load.load_only) {
                    continue;
                }
                if numbers.is_restart(&batch) {
                    (numbers, is_complete) = (SequenceNumbers::default(), true);
                    let reason = "the engine has restarted: it uses sequence numbers again";
                    outlet.put(Arrival::Disconnected(reason.to_owned())).await;
                    outlet.put(Arrival::Connected).await;
                }
                let Some(number) = numbers.number(&batch) else {
                    continue;
                };
                if is_complete && !numbers.is_complete() {
                    is_complete = false;
                    outlet.put(Arrival::Incomplete).await;
                }
                // A batch that cannot be encoded is dropped. Its number is missing then, which the stream reports as a loss.
                if let Some(payload) = payload::encode(&batch) {
                    outlet.put(Arrival::Batch(number, payload)).await;
                }
                if !is_complete && numbers.is_complete() {
                    is_complete = true;
                    outlet.put(Arrival::Complete).await;
                }
            }
        }
    }
}

/// Calls the method of the first service that the worker has.
async fn subscribe(channel: Channel) -> Result<tonic::Streaming<messages::Batch>, Status> {
    let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let mut refused = Status::unimplemented("");
    for method in METHODS {
        client.ready().await.map_err(|error| Status::unavailable(causes(&error)))?;
        let request = Request::new(messages::Request {
            start_sequence_number: 0,
            load_records_before_first_batch: true,
        });
        let codec = ProstCodec::<messages::Request, messages::Batch>::default();
        let path = PathAndQuery::from_static(method);
        match client.server_streaming(request, path, codec).await {
            Ok(answer) => return Ok(answer.into_inner()),
            Err(status) if status.code() == Code::Unimplemented => refused = status,
            Err(status) => return Err(status),
        }
    }
    Err(refused)
}

fn message_of(status: &Status) -> String {
    if status.code() == Code::Unimplemented {
        return "the worker has no stream of KV cache events: start its engine with events (vLLM: --kv-events-config)"
            .to_owned();
    }
    format!("{:?}: {}", status.code(), status.message())
}

/// Returns the message of an error, followed by the messages of its causes.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_wait_for_room() {
        let (sender, mut arrivals) = mpsc::channel(MAX_WAITING_BATCHES);
        let (socket, _other) = UnixStream::pair().unwrap();
        let waker = Arc::new(Waker {
            socket,
            is_awake: AtomicBool::new(false),
        });
        let room = Arc::new(Semaphore::new(MAX_WAITING_BYTES as usize));
        let outlet = ArrivalSender { sender, room, waker };
        let put = |bytes: u32| outlet.put(Arrival::Batch(0, vec![0; bytes as usize]));
        runtime().unwrap().block_on(async {
            put(MAX_WAITING_BYTES).await;
            let soon = Duration::from_millis(20);
            assert!(tokio::time::timeout(soon, put(1)).await.is_err());
            drop(arrivals.recv().await);
            put(1).await;
            drop(arrivals.recv().await);
            put(MAX_WAITING_BYTES + 1).await;
            assert!(arrivals.try_recv().is_ok());
        });
    }
}
