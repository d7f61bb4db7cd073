"""Plugins that run inside inference engines and replace their publishers of KV cache events by the one of kvevents.

An engine that loads plugins needs no flag: `pip install 'kvevents[native]'` in its image is enough.
The guide is the page `guides/engines.md` of the documentation.
"""
