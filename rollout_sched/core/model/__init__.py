"""The nouns: events, actions, roles, and the data classes."""
