"""Plugins that run inside inference engines and replace their publishers of KV cache events by the publisher of kvevents.

The environment variable `KVEVENTS_PUBLISHER` turns the plugins on: an installed kvevents alone changes nothing in an engine.
The guide is the page `guides/engines.md` of the documentation.
"""
