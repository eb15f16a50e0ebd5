"""What outlives a scheduler, and how the next one goes on from it."""
