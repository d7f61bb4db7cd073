"""ZeroMQ below publishers and subscribers: sockets, CURVE keys, who may connect, transfer of many messages.

Import from its modules: `keys` runs without pyzmq, as the protocol core must.
"""
