-- How much was stored between a block's removal and its return?
--
-- A return is the store of a block that was removed before from the same worker, tier and group, in the same incarnation and
-- without a clear in between. Its distance is the number of different blocks, by key, stored there in between. A slightly larger
-- cache would have avoided short distances. Blocks without a key are left out.
--
--   tier                         tier
--   distance_from, distance_to   different blocks between removal and return
--   returns                      returns at such a distance
--   tokens                       tokens of those
--   share                        share of all returns on the tier
--   share_up_to                  share of all returns on the tier at this distance or a shorter one
SELECT
  tier,
  CASE WHEN reuse_distance < 2 THEN reuse_distance ELSE (1 << ceil(log2(reuse_distance))::INT) // 2 + 1 END AS distance_from,
  CASE WHEN reuse_distance < 2 THEN reuse_distance ELSE 1 << ceil(log2(reuse_distance))::INT END AS distance_to,
  count(*) AS returns,
  coalesce(sum(tokens), 0)::BIGINT AS tokens,
  count(*) / sum(count(*)) OVER (PARTITION BY tier) AS share,
  sum(count(*)) OVER (PARTITION BY tier ORDER BY distance_from) / sum(count(*)) OVER (PARTITION BY tier) AS share_up_to
FROM lifetimes
WHERE reuse_distance IS NOT NULL
GROUP BY tier, distance_from, distance_to
ORDER BY tier, distance_from
