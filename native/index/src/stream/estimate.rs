//! Reasons why answers about a stream can differ from the state of its engine, although no batch is known to be missing.

use super::Stream;
use crate::rules::evidence::Evidence;

/// A reason why answers about a stream are estimates. `kvevents.index` has a sentence for each code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimate {
    /// Some stores could not be used; the value is the number of these stores.
    SetAside(u64),
    /// The index refused blocks at its memory limit, or dropped blocks that waited for their parents.
    Limits,
    /// For some blocks on the device, the parent or the tokens were never announced; the value is the number of these blocks.
    UnknownParents(u64),
    /// The hash of a page does not cover the pages before it (some releases of SGLang). So a parent's hash can be that of several blocks.
    /// Some of these releases also announce blocks inside a prompt as first blocks.
    PageHashes,
    /// The blocks on tiers below the device are not known exactly. Either these blocks were announced without the extra keys (salts, LoRAs,
    /// media) that blocks on the device have. Or the stream did not know all of these blocks at a clear that might not have emptied these
    /// tiers.
    InexactTiers,
    /// The index cannot search the engine's groups as the engine does; the value is the code of the reason.
    Groups(&'static str),
}

impl Estimate {
    /// The code by which programs recognise the reason.
    pub fn code(self) -> &'static str {
        match self {
            Self::SetAside(_) => "set-aside",
            Self::Limits => "limits",
            Self::UnknownParents(_) => "unknown-parents",
            Self::PageHashes => "page-hashes",
            Self::InexactTiers => "inexact-tiers",
            Self::Groups(code) => code,
        }
    }

    /// Number of affected stores or blocks; 0 for reasons that do not count them.
    pub fn count(self) -> u64 {
        match self {
            Self::SetAside(count) | Self::UnknownParents(count) => count,
            Self::Limits | Self::PageHashes | Self::InexactTiers | Self::Groups(_) => 0,
        }
    }

    /// Rounds the count down to a power of two, so that the reason does not change with each batch.
    fn rounded(self) -> Self {
        let round = |count: u64| 1 << count.ilog2();
        match self {
            Self::SetAside(count) => Self::SetAside(round(count)),
            Self::UnknownParents(count) => Self::UnknownParents(round(count)),
            other => other,
        }
    }
}

impl Stream {
    /// Counts a store, or a part of a store, that the index cannot use.
    pub fn set_aside(&mut self, reason: &'static str) {
        self.counters.reject("none", reason);
        self.evidence.set_aside += 1;
    }

    /// Returns the reason why answers about this stream are estimates; None if the answers are exact.
    pub fn estimate(&self) -> Option<Estimate> {
        let Evidence {
            set_aside,
            has_refused,
            has_dropped,
            has_page_hashes,
            ..
        } = self.evidence;
        let parents = self.unknown_parents();
        if set_aside > 0 {
            Some(Estimate::SetAside(set_aside))
        } else if has_refused || has_dropped && !self.may_omit_parents() {
            Some(Estimate::Limits)
        } else if parents > 0 {
            Some(Estimate::UnknownParents(parents as u64))
        } else if has_page_hashes {
            Some(Estimate::PageHashes)
        } else if self.evidence.has_unknown_tiers() || self.evidence.lacks_keys() || self.untied(false) > 0 {
            Some(Estimate::InexactTiers)
        } else {
            self.groups.estimate(self.device_sizes()).map(Estimate::Groups)
        }
    }

    /// Number of blocks with full attention on the device whose parents or tokens were never announced.
    fn unknown_parents(&self) -> usize {
        if !self.are_pending_certain() {
            return 0;
        }
        let on_device = self.named.iter().filter(|named| named.is_on_device());
        let orphans: usize = on_device.map(|named| self.waiting.orphans_on(named.placement)).sum();
        orphans + self.untied(true)
    }

    /// Number of blocks, on the device or on tiers below it, that events name only by hashes whose tokens were never announced. Lookups do
    /// not find these blocks.
    fn untied(&self, is_on_device: bool) -> usize {
        if !self.are_pending_certain() {
            return 0;
        }
        let there = self.named.iter().filter(|named| named.is_on_device() == is_on_device);
        there.map(|named| self.waiting.untied_on(named.placement)).sum()
    }

    /// Whether the parent or the tokens of each pending block were certainly never announced. False if batches or blocks are known to be
    /// missing, or if the engine need not announce them.
    fn are_pending_certain(&self) -> bool {
        !self.waiting.is_empty() && self.evidence.is_whole && !self.may_omit_parents()
    }

    /// Whether the engine names parents that it never announces. An engine with several groups does: if block sizes differ, vLLM hashes parts
    /// of blocks and names them as parents. An engine with a window alone does too: it names blocks before the window.
    fn may_omit_parents(&self) -> bool {
        match self.groups.all() {
            [] => false,
            [group] => !group.kind.is_full(),
            _ => true,
        }
    }

    /// The estimate that `take_new_estimate` last returned.
    pub fn reported_estimate(&self) -> Option<Estimate> {
        self.reported.flatten()
    }

    /// Returns the estimate if it has changed after the last call, or if the stream was restored after the last call.
    pub fn take_new_estimate(&mut self) -> Option<Option<Estimate>> {
        let now = self.estimate().map(Estimate::rounded);
        (Some(now) != self.reported).then(|| {
            self.reported = Some(now);
            now
        })
    }

    /// Restores the evidence of a snapshot. The next delivery reports the estimate, since trust that was restored from a checkpoint might
    /// still have the estimate of another time.
    pub fn restore_evidence(&mut self, evidence: Evidence) {
        (self.evidence, self.reported) = (evidence, None);
    }
}
