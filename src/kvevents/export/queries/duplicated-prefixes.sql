-- How much of the fleet's memory holds what other workers hold too, at the same time?
--
-- Blocks are the same where their keys are: the whole prefix, LoRA and salt. Times are the publishers' clocks, which must agree.
-- A block counts once on a worker and tier, however many groups or copies it has there. Blocks without a key are left out.
--
--   tier           where
--   workers        how many workers hold a block at the same time
--   blocks         different blocks of which that was ever true
--   block_seconds  memory times time: for how long, times the workers
--   share          of the block_seconds of the tier
--   spare_share    the part that would be free if one worker alone held each block
WITH changes AS (
  SELECT tier, block_key, worker, unnest([stored_at, ended_at]) AS moment, unnest([1, -1]) AS change
  FROM lifetimes
  WHERE block_key IS NOT NULL AND stored_at IS NOT NULL AND ended_at > stored_at
), per_worker AS (
  -- One row for each moment, and how many stays of the block the worker has from then on.
  SELECT tier, block_key, worker, moment, sum(sum(change)) OVER (PARTITION BY tier, block_key, worker ORDER BY moment) AS stays
  FROM changes
  GROUP BY tier, block_key, worker, moment
), presence AS (
  SELECT *, (stays > 0)::INT - coalesce((lag(stays) OVER (PARTITION BY tier, block_key, worker ORDER BY moment) > 0)::INT, 0) AS change
  FROM per_worker
), held AS (
  SELECT
    tier,
    block_key,
    sum(sum(change)) OVER moments AS workers,
    lead(moment) OVER moments - moment AS seconds
  FROM presence
  GROUP BY tier, block_key, moment
  WINDOW moments AS (PARTITION BY tier, block_key ORDER BY moment)
), by_workers AS (
  SELECT tier, workers::BIGINT AS workers, count(DISTINCT block_key) AS blocks, sum(seconds) * workers AS block_seconds
  FROM held
  WHERE workers > 0
  GROUP BY tier, workers
)
SELECT
  tier,
  workers,
  blocks,
  block_seconds,
  block_seconds / sum(block_seconds) OVER (PARTITION BY tier) AS share,
  block_seconds / workers * (workers - 1) / sum(block_seconds) OVER (PARTITION BY tier) AS spare_share
FROM by_workers
ORDER BY tier, workers
