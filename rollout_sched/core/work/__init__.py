"""The requests and their attempts, and what follows for both from an event."""
