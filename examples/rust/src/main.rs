//! Follows engines that publish events over ZeroMQ, and prints every second which engines hold a prompt:
//! `cargo run -- vllm=tcp://127.0.0.1:5557 --tokens 1,2,3,4`.
//!
//! The example applies live batches in the order in which they arrive. A program that also requests missed batches and recognises restarted
//! publishers calls `Index::gap` and `Index::reset`, as kvevents' subscriber in Python does.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use kvevents_index::{Applied, Incarnation, Index, Limits, Position, Scope, Worker};
use zeromq::{Socket, SocketRecv, SubSocket};

type Failure = Box<dyn Error + Send + Sync>;

/// Applies the batches of one engine.
async fn follow(index: Arc<Index>, worker: Worker, endpoint: String) -> Result<(), Failure> {
    let mut socket = SubSocket::new();
    socket.connect(&endpoint).await?;
    socket.subscribe("").await?;
    loop {
        // [topic, sequence number as 8 bytes, msgpack]
        let message = socket.recv().await?;
        let (Some(seq), Some(payload)) = (message.get(1), message.get(2)) else {
            continue;
        };
        let Ok(seq) = seq.as_ref().try_into() else { continue };
        let position = Position {
            incarnation: Incarnation(0),
            seq: i64::from_be_bytes(seq),
        };
        if let Applied::Now(Some(report)) = index.batch(&worker, position, payload)? {
            for rejected in &report.rejected {
                eprintln!("{worker}: {}: {}", rejected.reason.as_str(), rejected.detail);
            }
        }
    }
}

fn main() -> Result<(), Failure> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let tokens = match arguments.iter().position(|argument| argument == "--tokens") {
        Some(at) if at + 1 < arguments.len() => arguments.drain(at..at + 2).next_back(),
        _ => None,
    };
    let tokens = tokens.ok_or("expected NAME=ENDPOINT ... --tokens ID,ID,...")?;
    let tokens: Vec<u32> = tokens.split(',').map(str::parse).collect::<Result<_, _>>()?;

    let index = Arc::new(Index::new(Limits::default().with_memory(1 << 30))?);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        for argument in &arguments {
            let (name, endpoint) = argument.split_once('=').ok_or("expected NAME=ENDPOINT")?;
            let followed = follow(index.clone(), Worker::new(name, 0), endpoint.to_owned());
            let name = name.to_owned();
            tokio::spawn(async move {
                if let Err(error) = followed.await {
                    eprintln!("{name}: {error}");
                }
            });
        }
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            for hit in index.match_prompt(&tokens, &Scope::default()).iter() {
                println!(
                    "{}: {} tokens on the GPU, {} anywhere",
                    hit.worker, hit.tokens.gpu, hit.tokens.any
                );
            }
        }
    })
}
