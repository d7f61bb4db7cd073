-- How old are blocks when they are removed, by their depth in the prefix?
--
-- Age is the time from store to removal. Engines do not announce hits, so the time that a block was idle is unknown. If deep
-- blocks are as old as shallow ones, whole prompts are evicted. If shallow ones are younger, new prefixes keep arriving. Blocks
-- of unknown depth are left out, as are blocks that were resident while batches were lost.
--
--   tier                    tier
--   depth_from, depth_to    blocks from the root
--   removed                 blocks that were removed
--   p10 ... p90             seconds from store to removal
--   came_back               removed blocks that were stored there again, before a clear or restart
WITH clears AS (
  SELECT placements.*, step
  FROM (SELECT DISTINCT worker, tier, kv_group FROM lifetimes) AS placements
  JOIN events ON events.kind = 'cleared' AND events.worker = placements.worker
    AND coalesce(events.tier = placements.tier, true) AND coalesce(events.kv_group = placements.kv_group, true)
), stays AS (
  SELECT lifetimes.*, lead(stored_step) OVER (
    PARTITION BY lifetimes.worker, incarnation, lifetimes.tier, lifetimes.kv_group, locality, ownership, block_key, clears.step
    ORDER BY stored_step
  ) AS next_step
  FROM lifetimes
  ASOF LEFT JOIN clears
    ON lifetimes.worker = clears.worker AND lifetimes.tier = clears.tier
    AND coalesce(lifetimes.kv_group, -1) = coalesce(clears.kv_group, -1) AND stored_step > clears.step
)
SELECT
  tier,
  CASE WHEN depth < 2 THEN depth ELSE (1 << ceil(log2(depth))::INT) // 2 + 1 END AS depth_from,
  CASE WHEN depth < 2 THEN depth ELSE 1 << ceil(log2(depth))::INT END AS depth_to,
  count(*) AS removed,
  quantile_cont(ended_at - stored_at, 0.10) AS p10,
  quantile_cont(ended_at - stored_at, 0.50) AS p50,
  quantile_cont(ended_at - stored_at, 0.90) AS p90,
  count(*) FILTER (block_key IS NOT NULL AND next_step > ended_step) AS came_back
FROM stays
WHERE ended = 'removed' AND NOT across_gap
GROUP BY tier, depth_from, depth_to
ORDER BY tier, depth_from NULLS LAST
