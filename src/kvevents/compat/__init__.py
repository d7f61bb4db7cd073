"""Drop-in replacements of the engines' event modules, with the publisher of kvevents.

`kvevents.compat.vllm` replaces `vllm.distributed.kv_events`, and `kvevents.compat.sglang` replaces
`sglang.srt.disaggregation.kv_events`. A program only changes its import. Neither module imports its engine.
"""
