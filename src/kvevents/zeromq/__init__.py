"""ZeroMQ below publishers and subscribers: sockets, CURVE keys, admission of clients, transfer of many messages.

Import from its modules: `keys` runs without pyzmq, because the protocol core imports it.
"""
