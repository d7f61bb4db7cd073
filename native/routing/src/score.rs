//! Scores of workers. A score depends on the share of a prompt that the worker's cache saves, and on the worker's relative load.
//!
//! All terms are ratios: the share of a prompt, from 0 to 1; work divided by the length of the prompt; and work divided by the mean work.
//! `/v1/select` and the policy `prefix-aware` of `kvevents.routing` choose by these scores.

/// Difference up to which scores, or shares, are equal. Sums of the same values in different orders differ by less.
pub const TOLERANCE: f64 = 1e-9;

/// The weight of cached tokens on each tier. A tier without a weight has the lowest weight.
#[derive(Clone, Debug)]
pub struct TierWeights {
    /// The weights in descending order, each with its original position.
    best_first: Vec<(usize, f64)>,
    lowest: f64,
}

impl TierWeights {
    /// Creates the weights from numbers between 0 and 1.
    pub fn new(weights: impl IntoIterator<Item = f64>) -> Self {
        let mut best_first: Vec<(usize, f64)> = weights.into_iter().enumerate().collect();
        best_first.sort_by(|one, other| other.1.total_cmp(&one.1));
        let lowest = best_first.last().map_or(0.0, |(_, weight)| *weight);
        Self { best_first, lowest }
    }

    /// Returns these weights, each multiplied by the factor of its position, or by `other` if `factor` returns None.
    ///
    /// The order of the tiers does not change, because the prefix of a slower tier includes those of faster tiers: a token of a faster tier
    /// must not count with the weight of a slower one.
    pub fn with_factors(&self, factor: impl Fn(usize) -> f64, other: f64) -> Self {
        Self {
            best_first: (self.best_first.iter())
                .map(|&(at, weight)| (at, weight * factor(at)))
                .collect(),
            lowest: self.lowest * other,
        }
    }

    /// Returns the weighted share of cached tokens in a prompt of `whole` tokens, from 0 to 1; 0 for an empty prompt.
    ///
    /// `tokens` is the length of the prefix over all tiers. `reach` takes the position of a weight, and returns the length of the prefix on
    /// its tier and on faster tiers. Each token counts on the best tier whose prefix includes it.
    pub fn saved_share(&self, tokens: u64, whole: u64, reach: impl Fn(usize) -> u64) -> f64 {
        if let Some(&(best, worth)) = self.best_first.first()
            && 0 < tokens
            && tokens <= whole
            && reach(best) >= tokens
        {
            return worth * tokens as f64 / whole as f64;
        }
        let (mut saved, mut covered, end) = (0.0, 0, whole.min(tokens));
        for &(tier, weight) in &self.best_first {
            let reached = reach(tier);
            if reached > covered {
                let reached = reached.min(end);
                saved += weight * (reached as f64 - covered as f64);
                covered = reached;
                if covered == end {
                    break;
                }
            }
        }
        (saved + self.lowest * (end as f64 - covered as f64)) / whole.max(1) as f64
    }
}

/// Returns the trust in a prefix of `tokens` tokens: the mean of the weights of its tokens.
///
/// The first `certain` tokens, which the worker certainly holds, have the weight `own` of the worker's stream. All others have the smaller
/// of `uncertain_weight` and `own`. So an uncertain block reduces the credit for itself and for later blocks, but not for the whole prefix.
pub fn trust_weight(tokens: u64, certain: u64, own: f64, uncertain_weight: f64) -> f64 {
    if certain >= tokens {
        return own;
    }
    let share = certain as f64 / tokens as f64;
    own * share + own.min(uncertain_weight) * (1.0 - share)
}

/// Weights of loads, and the limits above which a worker is hot: the cache of a hot worker does not count.
#[derive(Clone, Copy, Debug)]
pub struct LoadWeights {
    /// Weight of the first load term: work divided by the length of the prompt.
    pub wait: f64,
    /// Weight of the second load term: work divided by the mean work of all candidates.
    pub mean: f64,
    /// Work that is added to each candidate's work before the division by the mean.
    pub base: f64,
    /// A worker is hot if its requests exceed the mean requests of the other workers multiplied by this factor. Infinity means no limit.
    pub guard: f64,
    /// Number of requests up to which a worker is not hot, however few requests the other workers have. The exception is a worker that is
    /// chosen repeatedly for more than its share. Such a worker is hot if three conditions hold. Its choices exceed this number and `guard`
    /// times the mean of the other workers. It has more requests than another candidate. One more request would exceed `guard` times the
    /// mean requests of the other workers.
    pub guard_requests: f64,
}

