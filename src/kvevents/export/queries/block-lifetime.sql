-- How long do blocks stay, by tier and KV cache group?
--
-- Percentiles are of blocks that were removed one by one. Those that a clear or a restart took, or that were there when the
-- recording ended, stayed for as long as that at least: where they are many, the percentiles are too short. Blocks that were
-- resident while batches were lost are `unsure` and left out of the percentiles: they may have gone and come back unseen.
--
--   tier, kv_group  where
--   residencies     stays of blocks there
--   removed         of them, those that ended with a removal
--   cleared         those that a clear ended
--   cut_off         those whose end is not known: a restart, or the end of the recording
--   unsure          those with a gap meanwhile, however they ended
--   p10 ... max     seconds from store to removal
SELECT
  tier,
  kv_group,
  count(*) AS residencies,
  count(*) FILTER (ended = 'removed') AS removed,
  count(*) FILTER (ended = 'cleared') AS cleared,
  count(*) FILTER (ended IN ('restart', 'end', 'dropped')) AS cut_off,
  count(*) FILTER (across_gap) AS unsure,
  quantile_cont(ended_at - stored_at, 0.10) FILTER (ended = 'removed' AND NOT across_gap) AS p10,
  quantile_cont(ended_at - stored_at, 0.50) FILTER (ended = 'removed' AND NOT across_gap) AS p50,
  quantile_cont(ended_at - stored_at, 0.90) FILTER (ended = 'removed' AND NOT across_gap) AS p90,
  quantile_cont(ended_at - stored_at, 0.99) FILTER (ended = 'removed' AND NOT across_gap) AS p99,
  max(ended_at - stored_at) FILTER (ended = 'removed' AND NOT across_gap) AS max
FROM lifetimes
GROUP BY tier, kv_group
ORDER BY tier, kv_group
