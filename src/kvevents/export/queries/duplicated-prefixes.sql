-- How much of the fleet's memory holds blocks that other workers hold at the same time?
--
-- Blocks are equal if their keys are: the whole prefix, LoRA and salt. Times are from the publishers' clocks, which must agree. A
-- block counts once on a worker and tier, whatever its groups or copies there. Blocks without a key are left out.
--
--   tier           tier
--   workers        number of workers that hold a block at the same time
--   blocks         different blocks that so many workers held at some time
--   block_seconds  memory multiplied by time and by the number of workers
--   share          share of the block_seconds of the tier
--   spare_share    share that would be free if a single worker held each block
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