/// A candidate for a choice.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The share of the prompt that the candidate's cache saves, multiplied by the trust in it.
    pub credit: f64,
    /// Work of the candidate, in any unit that is the same for all candidates.
    pub work: f64,
    /// Number of the candidate's requests.
    pub requests: f64,
    /// Number of recent choices of the candidate; 0 if choices do not count.
    pub chosen: f64,
}

/// The score of a candidate and its parts.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    /// The score, the smaller the better: the sum of `uncached` and `load`.
    pub score: f64,
    /// The share of the prompt that the candidate would compute.
    pub uncached: f64,
    /// The sum of the weighted load terms.
    pub load: f64,
    /// Whether the candidate's cache does not count, because the candidate has too many requests.
    pub is_hot: bool,
}

/// Returns the scores of candidates for a prompt of `whole` tokens.
pub fn weigh(candidates: &[Candidate], whole: u64, weights: &LoadWeights) -> Vec<Score> {
    let most_requests = max_share(candidates.iter().map(|one| one.requests), weights.guard);
    let least_requests = candidates.iter().map(|one| one.requests).fold(f64::INFINITY, f64::min);
    let most_chosen = max_share(candidates.iter().map(|one| one.chosen), weights.guard).max(weights.guard_requests);
    let wait = weights.wait / whole.max(1) as f64;
    let score = |(one, relative): (&Candidate, f64)| {
        let has_many = one.requests > most_requests && one.requests > weights.guard_requests;
        let has_more = one.requests > least_requests && one.requests + 1.0 > most_requests;
        let is_hot = has_many || has_more && one.chosen > most_chosen;
        let uncached = if is_hot { 1.0 } else { 1.0 - one.credit };
        let load = wait * one.work + weights.mean * relative;
        Score {
            score: uncached + load,
            uncached,
            load,
            is_hot,
        }
    };
    candidates
        .iter()
        .zip(relative_loads(candidates, weights.base))
        .map(score)
        .collect()
}

/// Returns the largest count that is not more than a worker's share. A count `r` is more if `r > guard * (all - r) / (n - 1)`; this is
/// solved for `r`.
pub(crate) fn max_share(counts: impl ExactSizeIterator<Item = f64>, guard: f64) -> f64 {
    let others = counts.len().saturating_sub(1) as f64;
    let all: f64 = counts.sum();
    if others > 0.0 && guard.is_finite() {
        guard * all / (others + guard)
    } else {
        all
    }
}

/// Returns the positions of the candidates with the smallest score. If there are several, returns only those that compute least.
pub fn best_of(scores: &[Score]) -> Vec<usize> {
    let least = |of: fn(&Score) -> f64, among: Vec<usize>| -> Vec<usize> {
        let bound = among.iter().map(|&at| of(&scores[at])).fold(f64::INFINITY, f64::min) + TOLERANCE;
        among.into_iter().filter(|&at| of(&scores[at]) <= bound).collect()
    };
    let equal = least(|one| one.score, (0..scores.len()).collect());
    least(|one| one.uncached, equal)
}

/// Returns the positions of the workers that can be chosen, which are those with the smallest distance. So a worker without a connection
/// can be chosen only if no worker has a connection.
pub fn nearest(distances: &[u8]) -> Vec<usize> {
    let least = distances.iter().min();
    (0..distances.len()).filter(|&at| Some(&distances[at]) == least).collect()
}

