-- How long were the prefixes that engines found in their caches, as far as stores show it?
--
-- Events contain stores, not lookups. A store behind a resident block shows that its prefix was found, unless the same request
-- stored that block just before: engines store long prompts in pieces, and generated tokens block by block. The query counts the
-- first new block of each store, on the tier gpu, in groups whose blocks have a known depth.
--
--   prefix_from, prefix_to  resident blocks before it; 0 if the store begins at the root, which is a miss
--   stores                  number of such stores
--   certain                 hits: another block followed the same prefix before, or the engine announced the hit
--   likely                  hits unless a request paused: the parent was stored over same_request_seconds before
--   continued               the other stores: most probably one request that continues
--   hit_tokens              tokens of the prefixes of `certain` and `likely`
WITH setting AS (
  SELECT 5.0 AS same_request_seconds
), new_blocks AS (
  SELECT * FROM events WHERE kind = 'stored' AND tier = 'gpu' AND NOT held AND depth IS NOT NULL
), firsts AS (
  SELECT *, lag(step) OVER same_parent AS earlier_child
  FROM new_blocks
  WINDOW same_parent AS (PARTITION BY worker, incarnation, kv_group, parent_hash ORDER BY step)
  QUALIFY row_number() OVER (PARTITION BY worker, incarnation, seq, position ORDER BY block) = 1
), judged AS (
  SELECT
    first.depth - 1 AS prefix,
    (first.depth - 1) * first.tokens AS prefix_tokens,
    first.depth > 1 AND (first.block > 0 OR coalesce(first.earlier_child > parent.step, false)) AS certain,
    first.depth > 1 AND coalesce(first.happened_at - parent.happened_at > same_request_seconds, false) AS late
  FROM firsts AS first
  CROSS JOIN setting
  ASOF LEFT JOIN new_blocks AS parent
    ON first.worker = parent.worker AND first.incarnation = parent.incarnation AND first.kv_group = parent.kv_group
    AND first.parent_hash = parent.block_hash AND first.step > parent.step
)
SELECT
  CASE WHEN prefix < 2 THEN prefix ELSE (1 << ceil(log2(prefix))::INT) // 2 + 1 END AS prefix_from,
  CASE WHEN prefix < 2 THEN prefix ELSE 1 << ceil(log2(prefix))::INT END AS prefix_to,
  count(*) AS stores,
  count(*) FILTER (certain) AS certain,
  count(*) FILTER (late AND NOT certain) AS likely,
  count(*) FILTER (prefix > 0 AND NOT late AND NOT certain) AS continued,
  coalesce(sum(prefix_tokens) FILTER (late OR certain), 0)::BIGINT AS hit_tokens
FROM judged
GROUP BY prefix_from, prefix_to
ORDER BY prefix_from
