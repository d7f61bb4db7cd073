//! `ConcurrentRadixTreeCompressed` of dynamo-kv-router 1.6.1, the index of Dynamo's standalone indexer and of routers with several threads.
//!
//! The tree applies events only in `SyncIndexer::worker`, a loop that ends at `Terminate` and then drops its data about the workers. So one
//! call of that loop runs a whole script, in the thread of the caller: behind each payload's events goes a `Flush`, and when the loop
//! acknowledges it, the waker of the acknowledgement puts the next ones into the queue. No other thread is involved. The cost of the queue
//! and of the acknowledgement is measured with events without blocks (`overhead`). Rows subtract this cost, so that the tree is measured
//! without its channel.

use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Wake, Waker};

use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{KvCacheEvent, KvCacheEventData, KvCacheRemoveData, RouterEvent};
use tokio::sync::oneshot;

use super::dynamo::{Decoder, Reader};
use super::{Find, Scores, Script, Shared, Side};
use crate::measure::{cpu, median};

/// The compressed radix tree of Dynamo.
pub struct Crtc {
    reader: Reader<ConcurrentRadixTreeCompressed>,
    workers: u32,
}

/// The state of a script between two payloads.
struct Paused<S>(Mutex<State<S>>);

struct State<S> {
    script: S,
    decoder: Decoder,
    reader: Reader<ConcurrentRadixTreeCompressed>,
    queue: flume::Sender<WorkerTask>,
    /// The receiver of the acknowledgement that the loop sends next; stored until the next payload.
    acknowledgement: Option<oneshot::Receiver<()>>,
}

impl<S: Script + Send + 'static> Paused<S> {
    fn go_on(self: &Arc<Self>) {
        let mut state = self.0.lock().expect("no script panics");
        let State {
            script,
            decoder,
            reader,
            queue,
            acknowledgement,
        } = &mut *state;
        let put = |task| queue.send(task).unwrap_or_else(|_| panic!("the loop has ended"));
        let Some((worker, payload)) = script.next(reader) else {
            *acknowledgement = None;
            return put(WorkerTask::Terminate);
        };
        if payload.is_empty() {
            put(WorkerTask::Event(nothing()));
        } else {
            decoder.read(worker, payload, |event| put(WorkerTask::Event(event)));
        }
        let (done, mut receiver) = oneshot::channel();
        let waker = Waker::from(self.clone());
        let waits = pin!(&mut receiver).poll(&mut Context::from_waker(&waker)).is_pending();
        assert!(waits, "nothing was sent yet");
        put(WorkerTask::Flush(done));
        *acknowledgement = Some(receiver);
    }
}

impl<S: Script + Send + 'static> Wake for Paused<S> {
    fn wake(self: Arc<Self>) {
        self.go_on();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.go_on();
    }
}

/// An event that removes no blocks.
fn nothing() -> RouterEvent {
    let data = KvCacheEventData::Removed(KvCacheRemoveData {
        block_hashes: Vec::new(),
    });
    let event = KvCacheEvent {
        event_id: 0,
        data,
        dp_rank: 0,
    };
    RouterEvent::new(0, event)
}

/// A number of empty payloads, which represent events without blocks.
struct Empty(usize);

impl Script for Empty {
    fn next(&mut self, _: &dyn Find) -> Option<(u32, &[u8])> {
        self.0 = self.0.checked_sub(1)?;
        Some((0, &[]))
    }
}

impl Find for Crtc {
    fn find(&self, tokens: &[u32]) -> u64 {
        self.reader.find(tokens)
    }

    fn scores(&self, tokens: &[u32]) -> Scores {
        self.reader.scores(tokens)
    }
}

impl Side for Crtc {
    const NAME: &'static str = "CRTC";

    fn new(workers: u32, size: u32) -> Self {
        let index = Arc::new(ConcurrentRadixTreeCompressed::new());
        Self {
            reader: Reader { index, size },
            workers,
        }
    }

    fn run<S: Script + Send + 'static>(&mut self, script: S) -> S {
        let (queue, tasks) = flume::unbounded();
        let state = State {
            script,
            decoder: Decoder::new(self.workers, self.reader.size),
            reader: self.reader.clone(),
            queue,
            acknowledgement: None,
        };
        let paused = Arc::new(Paused(Mutex::new(state)));
        paused.go_on();
        self.reader
            .index
            .worker(tasks, None)
            .expect("the loop ends on its stop signal");
        let paused = Arc::into_inner(paused).expect("no acknowledgement is left");
        paused.0.into_inner().expect("no script panics").script
    }

    fn overhead() -> f64 {
        static COST: OnceLock<f64> = OnceLock::new();
        const PAYLOADS: usize = 100_000;
        *COST.get_or_init(|| {
            let mut runs: Vec<f64> = (0..7)
                .map(|_| {
                    let start = cpu();
                    Self::new(1, 16).run(Empty(PAYLOADS));
                    (cpu() - start).as_nanos() as f64 / PAYLOADS as f64
                })
                .collect();
            median(&mut runs)
        })
    }
}

impl Shared for Crtc {
    type Reader = Reader<ConcurrentRadixTreeCompressed>;

    fn reader(&self) -> Self::Reader {
        self.reader.clone()
    }
}
