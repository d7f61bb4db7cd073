"""The compiled part of kvevents: the prefix index, compaction, the service's data plane, and message transfer of libzmq.

A program uses it through `kvevents`, whose version must be the same. Its names are not a public interface.
"""
