"""Plugins that run inside inference engines and replace their publishers of KV cache events by the one of kvevents.

An engine that loads plugins needs no flag: `pip install 'kvevents[native]'` in its image is enough.
`docs/guides/engines.md` is the guide.
"""
