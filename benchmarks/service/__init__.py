"""The service against Dynamo's standalone indexer."""
