"""The engines' own modules, on our publisher: swap the import and the program runs.

`kvevents.compat.vllm` stands in for `vllm.distributed.kv_events`, `kvevents.compat.sglang` for
`sglang.srt.disaggregation.kv_events`. Neither imports its engine.
"""
