//! Events like the last one of their kind, by the number of the scanner's model: all but hashes, parent and tokens is the same, so what it
//! means was found out then.

use crate::naming::{Identity, Spelled, Stamp};
use kvevents_index::applying::Read;
use kvevents_index::scan::Event;

use super::{Dense, State};

/// What the last store with tokens and the last removal meant. Numbers are of models; 0 of none.
#[derive(Debug, Default)]
pub struct Usual {
    /// Of the store; only of the last one, since others may have taught another rule for its group.
    like: u64,
    pub seen: Option<Seen>,
    /// Of the removal, and the number of its place.
    removal: u64,
    place: usize,
}

/// A store with tokens that fit and without extra keys.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Without its salt.
    pub identity: Identity,
    /// Its own salt.
    pub salt: Option<u64>,
    pub manner: u8,
    /// Of the blocks that were named last.
    pub naming: Option<Stamp>,
}

impl State {
    /// Applies a store that is like the last one. None, and nothing has changed, where it is not, or where it is not as simple.
    #[inline]
    pub(super) fn stored_again(&mut self, read: &Read<'_>, event: &Event, like: u64) -> Option<Result<(), &'static str>> {
        let seen = self.usual.seen.filter(|_| like != 0 && like == self.usual.like)?;
        let hashes = event.hashes.slice(&read.scratch.hashes);
        let tokens = event.tokens.slice(&read.scratch.tokens);
        let scheme = seen.identity.scheme;
        let fits = tokens.len() >> u32::from(event.pairs) == scheme.size as usize * hashes.len();
        if !fits || tokens.is_empty() || event.unkeyable || event.pairs != scheme.eagle {
            return None;
        }
        self.work.extras.clear();
        let dense = Dense {
            hashes,
            tokens,
            pairs: event.pairs,
            identity: seen.identity,
            salt: match event.parent {
                None => Some(seen.salt.unwrap_or(0)),
                Some(_) => seen.salt,
            },
            spelled: Spelled {
                lora_id: event.lora_id,
                lora_name: read.bytes(event.lora_name),
                cache_salt: read.bytes(event.cache_salt),
                extra: None,
            },
            entries: Vec::new(),
            manner: seen.manner,
        };
        Some(self.take_in(&dense, event.parent))
    }

    /// Notes of which model the store was that was applied last.
    #[inline]
    pub(super) fn was_like(&mut self, like: u64) {
        self.usual.like = like;
    }

    /// The number of a removal's place. None when there are too many.
    #[inline]
    pub(super) fn place_again(&mut self, read: &Read<'_>, event: &Event, like: u64) -> Option<usize> {
        if like == 0 || like != self.usual.removal {
            self.usual.place = self.manners.placed(&super::place_of(read, event))?;
            self.usual.removal = like;
        }
        Some(self.usual.place)
    }

    /// The number of a naming, to be released; most often that of the last store.
    #[inline]
    pub(super) fn name(&mut self, identity: Identity, spelled: &Spelled<'_>) -> u32 {
        let Some(seen) = &mut self.usual.seen else {
            return self.blocks.name(identity, spelled);
        };
        if let Some(naming) = seen.naming
            && self.blocks.name_again(naming, identity.salt)
        {
            return naming.number;
        }
        let number = self.blocks.name(identity, spelled);
        seen.naming = Some(self.blocks.stamp(number));
        number
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use kvevents_index::applying::Read;
    use kvevents_index::scan::{Limits, Schema, Scratch, scan};

    use crate::cases::{batch, map, text};
    use crate::layouts;
    use crate::state::State;
    use crate::telling;

    fn hash(value: u64) -> Vec<u8> {
        [&[0xCF][..], &value.to_be_bytes()].concat()
    }

    fn list(items: Vec<Vec<u8>>) -> Vec<u8> {
        [&[0xDC][..], &(items.len() as u16).to_be_bytes(), &items.concat()].concat()
    }

    /// An event in small numbers: most are like each other, and some differ in what the last one said, or in what may not be relied on.
    fn event((what, first, count, odd): (u8, u8, u8, u8)) -> Vec<u8> {
        let (first, count) = (u64::from(first) + 1, u64::from(count % 4));
        let hashes = list((first..=first + count).map(hash).collect());
        let group = if odd == 1 { 1 } else { 0 };
        let medium = text(if odd == 2 { "CPU" } else { "GPU" });
        if what < 3 {
            return map(
                "BlockRemoved",
                &[("block_hashes", &hashes), ("medium", &medium), ("group_idx", &[group])],
            );
        }
        let parent = if what == 3 { vec![0xC0] } else { hash(first - 1) };
        let token = |value: u64| match odd {
            3 => vec![0x92, value as u8 & 0x7F, 7],
            4 => [&[0xCF][..], &(1_u64 << 40 | value).to_be_bytes()].concat(),
            _ => vec![0xCD, 1, value as u8],
        };
        let tokens = if odd == 5 { 0 } else { 2 * (count + 1) + u64::from(odd == 6) };
        let tokens = list((2 * first..2 * first + tokens).map(token).collect());
        let kind = if odd == 7 { text("mamba") } else { vec![0xC0] };
        let salt = if what == 4 { text("salt") } else { vec![0xC0] };
        let lora = if odd == 8 {
            [&[0x91][..], &list(vec![text("x")])].concat()
        } else {
            vec![0xC0]
        };
        map(
            "BlockStored",
            &[
                ("block_hashes", &hashes),
                ("parent_block_hash", &parent),
                ("token_ids", &tokens),
                ("block_size", &[2]),
                ("medium", &medium),
                ("extra_keys", &lora),
                ("group_idx", &[group]),
                ("kv_cache_spec_kind", &kind),
                ("cache_salt", &salt),
            ],
        )
    }

    proptest! {
        /// Events that are like one before mean what they mean by themselves, whatever came in between.
        #[test]
        fn what_is_like_is_the_same(
            steps in prop::collection::vec((0..9_u8, 0..24_u8, any::<u8>(), 0..40_u8), 1..200),
            clears in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
        ) {
            let schema = Schema::new(&layouts::layouts(), Limits::default()).expect("the layouts are known");
            let (mut usual, mut apart, mut scratch) = (State::default(), State::default(), Scratch::default());
            let clears: Vec<usize> = clears.iter().map(|clear| clear.index(steps.len())).collect();
            for (at, &step) in steps.iter().enumerate() {
                let event = if clears.contains(&at) { map("AllBlocksCleared", &[]) } else { event(step) };
                let payload = batch(&[event]);
                prop_assert!(scan(&payload, &schema, &mut scratch).is_some());
                let read = Read { payload: &payload, scratch: &scratch };
                usual.event(&read, &scratch.events[0], scratch.likes[0]);
                apart.event(&read, &scratch.events[0], 0);
                let counts = |state: &State| {
                    let blocks = &state.blocks;
                    (blocks.live(), blocks.dead(), blocks.extra(), blocks.named(), state.waiting.len(), state.lost)
                };
                prop_assert_eq!(counts(&usual), counts(&apart), "{}", at);
            }
            prop_assert_eq!(telling::tell(&mut usual), telling::tell(&mut apart));
        }
    }
}
