"""Answers of a fleet whose index is spread over several replicas: what they ask each other, and what is made of it."""