/// Returns the loads divided by their mean; only zeros if all loads are 0. All loads are first divided by the largest one, so that their
/// sum does not overflow.
fn relative_loads(candidates: &[Candidate], base: f64) -> Vec<f64> {
    let most = candidates.iter().map(|one| one.work + base).fold(0.0, f64::max);
    if most == 0.0 {
        return vec![0.0; candidates.len()];
    }
    let shares: Vec<f64> = candidates.iter().map(|one| (one.work + base) / most).collect();
    let mean = sum(&shares) / shares.len() as f64;
    shares.into_iter().map(|share| share / mean).collect()
}

/// The sum of numbers, with a single rounding (Shewchuk's algorithm).
fn sum(values: &[f64]) -> f64 {
    let mut partials: Vec<f64> = Vec::new();
    for &value in values {
        let (mut rest, mut count) = (value, 0);
        for at in 0..partials.len() {
            let other = partials[at];
            let (large, small) = if rest.abs() < other.abs() {
                (other, rest)
            } else {
                (rest, other)
            };
            let high = large + small;
            let low = small - (high - large);
            if low != 0.0 {
                partials[count] = low;
                count += 1;
            }
            rest = high;
        }
        partials.truncate(count);
        partials.push(rest);
    }
    // Adds partial sums, the largest first, until a rounding occurs. The remaining partial sums decide how a tie is rounded.
    let mut left = partials.into_iter().rev().peekable();
    let mut high = left.next().unwrap_or(0.0);
    while let Some(next) = left.next() {
        let before = high;
        high = before + next;
        let low = next - (high - before);
        if low != 0.0 {
            let same_sign = left.peek().is_some_and(|rest| (low < 0.0) == (*rest < 0.0) && *rest != 0.0);
            if same_sign {
                let twice = low * 2.0;
                let rounded = high + twice;
                if twice == rounded - high {
                    high = rounded;
                }
            }
            break;
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_rounded_once() {
        assert_eq!(sum(&[0.1; 10]), 1.0);
        assert_eq!(sum(&[1e16, 1.0, -1e16]), 1.0);
        assert_eq!(sum(&[1.0, 1e-16, 1e-16]), 1.000_000_000_000_000_2);
        assert_eq!(sum(&[]), 0.0);
    }

    #[test]
    fn tokens_count_for_the_best_tier_that_reaches_them() {
        let saved = |weights: [f64; 3], tokens, whole, tiers: [u64; 3]| {
            TierWeights::new(weights).saved_share(tokens, whole, |at| tiers[at])
        };
        let weights = [1.0, 0.8, 0.5];
        assert_eq!(saved(weights, 100, 200, [100, 100, 100]), 0.5);
        assert_eq!(saved(weights, 100, 100, [50, 100, 100]), 0.5 + 0.8 * 0.5);
        assert_eq!(saved(weights, 100, 100, [0, 0, 0]), 0.5);
        assert_eq!(saved([0.0, 0.8, 1.0], 100, 100, [50, 50, 100]), 1.0);
    }

    #[test]
    fn tokens_stay_with_their_tier_whatever_its_factor() {
        let weights = TierWeights::new([1.0, 0.8, 0.5]).with_factors(|at| if at == 1 { 0.5 } else { 1.0 }, 1.0);
        assert_eq!(weights.saved_share(100, 100, |at| [50, 100, 100][at]), 0.5 + 0.4 * 0.5);
        assert_eq!(weights.saved_share(100, 100, |at| [50, 50, 100][at]), 0.5 + 0.5 * 0.5);
    }

    #[test]
    fn uncertain_tokens_cost_only_their_own_credit() {
        assert_eq!(trust_weight(100, 100, 0.8, 0.5), 0.8);
        assert_eq!(trust_weight(0, 0, 1.0, 0.5), 1.0);
        assert_eq!(trust_weight(100, 75, 1.0, 0.5), 0.875);
        assert_eq!(trust_weight(100, 0, 1.0, 0.5), 0.5);
        assert_eq!(trust_weight(100, 75, 0.25, 0.5), 0.25);
    }

    #[test]
    fn only_the_nearest_workers_can_be_chosen() {
        assert_eq!(nearest(&[2, 1, 2, 1]), [1, 3]);
        assert!(nearest(&[]).is_empty());
    }
}
