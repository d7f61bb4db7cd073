-- How long do blocks stay, by tier and KV cache group?
--
-- Percentiles cover blocks that were removed one by one. Blocks that a clear or a restart ended, or that were resident when the
-- recording ended, stayed at least as long: if there are many of them, the percentiles are too short. Blocks that were resident
-- while batches were lost are `unsure` and not in the percentiles: they can have been removed and stored again.
--
--   tier, kv_group  tier and KV cache group
--   residencies     residencies of blocks there
--   removed         residencies that ended with a removal
--   cleared         residencies that ended with a clear
--   cut_off         residencies whose end is unknown: a restart, or the end of the recording
--   unsure          residencies during which batches were lost, however they ended
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
