"""The prefix index against Dynamo's."""
