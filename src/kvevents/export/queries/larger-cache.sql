-- What would a larger cache have saved?
--
-- The cache of a worker, tier and group is as large as the largest number of blocks that it held. A block that was removed and
-- returned (see reuse-distance) would have stayed in a cache that is larger by its reuse distance, if blocks are evicted in the
-- order in which they were stored. A hit needs the whole prefix: of a store, blocks count up to the first that would not have
-- stayed. Two effects are not visible. Hits move blocks to the end of the order, and blocks that had stayed would have needed no
-- second place, so the real value is higher. A prompt that was stored in several pieces counts for each piece alone, so it can be
-- lower.
--
--   tier          tier; gpu saves computation, other tiers save copies
--   growth        factor by which each cache is larger
--   extra_blocks  additional blocks of all workers together
--   saved_blocks  blocks that would not have been stored again
--   saved_tokens  tokens of those
--   share         share of all blocks that were stored there, without copies
WITH sizes AS (
  SELECT unnest([1.10, 1.25, 1.50, 2.00, 4.00])::DOUBLE AS growth
), changes AS (
  SELECT worker, tier, kv_group, locality, ownership, unnest([stored_step, ended_step]) AS step, unnest([1, -1]) AS change
  FROM lifetimes
), held AS (
  -- Of one step, ends come first: a block makes room for the next.
  SELECT *, sum(change) OVER (PARTITION BY worker, tier, kv_group, locality, ownership ORDER BY step, change
    ROWS UNBOUNDED PRECEDING) AS blocks
  FROM changes
), caches AS (
  SELECT worker, tier, kv_group, locality, ownership, max(blocks) AS peak
  FROM held
  GROUP BY ALL
), returns AS (
  -- The farthest of the blocks up to this one in its store; infinitely far where one was never removed.
  SELECT worker, tier, kv_group, locality, ownership, tokens, max(coalesce(reuse_distance, 'infinity'::DOUBLE)) OVER (
    PARTITION BY worker, incarnation, stored_seq, stored_position ORDER BY stored_block
  ) AS distance
  FROM lifetimes
), judged AS (
  SELECT caches.tier, growth, tokens, distance <= ceil(peak * (growth - 1) - 1e-9) AS saved
  FROM returns
  JOIN caches ON returns.worker = caches.worker AND returns.tier = caches.tier
    AND returns.kv_group IS NOT DISTINCT FROM caches.kv_group
    AND returns.locality IS NOT DISTINCT FROM caches.locality AND returns.ownership IS NOT DISTINCT FROM caches.ownership
  CROSS JOIN sizes
), extra AS (
  SELECT tier, growth, sum(ceil(peak * (growth - 1) - 1e-9))::BIGINT AS extra_blocks
  FROM caches CROSS JOIN sizes
  GROUP BY ALL
)
SELECT
  tier,
  growth,
  extra_blocks,
  count(*) FILTER (saved) AS saved_blocks,
  coalesce(sum(tokens) FILTER (saved), 0)::BIGINT AS saved_tokens,
  count(*) FILTER (saved) / count(*) AS share
FROM judged
JOIN extra USING (tier, growth)
GROUP BY tier, growth, extra_blocks
ORDER BY tier, growth
