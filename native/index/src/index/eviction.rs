//! The memory limit: who has to give up blocks, and which.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use super::Index;
use crate::core::set_bit;
use crate::stream::Stream;

/// Records that an eviction looks at before it looks at the sum again.
const EVICTION_STEP: usize = 512;

impl Index {
    /// Counts the bytes of a stream that has changed, and makes room if there are too many.
    pub(super) fn settle(&self, stream: &mut Stream) {
        let Some(limit) = self.limits.memory else { return };
        self.recount(stream);
        let mut idle = 0;
        while self.held() > limit {
            if self.evict(stream) {
                idle = 0;
                continue;
            }
            idle += EVICTION_STEP;
            if idle > self.gate.read().records.bound() as usize {
                // A whole round without any: what is left belongs to streams that are being written to, and make room themselves.
                if !self.forget_waiting(stream) {
                    break;
                }
                idle = 0;
            }
        }
    }

    fn forget_waiting(&self, stream: &mut Stream) -> bool {
        let any = !stream.waiting.is_empty();
        for _ in 0..EVICTION_STEP {
            stream.waiting.pop();
        }
        self.recount(stream);
        any
    }

    /// Counts the bytes of a stream that has changed.
    pub(super) fn recount(&self, stream: &mut Stream) {
        let bytes = stream.bytes();
        self.streams_bytes
            .fetch_add(bytes.wrapping_sub(stream.counted), Ordering::Relaxed);
        stream.counted = bytes;
    }

    fn held(&self) -> usize {
        self.gate.read().bytes() + self.streams_bytes.load(Ordering::Relaxed)
    }

    /// Takes blocks from workers that hold at least the average, in about the order in which they came. Says whether any went.
    fn evict(&self, own: &mut Stream) -> bool {
        let core = self.gate.read();
        let counts = core.members.iter().flatten().map(|member| member.blocks);
        let average = counts.clone().sum::<usize>() / counts.filter(|&blocks| blocks > 0).count().max(1);
        let mut rich = vec![0_u64; core.members.len().div_ceil(64)];
        for (at, member) in core.members.iter().enumerate() {
            set_bit(
                &mut rich,
                at as u32,
                member.as_ref().is_some_and(|member| member.blocks >= average),
            );
        }
        let (start, bound) = (self.hand.load(Ordering::Relaxed) as u32, core.records.bound());
        let end = bound.min(start.saturating_add(EVICTION_STEP as u32));
        self.hand
            .store(if end >= bound { 0 } else { end as usize }, Ordering::Relaxed);
        let mut victims: HashMap<u32, Vec<u32>> = HashMap::new();
        for number in start..end {
            let Some(record) = core.records.find(number) else { continue };
            for word in core.sets.words(record.set) {
                let mut bits = word.bits & rich[word.word()];
                while bits != 0 {
                    let stream = ((word.word() << 6) as u32) + bits.trailing_zeros();
                    bits &= bits - 1;
                    let list = victims.entry(stream).or_default();
                    if list.last() != Some(&number) {
                        list.push(number);
                    }
                }
            }
        }
        let others: Vec<_> = (victims.into_iter())
            .filter_map(|(stream, numbers)| Some((stream, core.members[stream as usize].as_ref()?.stream.clone(), numbers)))
            .collect();
        drop(core);
        let mut any = false;
        for (number, stream, records) in others {
            if number == own.number {
                any |= self.evict_from(own, &records);
            } else if let Some(stream) = stream.upgrade()
                && let Some(mut stream) = stream.try_lock()
                && !stream.gone
                && stream.number == number
            {
                any |= self.evict_from(&mut stream, &records);
            }
        }
        any
    }

    fn evict_from(&self, stream: &mut Stream, records: &[u32]) -> bool {
        let mut writer = self.gate.write();
        let victims = stream.hashes_of(&writer, records);
        for &(hash, number) in &victims {
            stream.drop_block(&mut writer, hash, number, |_| true);
            stream.counters.evicted += 1;
            writer.pause(1);
        }
        if let Some(member) = writer.members[stream.number as usize].as_mut() {
            member.blocks = stream.blocks;
        }
        drop(writer);
        self.recount(stream);
        !victims.is_empty()
    }
}
