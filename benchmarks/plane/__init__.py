"""What a plane on NATS JetStream costs, how soon it shows what engines say, and what becomes of it under faults."""
