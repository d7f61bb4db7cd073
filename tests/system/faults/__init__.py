"""Each fault of an engine, its network or the service itself, done to our service and to Dynamo's standalone indexer."""
